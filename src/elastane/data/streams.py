"""Where random streams begin for a piece of work, so that it is the same wherever it is done.

Python's, NumPy's and torch's (of the CPU, and of the current device where there is one): all begin
at what some whole numbers say. Must not know of ranks or worlds. Torch and CUDA are touched only
where the program has them.
"""

from __future__ import annotations

import random
import sys

from elastane.data.permutation import mixed

__all__ = ["FOR_BUILD", "FOR_LOADER", "FOR_SHARD", "begin_streams"]

# What a stream is for comes first among its words: no two purposes share one.
FOR_BUILD, FOR_LOADER, FOR_SHARD = 0, 1, 2
_MASK32 = 2**32 - 1


def begin_streams(*words: int) -> None:
    """Begin all streams of this process at `words`; each of them begins elsewhere."""
    seed = mixed(*words) >> 1
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # From the same words NumPy's generator would be Python's.
        other = mixed(*words, 1)
        numpy.random.seed([other & _MASK32, other >> 32])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
