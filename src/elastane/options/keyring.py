"""The secrets of a job as they stand now: its token file may change while the job runs.

A token file has one line, or two while the secret is being changed: an agent proves itself with
the first, and with the second where that is not known yet; a coordinator takes both. So the files
of a job's nodes are changed in any order, and no session has to end for it. Owns the looking; it
must not know what is proved. How it fails: a file that is gone, torn or empty is told once, and
what it said last stays in force.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.options.secret import read_tokens
from elastane.process.offload import Offload
from elastane.protocol.wire import derive_secret

_log = logging.getLogger("elastane.options")
# A person changes the file, on several nodes; nobody waits for it.
_LOOK_S = 1.0
# The file may lie on a server that is away.
_READ_S = 5.0

Stamp = tuple[int, int, int]


class Keyring:
    """What one agent proves itself with, and what it takes from others."""

    def __init__(self, job: str, token: str, path: str = "") -> None:
        self._job = job
        self._path = path
        self._tokens: tuple[str, ...] = (token,)
        self._stamp: Stamp | None = None
        self._trouble = ""
        self._offload = Offload()

    @property
    def token(self) -> str:
        """What this agent proves itself with; empty where the job has no secret."""
        return self._tokens[0]

    def secrets(self) -> tuple[bytes, ...]:
        """Return the secrets that count now, this agent's own first."""
        return tuple(derive_secret(self._job, token or None) for token in self._tokens)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look at the file for ever, and call `changed` after each change of the secrets."""
        while self._path:
            if await self.look():
                _log.info("the job's secret was changed in %s", self._path)
                changed()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> bool:
        """Take in what the file says now; returns whether that is something else."""
        before = self._tokens
        try:
            if self._path:
                found = await self._offload.run(self._read, _READ_S)
                self._tokens = found or before
            self._trouble = ""
        except (ConfigurationError, OSError) as error:  # TimeoutError is an OSError
            self._say(str(error) or f"{self._path} cannot be read within {_READ_S:g} s")
        return self._tokens != before

    def _read(self) -> tuple[str, ...] | None:
        """Return what the file says, None where it is the one that was read last."""
        found = Path(self._path).stat()
        if not stat.S_ISREG(found.st_mode):
            return None  # A pipe is read once: --token-file <(...)
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return None
        tokens = read_tokens(self._path)
        self._stamp = stamp
        return tokens

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s; the secret that was read before stays in force", trouble)
