"""Seeds all random streams for a piece of work, so that it is the same in every process.

Covers Python's, NumPy's and torch's streams (of the CPU, and of the current device if there is
one). It knows nothing of ranks or worlds. Torch and CUDA are used only if the program uses them.
"""

from __future__ import annotations

import random
import sys

from elastane.data.permutation import mixed

# The first word of a stream is its purpose, so that two purposes never have the same stream.
FOR_BUILD, FOR_LOADER, FOR_SHARD = 0, 1, 2
_MASK32 = 2**32 - 1


def begin_streams(*words: int) -> None:
    """Seed all streams of this process from `words`; each of them differently."""
    seed = mixed(*words) >> 1
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Both generators use one algorithm: with the same words they would return equal numbers.
        other = mixed(*words, 1)
        numpy.random.seed([other & _MASK32, other >> 32])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
