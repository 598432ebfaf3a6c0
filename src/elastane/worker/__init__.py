"""What runs inside a worker: joining the job, steps, and recovery in place.

`job` is the loop that a script sees, and `step` the body of one step. `world` moves the worker from
a world that broke into the next one. `healing`, `shards` and `replicas` bring its state to that of
the others. `deterministic` computes a step as virtual shards, `retry` repeats collectives between
steps, and `undo` takes back a step that failed. `call` and `record` are for functions and for
scripts that do not use `Job`.
"""
