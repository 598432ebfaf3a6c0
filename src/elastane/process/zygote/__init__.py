"""The zygote: one process per node that has imported torch and forks workers in milliseconds.

`client` is the agent's side, `server` the loop of the zygote itself, `child` what makes a forked
process indistinguishable from a fresh interpreter, `fitness` says when it would not be, `store`
serves a process-group store. Only the processes that run `server` or `store` import torch.
"""

# torch, and what the first optimizer imports behind it: 823 modules by way of torch._dynamo,
# half of a worker's start (torch 2.13, two cores, 2026-11-20: 0.56 s and 0.67 s).
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
)
