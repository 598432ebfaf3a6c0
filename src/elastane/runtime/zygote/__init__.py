"""The zygote: one process per node that has imported torch and forks workers in milliseconds.

`client` is the agent's side, `server` the loop of the zygote itself, `child` what makes a forked
process indistinguishable from a fresh interpreter, `fitness` says when it would not be, `store`
serves a process-group store. Only the processes that run `server` or `store` import torch.
"""
