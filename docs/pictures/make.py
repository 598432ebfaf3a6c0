"""Makes the pictures of the docs: `python docs/pictures/make.py`, with Chromium installed.

The job in them is made up (tests/shared/shown_job.py), except that of `make.py incident`: a real
one, whose views are printed for docs/what-happened.md. Look at each picture before you commit it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "shared")]

from chromium import MISSING, PROGRAM, Browser  # noqa: E402 - of the folder above
from shown_job import write_job  # noqa: E402

PAGES: dict[str, dict[str, Any]] = {
    "dashboard-light": {"width": 1280, "height": 900},
    "dashboard-dark": {"width": 1280, "height": 900, "dark": True},
    "dashboard-phone": {"width": 390, "height": 844, "mobile": True},
}
READ = """
["account", "events"].every((id) => document.querySelector(`#${id}-body table`))
  && /live|folder/.test(document.getElementById("connection").textContent)
"""
WAIT_S = 180.0  # for a real job, on a busy host
COLUMNS = 100
# A dark terminal: black, red, green, yellow, blue, magenta, cyan, white.
_COLOURS = [
    (42, 50, 59), (255, 125, 71), (120, 200, 120), (247, 203, 90), (75, 166, 234),
    (200, 160, 240), (90, 200, 210), (233, 238, 243),
]  # fmt: skip
THEME = TerminalTheme((20, 25, 31), (233, 238, 243), _COLOURS)
TOP_HTML = """<!doctype html><meta charset="utf-8"><body style="margin:0;background:#14191f">
<pre style="margin:14px;width:max-content;color:#e9eef3;font:13px/1.3 'DejaVu Sans Mono',monospace">
{code}</pre>"""


async def picture(name: str, address: str, ready: str, **window: Any) -> None:
    """Write one picture of a page."""
    async with Browser(**window) as page:
        await page.open(address)
        await page.until(ready)
        await page.picture(HERE / f"{name}.png", whole=True)


def write_frame(job: Path, target: Path) -> None:
    """Write a frame of `elastane top`, with its colours, as a page."""
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"
    drawn = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-m", "elastane", "top", str(job), "--once"],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    ).stdout.decode()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text.from_ansi(drawn.replace("\r\n", "\n")), end="")
    page = console.export_html(theme=THEME, code_format=TOP_HTML, inline_styles=True)
    target.write_text(page, "utf-8")


def serve(logs: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a dashboard of a folder of logs; return it and its address."""
    command = [sys.executable, "-m", "elastane", "dashboard", "--port", "0", "--log-dir", str(logs)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+/", server.stdout.readline())
    assert found is not None, "the dashboard did not start"
    return server, found[0]


def shell(*words: str) -> None:
    """Print a command of elastane and its output."""
    said = subprocess.run(
        [sys.executable, "-m", "elastane", *words], capture_output=True, text=True, check=False
    )
    sys.stdout.write(f"\n$ elastane {' '.join(words)}\n{said.stdout}{said.stderr}")


def write_incident(folder: Path) -> None:
    """Run a job whose rank 2 hangs in a read; show its views, end the worker, show them again."""
    from elastane.testing import LocalCluster

    (folder / "data").mkdir()
    cluster = LocalCluster(
        [str(HERE / "incident_train.py"), str(folder / "data")],
        folder=folder, rdzv_id="nightly", nnodes=2, nproc_per_node=2, max_restarts=3,
    )  # fmt: skip
    with cluster:
        cluster.start("a"), cluster.start("b")
        cluster.wait_event("pace", count=4, deadline_s=WAIT_S)
        os.mkfifo(folder / "data" / "shard-0007.tar")
        found = cluster.wait_event("culprit", deadline_s=WAIT_S).data
        shell("status", cluster.job)
        shell("top", cluster.job, "--once")
        server, address = serve(cluster.log_dir)
        with server:
            page = f"{address}?job={cluster.job}"
            asyncio.run(picture("incident-stalled", page, READ, width=1280, height=900))
            (folder / "data" / "shard-0007.tar").unlink()
            os.kill(int(found["culprit_pid"]), signal.SIGKILL)
            cluster.wait_event("restart")
            cluster.wait_event("pace", count=7, deadline_s=WAIT_S)
            asyncio.run(picture("incident-over", page, READ, width=1280, height=900))
            server.terminate()
        shell("explain", cluster.job)
        shell("logs", cluster.job, "--rank", "0")


def main() -> int:
    """Make them; returns 1 without Chromium."""
    if PROGRAM is None:
        sys.stderr.write(f"{MISSING}\n")
        return 1
    if sys.argv[1:] == ["incident"]:
        with tempfile.TemporaryDirectory(prefix="run-") as name:
            os.environ["XDG_RUNTIME_DIR"] = str(Path(name) / "run")
            (Path(name) / "run").mkdir(mode=0o700)
            write_incident(Path(name))
        return 0
    with tempfile.TemporaryDirectory(prefix="runs-") as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
        for title, window in PAGES.items():  # each of a job that has just made a step
            write_job(folder / title)
            server, address = serve(folder / title)
            with server:
                asyncio.run(picture(title, address, READ, **window))
                server.terminate()
        frame = folder / "top.html"
        write_frame(write_job(folder / "top"), frame)
        ready = "document.querySelector('pre')"
        asyncio.run(picture("top", frame.as_uri(), ready, width=850, height=400))
    return 0


if __name__ == "__main__":
    sys.exit(main())
