"""The stacks of a worker from outside, by py-spy where it is installed.

A worker whose interpreter's lock is held by C code cannot show its own stack, and one that may go
on is not ended for it. py-spy reads the memory of the process. It needs the right to trace it
(CAP_SYS_PTRACE in most containers); without that, or without py-spy, there are no stacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastane.errors import ElastaneError
from elastane.process.site_program import lines_of, running

PROGRAM = "py-spy"
# A dump takes some 0.1 s; of a process that swaps or of one with many threads, seconds.
_DUMP_S = 10.0
_LINES_MAX = 80
_LINE_CHARS_MAX = 200

_log = logging.getLogger("elastane.agent")


@dataclass(frozen=True)
class OutsideStacks:
    """The stacks of all threads, as `source` printed them."""

    source: str
    text: str


def find_py_spy(environ: Mapping[str, str]) -> str:
    """Return the path of py-spy, beside this interpreter or on PATH; "" if it is not installed."""
    folders = str(Path(sys.executable).parent), environ.get("PATH", "")
    return shutil.which(PROGRAM, path=os.pathsep.join(folders)) or ""


async def stacks_of(pid: int, environ: Mapping[str, str]) -> OutsideStacks | None:
    """Return the stacks of a process, with native frames where py-spy can read them."""
    program = find_py_spy(environ)
    if not program:
        return None
    for more in (("--native",), ()):
        text = await _dump([program, "dump", "--pid", str(pid), *more], environ)
        if text:
            return OutsideStacks(" ".join((PROGRAM, *more)), text)
    return None


async def _dump(words: list[str], environ: Mapping[str, str]) -> str:
    lines: list[str] = []
    try:
        async with asyncio.timeout(_DUMP_S), running(words, environ, errors_too=True) as started:
            process, output = started
            async for line in lines_of(output):
                if len(lines) < _LINES_MAX:
                    lines.append(line.rstrip()[:_LINE_CHARS_MAX])
            code = await process.wait()
    except (TimeoutError, ElastaneError, OSError) as error:
        _log.info("%s: no stacks: %s", " ".join(words), error)
        return ""
    if code != 0:
        _log.info("%s: no stacks: %s", " ".join(words), lines[-1] if lines else code)
    return "\n".join(lines) if code == 0 else ""
