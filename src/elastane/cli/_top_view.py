"""The view of `elastane top`: one printed frame, or one frame after the other.

The frames are drawn in the loop that follows the job. The terminal is restored however the view
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

from rich.console import Console
from rich.text import Text

from elastane.cli._terminal import Terminal
from elastane.cli._top_frame import Picture, frame, plain
from elastane.dashboard.following import OVER, JobFollower
from elastane.observe.progress import SHOWN_AFTER_S

# The seconds between two frames: ages are shown in seconds, and a person does not read faster.
REDRAW_S = 0.5
# The most lines of a printed frame: it need not fit a screen, but a thousand nodes are too many.
PRINTED_ROWS_MAX = 100
# How long the view waits after the job's end, since agents log the ends of their workers later.
SETTLE_S = 5.0
_LEAVE = (b"q", b"Q", b"\x03", b"\x04")


async def print_once(follower: JobFollower) -> int:
    """Print one frame after the coordinator's answer; return the exit code."""
    ready = asyncio.create_task(follower.ready())
    begun_s, said = time.monotonic(), False
    while not ready.done():
        await asyncio.wait([ready], timeout=REDRAW_S)
        follower.check()
        if time.monotonic() - begun_s >= SHOWN_AFTER_S and sys.stderr.isatty():
            sys.stderr.write(f"\rreading the log: {follower.share_read:.0%} ")
            said = True
    if said:
        sys.stderr.write("\r\x1b[K")
    console = Console(highlight=False)
    print("\n".join(_drawn(_picture(follower), console, PRINTED_ROWS_MAX)))
    return 0


def _picture(follower: JobFollower, *, is_live: bool = False) -> Picture:
    return Picture(follower.sections(), follower.view, time.time(), is_live)


def _drawn(picture: Picture, console: Console, rows: int) -> list[str]:
    """Return the rows of a frame as the console of this width writes them."""
    lines = frame(picture, console.width, rows)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    with console.capture() as captured:
        console.print(Text("\n").join(lines), no_wrap=True, overflow="ignore", crop=False, end="")
    text = captured.get()
    if not console.encoding.startswith("utf"):
        text = plain(text).encode(console.encoding, "replace").decode(console.encoding)
    return [row.rstrip() for row in text.split("\n")]


class LiveView:
    """Shows a job in the terminal until it is over or the user leaves."""

    def __init__(self, follower: JobFollower) -> None:
        self._follower = follower
        self._terminal = Terminal()
        self._console = Console(highlight=False)
        self._woken = asyncio.Event()
        self._code: int | None = None

    async def run(self) -> int:
        """Show frames, leave the last one in the terminal, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave, 0 if number == signal.SIGINT else number)
        loop.add_signal_handler(signal.SIGWINCH, self._woken.set)
        with self._terminal:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            if self._terminal.keys is not None:
                loop.add_reader(self._terminal.keys, self._read_keys)
            await self._show()
        with contextlib.suppress(OSError):  # the terminal may be gone
            rows = self._terminal.size()[1] - 1
            print("\n".join(_drawn(_picture(self._follower), self._console, rows)), flush=True)
        return self._code or 0

    async def _show(self) -> None:
        over_s: float | None = None
        while self._code is None:
            self._follower.check()
            columns, rows = self._terminal.size()
            self._console.width = columns
            picture = _picture(self._follower, is_live=True)
            drawn = _drawn(picture, self._console, rows)
            with contextlib.suppress(OSError):
                self._terminal.show(drawn, (columns, rows))
            if self._follower.is_ready and picture.sections.job.state in OVER:
                over_s = over_s or time.monotonic()
                if not self._follower.has_agents or time.monotonic() - over_s > SETTLE_S:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REDRAW_S):
                    await self._woken.wait()
            self._woken.clear()

    def _read_keys(self) -> None:
        assert self._terminal.keys is not None
        pressed = self._terminal.pressed()
        if not pressed:
            asyncio.get_running_loop().remove_reader(self._terminal.keys)
        if not pressed or any(key in pressed for key in _LEAVE):
            self._leave(0)

    def _leave(self, number: int) -> None:
        """End the view; `number`: the signal that ends it, or 0 if a person does."""
        self._code = 128 + number if number else 0
        self._woken.set()

    def _suspend(self) -> None:
        """Restore the terminal while this process is stopped by Ctrl-Z."""
        self._terminal.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.open()
        self._woken.set()
