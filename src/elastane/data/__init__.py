"""Elastic data: an order of samples that any process can compute, and the job's position in it.

`ElasticBatchSampler` (by index) and `ElasticShards` (by file) divide each step among the ranks of
the current world. `Feed` pairs a DataLoader's batches with these shares and rewinds the loader.
`ElasticStream` divides data of unknown length, from one of `sources`. `ledger`, `permutation`,
`shard_ledger` and `stream_position` are pure. `ElasticSampler` is for scripts that keep torch's
batches.
"""
