"""The zygote: one process for each node that has imported torch and forks workers in milliseconds.

`client` is the agent's side, and `server` the zygote's own loop. `child` makes a forked process
equal to a fresh interpreter, and `fitness` decides when that is impossible. `store` serves a
process-group store. Only the processes that run `server` or `store` import torch.
"""

# torch, and what the first optimizer imports: 823 modules by way of torch._dynamo, half of a
# worker's start (torch 2.13, two cores, 2026-11-20: 0.56 s and 0.67 s). Then what init() imports,
# and what --in-place does: 40 ms in each worker (2026-11-30).
DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    "torch.profiler",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "elastane.worker.job",
    "elastane.synchrony.ordered",
    "encodings.idna",
)
