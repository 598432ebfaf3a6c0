"""The signs of progress that a worker leaves on its page: what it is at, and that it moves.

Owns the marks of this worker on its status page; the agent judges from them which worker hangs
(`protocol.hangs`). A sign costs a store to memory, and nothing where there is no page. Torch's own
callbacks tell a compilation from a body that stands still, once torch has loaded its compiler.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from elastane.process.status_page import WorkerPage
from elastane.protocol.hangs import Activity

_DYNAMO = "torch._dynamo"


class Pulse:
    """One worker's; without a page (`page` is None) it shows nothing."""

    def __init__(self) -> None:
        self._page: WorkerPage | None = None
        self._activity = Activity.APART
        self._compiler: Any = None

    def show_on(self, page: WorkerPage | None) -> None:
        """Show on this page from now on: until the first step that the worker is not in any."""
        self._page = page
        self.at(Activity.APART)

    def at(self, activity: Activity) -> None:
        """Show what the worker is at from now on."""
        self._activity = activity
        if self._page is not None:
            self._page.be_at(activity)
            if self._compiler is None and activity is Activity.BODY:
                self._watch_compiler()

    def beat(self) -> None:
        """Show that the worker moves; from any thread."""
        if self._page is not None:
            self._page.beat()

    def step_made(self) -> None:
        """Count a step that is done, and what follows it as the user's own."""
        if self._page is not None:
            self._page.step_made()
        self.at(Activity.BETWEEN)

    def close(self) -> None:
        """Show that the worker is in no step any more, and hear no more of the compiler."""
        self.at(Activity.APART)
        self._page = None
        if self._compiler is not None:
            with contextlib.suppress(ValueError):  # The user may have cleared them all.
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
