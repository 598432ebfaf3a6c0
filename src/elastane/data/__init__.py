"""Elastic data: an order of samples that any process can compute, and the job's position in it.

`ElasticBatchSampler` (by index) and `ElasticShards` (by file) deal each step to whatever world
there is; `Feed` pairs a DataLoader's batches with their shares and rewinds it. `ElasticStream`
deals data of unknown length, from one of `sources`. `ledger`, `permutation`, `shard_ledger` and
`stream_position` are pure. `ElasticSampler` is for scripts that keep torch's batches.
"""
