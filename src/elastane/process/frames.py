"""Describes where a thread of a worker is: a collective or a call, and the user's line.

Reads frames only, from any thread, within microseconds. The description may be out of date a moment
later, so it is used only for a wait that has lasted for seconds.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import FrameType

from elastane.protocol.limits import WHERE_CHARS_MAX
from elastane.protocol.words import UNKNOWN_PLACE

# Modules whose frames mean that a person debugs: pdb, what is built on it, and editors.
_DEBUGGERS = frozenset(("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy"))

_DDP = "torch.nn.parallel.distributed"

# Internal steps of DDP, which are less telling than what they call.
_DDP_WAY = frozenset(("forward", "_pre_forward", "_post_forward", "_run_ddp_forward"))

_COLLECTIVES = "torch.distributed.distributed_c10d"

_BACKWARD = "torch.autograd"

# Python's own library: its lines say less than those that call them.
_STANDARD = f"{sysconfig.get_path('stdlib')}/"

# A script that recovers in place runs below a frame of ours whose module is named __main__.
_OURS = f"{PurePath(__file__).parents[1]}/"
_EXAMPLES = f"{_OURS}examples/"  # scripts like those of a user

_FRAMES_MAX = 1000


def main_frames() -> list[FrameType]:
    """Return the frames of the main thread, the innermost first."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return [*_upwards(frame)]


def is_debugged(frames: Sequence[FrameType]) -> bool:
    """Whether a debugger holds this thread, which may take any time."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in frames)


def described(frames: Sequence[FrameType]) -> str:
    """Describe where a thread is, as "_sync_buffers (train.py:31, main)"."""
    inner_frames: list[FrameType] = []
    for frame in frames:
        if not _is_ours_or_torchs(frame):
            place = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
            what = _called(inner_frames) or frame.f_code.co_name
            return f"{what} ({place}, {frame.f_code.co_name})"[:WHERE_CHARS_MAX]
        inner_frames.append(frame)
    is_ours = bool(inner_frames) and _is_ours(inner_frames[-1].f_code.co_filename)
    return (_called(inner_frames, is_ours=is_ours) or UNKNOWN_PLACE)[:WHERE_CHARS_MAX]


def _called(inner_frames: Sequence[FrameType], *, is_ours: bool = False) -> str:
    """Return what the user's code has called, given the frames inside of it; "" without frames.

    `is_ours`: elastane called them, not the user's code, so that only a collective has a name.
    """
    outside_in = [*reversed(inner_frames)]
    in_ddp = [frame.f_code.co_name for frame in outside_in if _module(frame) == _DDP]
    if in_ddp:
        # DDP agrees on its buckets in C++, below its last Python frame.
        return next((name for name in in_ddp if name not in _DDP_WAY), in_ddp[-1])
    for frame in outside_in:
        if _module(frame) == _COLLECTIVES:
            return frame.f_code.co_name
    if any(_module(frame).startswith(_BACKWARD) for frame in outside_in):
        return "all_reduce of a backward"
    return outside_in[0].f_code.co_qualname if outside_in and not is_ours else ""


def _is_ours_or_torchs(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if _is_ours(file):
        return True
    if file.startswith(("<frozen ", _STANDARD)) and "/site-packages/" not in file:
        return True
    return _module(frame).partition(".")[0] in ("torch", "elastane", "threading", "contextlib")


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_EXAMPLES)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _upwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
