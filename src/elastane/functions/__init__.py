"""Functions as jobs: `elastane.launch` for notebooks and scripts, over an agent in a child process.

The agent adopts and ends the orphans of its workers, so it cannot live in a process with children
of its own. It is `elastane run` in a child process, which ends with the caller. Nothing of the
caller is forked. This package does not import torch.
"""
