"""The current secrets of a job: its token file may change while the job runs.

A token file has one line, or two while the secret is being changed. An agent proves itself with the
first, and with the second to a coordinator that doesn't know the first yet; a coordinator accepts
both. So the files of a job's nodes may change in any order, and no session ends. It only reads the
file and knows nothing of the proof. How it fails: a missing, torn or empty file is logged once, and
the secrets that were read last stay valid.
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
# A person changes the file on several nodes; no process waits for it.
_LOOK_S = 1.0
# The file may be on a server that does not answer.
_READ_S = 5.0

Stamp = tuple[int, int, int]


class Keyring:
    """The secret of this agent, and the secrets that it accepts from others."""

    def __init__(self, job: str, token: str, path: str = "") -> None:
        self._job = job
        self._path = path
        self._tokens: tuple[str, ...] = (token,)
        self._stamp: Stamp | None = None
        self._problem = ""
        self._offload = Offload()

    @property
    def token(self) -> str:
        """The token that this agent proves itself with; empty if the job has no secret."""
        return self._tokens[0]

    def secrets(self) -> tuple[bytes, ...]:
        """Return the valid secrets, this agent's own first."""
        return tuple(derive_secret(self._job, token or None) for token in self._tokens)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Read the file again and again; call `changed` after each change of the secrets."""
        while self._path:
            if await self.reload():
                _log.info("the job's secret was changed in %s", self._path)
                changed()
            await asyncio.sleep(_LOOK_S)

    async def reload(self) -> bool:
        """Read the file; return whether the secrets changed."""
        before = self._tokens
        try:
            if self._path:
                found = await self._offload.run(self._read, _READ_S)
                self._tokens = found or before
            self._problem = ""
        except (ConfigurationError, OSError) as error:  # TimeoutError is an OSError
            self._warn(str(error) or f"{self._path} cannot be read within {_READ_S:g} s")
        return self._tokens != before

    def _read(self) -> tuple[str, ...] | None:
        """Return the tokens in the file; None if it did not change since the last read."""
        found = Path(self._path).stat()
        if not stat.S_ISREG(found.st_mode):
            return None  # A pipe is read once: --token-file <(...)
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return None
        tokens = read_tokens(self._path)
        self._stamp = stamp
        return tokens

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s; the secret that was read before stays valid", problem)
