"""The etcd server that `--standalone --rdzv-backend etcd` starts, for as long as the agent runs.

Owns one server process, which carries the agent's process mark and ends with it. It fails with
ConfigurationError where there is no etcd program, and with StoreError, which quotes the last log
lines, where the server does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping

from elastane.errors import StoreError
from elastane.process.execspawn import launch
from elastane.process.files import runtime_folder
from elastane.process.offload import Offload
from elastane.process.orphan_reaper import SERVER_MARK_VARIABLE
from elastane.process.process import WorkerProcess
from elastane.process.streams.files import last_lines, open_append
from elastane.process.worker_environment import without_secrets
from elastane.stores.etcd.server import (
    START_ATTEMPTS,
    START_TIMEOUT_S,
    LocalServer,
    find_binary,
    prepare,
)

_POLL_S = 0.05


@contextlib.asynccontextmanager
async def sidecar(environ: Mapping[str, str], process_mark: str) -> AsyncIterator[str]:
    """Run a server and yield its endpoint; nothing of it is left afterwards."""
    binary, base = find_binary(environ), runtime_folder(environ)
    offload = Offload()
    for attempt in range(START_ATTEMPTS):
        server = prepare(binary, base, private=True)
        process = await _start(server, environ, process_mark)
        try:
            if await _is_up(server, process, offload):
                yield server.endpoint
                return
            if attempt == START_ATTEMPTS - 1:
                raise _did_not_start(server, process)
        finally:
            process.kill_group(signal.SIGKILL)
            await process.wait()
            shutil.rmtree(server.folder, ignore_errors=True)


async def _start(
    server: LocalServer, environ: Mapping[str, str], process_mark: str
) -> WorkerProcess:
    # etcd reads ETCD_* variables, which here would describe another server.
    own = without_secrets(environ)
    env = {name: value for name, value in own.items() if not name.startswith("ETCD_")}
    env[SERVER_MARK_VARIABLE] = process_mark
    log = open_append(server.folder / "log")
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return await launch(server.command(), env, str(server.folder), {0: null, 1: log, 2: log})
    finally:
        os.close(null)
        os.close(log)


async def _is_up(server: LocalServer, process: WorkerProcess, offload: Offload) -> bool:
    """Wait until the server answers; False if it ended or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while process.exit_code is None:
                if await offload.run(server.is_healthy, START_TIMEOUT_S):
                    return True
                await asyncio.sleep(_POLL_S)
    return False


def _did_not_start(server: LocalServer, process: WorkerProcess) -> StoreError:
    log_end = last_lines(str(server.folder / "log"))
    return StoreError(
        f"etcd did not start ({server.binary}): {log_end[-500:] or 'it logged nothing'}",
        slug="etcd-start",
        where=f"exit code {process.exit_code}",
        expected=f"a server that answers within {START_TIMEOUT_S:g} s",
        next_step="--standalone without --rdzv-backend needs no etcd",
    )
