"""Tells a rank that waits for the others longer than they can be late: mostly they do not come.

Of a script that calls a Checkpointer on one rank alone, nothing else would be seen than that it
hangs. A thread of the process looks now and then, so that a wait itself costs next to nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

_log = logging.getLogger("elastane.checkpoint")
_PATIENCE_S = 30.0


class PeerTimeout:
    """A context around each wait of one thread; told once for each."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()
        if self._thread is None or not self._thread.is_alive():  # It is not, after a fork.
            self._thread = threading.Thread(target=self._look, name="elastane-wait", daemon=True)
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._since_s = None

    def _look(self) -> None:
        told_s = None
        while True:
            time.sleep(self._patience_s / 4)
            since_s = self._since_s
            if since_s in (None, told_s) or time.monotonic() - since_s < self._patience_s:
                continue
            told_s = since_s
            _log.warning(
                "this rank has waited %.0f s for the others: restore(), maybe_save() and save() are"
                " called by all ranks, at the same steps [checkpoint-ranks]",
                self._patience_s,
            )
