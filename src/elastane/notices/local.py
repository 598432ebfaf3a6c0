"""Reads notices from this machine: a file that appears, and a command.

A file is looked at in a thread of its own with a limit, because a path on a dead network file
system blocks the thread that opens it. A command runs in a session of its own and ends with the
agent. It is started again if it ends without a notice.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

from elastane.notices.rules import NoticeSource, read_text
from elastane.process.offload import Offload
from elastane.process.site_program import REST_S, lines_of, running
from elastane.protocol.events import Notice

# How often a file is looked at, and whether a command has said something.
LOOK_S = 0.5
# A local file answers at once; one of a network file system may be away for a while.
FILE_TIMEOUT_S = 5.0
# Bytes of a file that count.
TEXT_BYTES_MAX = 4096
# A command that ended without a notice is started again after this.
COMMAND_PAUSE_S = 5.0


class FileReader:
    """The notice of one file: none until it is there."""

    pause_s = LOOK_S

    def __init__(self, source: NoticeSource) -> None:
        self._source = source
        self._offload = Offload(1)
        self._seen = _SeenText()

    async def read(self) -> list[Notice]:
        """Return the notice that the file holds; raises OSError if that cannot be known."""
        text = await self._offload.run(lambda: _content(self._source.where), FILE_TIMEOUT_S)
        if text is None:
            self._seen.forget()
            return []
        self._seen.take(text)
        return self._seen.notices(self._source)

    async def close(self) -> None:
        """Do nothing: a thread that hangs is a daemon."""


class CommandReader:
    """The notice of one command: its last line, or its end with exit code 0."""

    pause_s = LOOK_S

    def __init__(self, source: NoticeSource, environ: Mapping[str, str]) -> None:
        self._source = source
        self._environ = environ
        self._seen = _SeenText()
        self._running: asyncio.Task[None] | None = None
        self._starts_s = 0.0

    async def read(self) -> list[Notice]:
        """Return the notice, if there is one; raises what kept the command from running."""
        ended = self._running if self._running is not None and self._running.done() else None
        if ended is not None:
            self._running = None
            ended.result()
        is_due = time.monotonic() >= self._starts_s
        if self._running is None and self._seen.text is None and is_due:
            self._running = asyncio.create_task(self._run())
        return self._seen.notices(self._source)

    async def close(self) -> None:
        """End the command."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        """Run the command once, to its end."""
        self._starts_s = time.monotonic() + COMMAND_PAUSE_S
        async with running(self._source.words, self._environ) as (process, output):
            reading = asyncio.create_task(self._take_lines(output))
            try:
                code = await process.wait()
                await asyncio.wait({reading}, timeout=REST_S)
            finally:
                reading.cancel()
        if code == 0 and self._seen.text is None:
            self._seen.take("")
        self._starts_s = time.monotonic() + COMMAND_PAUSE_S

    async def _take_lines(self, output: asyncio.StreamReader) -> None:
        async for line in lines_of(output):
            self._seen.take(line)


class _SeenText:
    """The text that a source shows, and since when."""

    def __init__(self) -> None:
        self.text: str | None = None
        self._since_s = 0.0

    def take(self, text: str) -> None:
        if text != self.text:
            self.text, self._since_s = text, time.monotonic()

    def forget(self) -> None:
        self.text = None

    def notices(self, source: NoticeSource) -> list[Notice]:
        if self.text is None:
            return []
        return [read_text(source, self.text, time.monotonic() - self._since_s, time.time())]


def _content(path: str) -> str | None:
    """Return the beginning of a file, whatever it is; None if it is not there."""
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(descriptor, TEXT_BYTES_MAX).decode(errors="replace")
    except (IsADirectoryError, BlockingIOError):
        return ""
    finally:
        os.close(descriptor)
