"""Functions that torch.compile leaves alone, and values that it must not keep.

`torch.compiler.disable` would do the same, but imports the compiler, which takes 2 s. The names of
torch's modules are private to it (2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Callable[..., Any])

# The part of the compiler that evaluates calls, and what lies between it and a group.
_TRACER = "torch._dynamo.variables."
_BETWEEN = ("torch.distributed.", "elastane.")


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


def is_traced(frame: FrameType | None) -> bool:
    """Whether torch.compile makes a call to keep its result; `frame` is a part of that call."""
    while frame is not None and _module(frame).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_TRACER)


def forget_compiled_code() -> None:
    """Let torch.compile compile all code again, as the values that it has kept will change."""
    from torch import _dynamo

    _dynamo.reset()


def refuse_to_keep(what: str) -> None:
    """Break the graph of compiled code that would keep the result of the caller as a constant.

    torch.compile asks for the rank and world size once, while it compiles. After a loss the code
    would still divide by the former size. After a break it asks each time. Compiled code that asks
    a process group itself fails: its methods break no graph.
    """
    if not is_traced(sys._getframe(1)):
        return
    from torch._dynamo.exc import Unsupported

    raise Unsupported(
        f"{what} inside of torch.compile: it changes as workers are lost or join; expected: a call"
        " that is made each time. Next: call torch.distributed.get_world_size() or get_rank(), not"
        " methods of a process group, and compile without fullgraph=True"
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
