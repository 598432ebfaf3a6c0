"""The library inside a worker: joining, steps, recovery in place, sharded and deterministic."""
