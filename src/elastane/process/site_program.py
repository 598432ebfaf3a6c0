"""Programs of the site that an agent runs beside its workers: a source of notices, a health check.

Each runs without a shell in a session of its own, and ends with the `running` block. A process that
the kernel cannot end, because it waits for a broken device, is left behind after `END_S`: to wait
for it would hang the agent. It fails with ConfigurationError for a program that cannot be run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from elastane.process.execspawn import launch
from elastane.process.process import WorkerProcess

# Bytes of a line that count.
LINE_BYTES_MAX = 4096
# What a program wrote before its end is read for no longer than this after it.
REST_S = 1.0
# A killed process is gone at once, unless the kernel waits for a device.
END_S = 2.0


@contextlib.asynccontextmanager
async def running(
    words: Sequence[str], environ: Mapping[str, str], *, errors_too: bool = False
) -> AsyncIterator[tuple[WorkerProcess, asyncio.StreamReader]]:
    """Start a program; yield it and its output. Its process group is killed at the end.

    `errors_too`: its stderr is in the output as well; otherwise it is that of this process.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    pipe = os.fdopen(read, "rb", 0)
    output = asyncio.StreamReader(LINE_BYTES_MAX)
    with contextlib.ExitStack() as stack:
        stack.callback(pipe.close)
        try:
            files = {0: null, 1: write, 2: write if errors_too else 2}
            process = await launch(words, environ, str(Path.cwd()), files)
        finally:
            os.close(null)
            os.close(write)
        try:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), pipe
            )
            stack.callback(transport.close)
            yield process, output
        finally:
            process.kill_group(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()


async def lines_of(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield each line that is not empty; of a longer one its first `LINE_BYTES_MAX` bytes."""
    while True:
        try:
            line = await output.readuntil(b"\n")
        except asyncio.IncompleteReadError as rest:
            line = rest.partial
            if not line:
                return
        except asyncio.LimitOverrunError as error:
            line = await output.read(error.consumed)
        if line.strip():
            yield line.decode(errors="replace")
