"""Connects to the coordinator of one job and registers its endpoint for `elastane status`.

Owns this agent's entry among the jobs of this machine. It fails as `rpc.connect` does. Where no
entry can be written, the job runs without one.
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
    """Connects for one agent; `token` returns the current source of the job's secret."""

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
        """Return a session whose secret was proven; raises as `rpc.connect`."""
        session = await self._connect(host, port)
        self._register(Endpoint(host, port))
        return session

    def token_changed(self) -> None:
        """Write the entry again with the new secret, so that `elastane status` is let in."""
        if self._entry is not None:
            self._register(parse_endpoint(self._entry.endpoint))

    async def _connect(self, host: str, port: int) -> rpc.Session:
        """Prove the newest secret; a coordinator that doesn't know it yet gets the older one."""
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
        """Remove the entry."""
        if self._entry is not None and self._registry is not None:
            self._registry.remove(self._entry)

    def _register(self, endpoint: Endpoint) -> None:
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
            _log.warning("elastane status will not find this job: %s", error)


def registry_here() -> JobRegistry | None:
    """Return where this user's jobs are registered; None where no folder can be written."""
    try:
        return JobRegistry(runtime_folder(environment.snapshot()))
    except OSError:
        return None
