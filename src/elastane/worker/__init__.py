"""What runs inside a worker: joining the job, steps, and recovery in place.

`job` is the loop that a script sees, and `step` the body of one step; `mode` says how a step is
computed, and `undo` takes back one that failed. `world` moves the worker from a world that broke
into the next one, as the agent orders by the `control_socket`. `healing`, `shard_healing` and
`comparison` bring its state to that of the others, and `retry` repeats collectives between steps.

`elastane` exports `job.init`, `Job`, `Step`, `record.record` and `drain.should_checkpoint`. The
command line reads a `digest_log`, and `elastane.functions` calls functions by `call`. `call`,
`record` and `drain` never import torch.
"""
