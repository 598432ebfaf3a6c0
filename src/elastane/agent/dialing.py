"""Connecting to the coordinator of one job, and noting where it was, for `elastane status`.

Owns this agent's entry among those of the machine. How it fails: as `rpc.connect`; a machine on
which nothing can be noted goes without an entry.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from elastane.errors import RendezvousRefusedError
from elastane.process import environment, rpc
from elastane.process.endpoint import Endpoint, parse_endpoint
from elastane.process.files import JobEntry, JobRegistry, process_start, runtime_folder

_log = logging.getLogger("elastane.options")
_TIMEOUT_S = 5.0


class Dialer:
    """Dials for one agent; `token` tells what the job's secret is made from now."""

    def __init__(
        self,
        access: rpc.Access,
        token: Callable[[], str],
        node_id: str,
        registry: JobRegistry | None,
        log_dir: str = "",
    ) -> None:
        self._access = access
        self._token = token
        self._node_id = node_id
        self._registry = registry
        self._log_dir = log_dir
        self._entry: JobEntry | None = None

    async def __call__(self, host: str, port: int) -> rpc.Session:
        """Return a session that has been proven; raises as `rpc.connect`."""
        session = await self._connect(host, port)
        self._note(Endpoint(host, port))
        return session

    def token_changed(self) -> None:
        """Note the secret anew, so that `elastane status` is let in."""
        if self._entry is not None:
            self._note(parse_endpoint(self._entry.endpoint))

    async def _connect(self, host: str, port: int) -> rpc.Session:
        """Prove the secret; one that a coordinator does not know yet is followed by the other."""
        *newer, last = self._access.secrets()
        for secret in newer:
            try:
                return await self._prove(host, port, secret)
            except RendezvousRefusedError as error:
                if error.slug != "wrong-token":
                    raise
        return await self._prove(host, port, last)

    async def _prove(self, host: str, port: int, secret: bytes) -> rpc.Session:
        access = self._access
        return await rpc.connect(
            host, port, job=access.job, secret=secret, tls=access.tls, timeout_s=_TIMEOUT_S
        )

    def close(self) -> None:
        """Take the entry out."""
        if self._entry is not None and self._registry is not None:
            self._registry.remove(self._entry)

    def _note(self, endpoint: Endpoint) -> None:
        if self._registry is None:
            return
        self._entry = JobEntry(
            job=self._access.job,
            node=self._node_id,
            endpoint=str(endpoint),
            token=self._token(),
            pid=os.getpid(),
            process=process_start(os.getpid()),
            log_dir=self._log_dir,
            started=time.time(),
        )
        try:
            self._registry.write(self._entry)
        except OSError as error:
            _log.warning("status will not find this job: %s", error)


def registry_here() -> JobRegistry | None:
    """Return where the jobs of this process's user are noted; None where nothing can be."""
    try:
        return JobRegistry(runtime_folder(environment.snapshot()))
    except OSError:
        return None
