"""Functions as jobs: `elastane.launch` for notebooks and scripts, over an agent in a child process.

The agent adopts and ends what workers leave behind, so it must not live in a process that has
children of its own: it is `elastane run`, started beside the caller and ended with it. Nothing of
the caller is forked. Knows nothing of torch.
"""
