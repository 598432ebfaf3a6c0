"""Warns on a rank that waits for others so long that they probably never come.

Otherwise a script that calls a Checkpointer on one rank alone would just hang. A thread checks
periodically, so that a wait itself costs almost nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

_log = logging.getLogger("elastane.checkpoint")
_WARN_S = 30.0


class PeerTimeout:
    """A context manager around each wait of one thread; warns once for each wait."""

    def __init__(self, warn_s: float = _WARN_S) -> None:
        self._warn_s = warn_s
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()
        if self._thread is None or not self._thread.is_alive():  # It is dead after a fork.
            self._thread = threading.Thread(target=self._watch, name="elastane-wait", daemon=True)
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._since_s = None

    def _watch(self) -> None:
        warned_s = None
        while True:
            time.sleep(self._warn_s / 4)
            since_s = self._since_s
            if since_s in (None, warned_s) or time.monotonic() - since_s < self._warn_s:
                continue
            warned_s = since_s
            _log.warning(
                "this rank has waited %.0f s for the others: restore(), maybe_save() and save() are"
                " called by all ranks, at the same steps [checkpoint-ranks]",
                self._warn_s,
            )
