"""The progress reports of a worker: its activity, its signs of progress, and where it waits.

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
from collections.abc import Iterator
from typing import Any

from elastane.process import step_meter
from elastane.process.status_page import WorkerPage
from elastane.protocol.hangs import Activity

_DYNAMO = "torch._dynamo"


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
        """Report a sign of progress; from any thread."""
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
        step_meter.mark(step_meter.StepMark.STEP)
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
