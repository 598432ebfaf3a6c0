"""What a worker reports of its progress: its activity, that it moves, and where it waits.

Owns this worker's marks on its status page; from them the agent judges which worker hangs
(`protocol.hangs`). A mark costs one store to memory, and nothing without a page. Once torch has
loaded its compiler, torch's callbacks tell a compilation from a body that does not progress.

On the agent's request, another thread reads the frames of the main thread and describes its place:
a collective, and the user's line. That costs microseconds and interrupts nothing. The description
may be out of date a moment later. It is used only for a wait that has lasted for seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any

from elastane.process.status_page import WorkerPage
from elastane.protocol.hangs import Activity
from elastane.protocol.limits import WHERE_CHARS_MAX

_DYNAMO = "torch._dynamo"

# Modules whose frames mean that a person debugs: pdb, what is built on it, and editors.
_DEBUGGERS = frozenset(("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy"))

_DDP = "torch.nn.parallel.distributed"

# Internal steps of DDP, which are less telling than what they call.
_DDP_WAY = frozenset(("forward", "_pre_forward", "_post_forward", "_run_ddp_forward"))

_COLLECTIVES = "torch.distributed.distributed_c10d"

_BACKWARD = "torch.autograd"

_FRAMES_MAX = 1000


class ProgressReporter:
    """The progress reports of one worker; without a page it reports nothing."""

    def __init__(self) -> None:
        self._page: WorkerPage | None = None
        self._activity = Activity.APART
        self._compiler: Any = None

    def show_on(self, page: WorkerPage | None) -> None:
        """Report on this page from here on, at first that the worker is in no step."""
        self._page = page
        self.at(Activity.APART)

    def at(self, activity: Activity) -> None:
        """Report the worker's activity."""
        self._activity = activity
        if self._page is not None:
            self._page.be_at(activity)
            if self._compiler is None and activity is Activity.BODY:
                self._watch_compiler()

    def beat(self) -> None:
        """Report that the worker moves; from any thread."""
        if self._page is not None:
            self._page.beat()

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Report that this thread aborts the process group: the agent limits how long that takes.

        Nothing else of this process can end an abort that does not return.
        """
        page = self._page
        if page is not None:
            page.abort(True)
        yield
        if page is not None:
            page.abort(False)

    def step_made(self) -> None:
        """Count a completed step; the code that follows is the user's own."""
        if self._page is not None:
            self._page.step_made()
        self.at(Activity.BETWEEN)

    def close(self) -> None:
        """Report that the worker is in no step, and remove the callbacks from the compiler."""
        self.at(Activity.APART)
        self._page = None
        if self._compiler is not None:
            with contextlib.suppress(ValueError):  # The user may have cleared all callbacks.
                self._compiler.remove_start_callback(self._compiles)
                self._compiler.remove_end_callback(self._has_compiled)
            self._compiler = None

    def _watch_compiler(self) -> None:
        dynamo = sys.modules.get(_DYNAMO)
        handler = getattr(getattr(dynamo, "callback", None), "callback_handler", None)
        if handler is not None:
            self._compiler = handler
            handler.register_start_callback(self._compiles)
            handler.register_end_callback(self._has_compiled)

    def _compiles(self, _args: Any) -> None:
        if self._page is not None:
            self._page.be_at(Activity.COMPILING)

    def _has_compiled(self, _args: Any) -> None:
        if self._page is not None:
            self._page.be_at(self._activity)


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
    return (_called(inner_frames) or "an unknown place")[:WHERE_CHARS_MAX]


def _called(inner_frames: Sequence[FrameType]) -> str:
    """Return what the user's code has called, given the frames inside of it; "" without frames."""
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
    return outside_in[0].f_code.co_qualname if outside_in else ""


def _is_ours_or_torchs(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] in ("torch", "elastane", "threading", "contextlib")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _upwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
