"""Functions that torch.compile leaves alone.

`torch.compiler.disable` would do the same, but imports the compiler, which takes 2 s. The names of
torch's modules are private to it (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Callable[..., Any])


def skipped(function: T) -> T:
    """Make torch.compile skip the frames of this function and what it calls; return it.

    In a compiled model, C++ calls the group's methods while the tracer listens, which refuses
    attributes of a process group.
    """
    tracer = torch._C._dynamo.eval_frame
    skip = tracer._FrameAction.SKIP
    strategy = tracer._FrameExecStrategy(skip, skip)
    tracer.set_code_exec_strategy(function.__code__, strategy)
    return function


def untraced(function: T) -> T:
    """Make compiled code call this function as it is, for a hook of an optimizer; return it.

    Traced, its changes would be made once the compiled step is over.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped(function)
