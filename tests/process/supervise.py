"""`elastane run` as its users start it: real agents and workers, all ended after a test.

Every process of a test carries a mark in its environment, so that all of them are found, and
ended at the test's end, in any session and with any parent. Each wait has a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import warm_start
from process_harness import DEADLINE_S, until, worker_environment

Stdio = tuple[int | None, int | None, int | None]
MARK = "SUPERVISE_MARK"
# What the scripts of these tests use; no torch, so that a start takes milliseconds.
_TELL = '''
"""What a worker tells its test: files that appear whole, named what.rank.restarts."""

import os
import signal
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FOLDER = Path(os.environ["SUPERVISE_FOLDER"])


def tell(what, text=""):
    path = FOLDER / f"{what}.{RANK}.{RESTARTS}"
    path.with_suffix(".part").write_text(str(text))
    path.with_suffix(".part").rename(path)


def hang():
    # A signal that comes just before the system call of a sleep does not interrupt it.
    while True:
        time.sleep(0.1)


def trap(signum=signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)


def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)
'''


def marked(mark: str) -> set[int]:
    """Return the pids of living processes that carry `mark`."""
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _pids() if alive(pid) and wanted in _environ(pid)}


def alive(pid: int) -> bool:
    """Whether `pid` is a process with a thread that is not a zombie.

    The first thread of a killed process may be a zombie while others still hold its descriptors.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(state(pid, thread) not in ("", "Z", "X") for thread in threads)


def state(pid: int, thread: int | str = "") -> str:
    """Return the letter of the state of a process or a thread; empty if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
        return stat.rpartition(") ")[2][:1]
    except OSError:
        return ""


def zygote_and_stores(agent: int) -> list[int]:
    """Return the pids of an agent's zygote, and of its forks that are not workers.

    At rest these are three: the zygote, the process of this world's store, and that of the next.
    """
    return [pid for pid in children(agent) if "elastane.process.zygote" in command_line(pid)]


def children(pid: int) -> set[int]:
    """Return the pids of a process's own children."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, task.read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """Return the pids of all descendants of a process."""
    below = children(pid)
    return below.union(*(descendants(child) for child in below))


def command_line(pid: int) -> str:
    """Return a process's command line with spaces."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def started_at(pid: int) -> int:
    """Return when a process began, in ticks since the boot; -1 if it has ended.

    The order of pids is not the order of starts: after the largest pid the kernel continues at 300.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return -1


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


# Less than the 30 s that a worker may take to end: what is left then was not killed.
GONE_S = 20.0


class Agent:
    """One `elastane run`, its files, and the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.logs = folder / "logs"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[int] = set()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, *words: str, stdio: Stdio, lead: tuple[str, ...] = (), **env: str) -> None:
        """Start `elastane run` with `words`, in its own session; `lead` precedes the command."""
        self._process = warm_start.Popen(
            [*lead, sys.executable, "-m", "elastane", "run", *words],
            cwd=self.folder,
            env=self.environment(**env),
            stdin=stdio[0],
            stdout=stdio[1],
            stderr=stdio[2],
            start_new_session=not lead,
        )

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of the agent, and of commands that query it."""
        own = {
            MARK: self.mark,
            "SUPERVISE_FOLDER": str(self.folder),
            "TMPDIR": str(self.folder),
            "PYTHONUNBUFFERED": "1",
        }
        return worker_environment(**{**own, **more})

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit code; if the agent does not end in time, fail with its output."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent lives on after {deadline_s} s\n{self.err}") from None

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def told(self, name: str, deadline_s: float = DEADLINE_S) -> str:
        """Wait for a worker's report under `name` (what.rank.restarts), and return its value."""
        path = self.folder / name
        try:
            until(path.exists, name, deadline_s)
        except AssertionError as error:
            events = "\n".join(f"{e['kind']}: {e['reason']}" for e in self.events())
            raise AssertionError(f"{error}\n{self.err}\n{events}") from None
        return path.read_text()

    def family(self) -> set[int]:
        """Return all processes of this job, with the agent and its orphan reaper."""
        found = marked(self.mark) | ({self.pid} if alive(self.pid) else set())
        found |= descendants(self.pid) if alive(self.pid) else set()
        self._seen |= found
        return found

    def left(self) -> set[int]:
        """Return the processes of this job that are alive."""
        return {pid for pid in self.family() | self._seen if alive(pid)}

    def gone(self) -> None:
        """Wait until no process of this job is left."""
        until(lambda: not self.left(), "nothing of the job is left", GONE_S)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the events so far, of one kind or all."""
        lines = [
            line
            for path in sorted(self.logs.glob("*/events.*.jsonl"))
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in ("", event["kind"])]

    def job_dir(self) -> Path:
        (found,) = {path.parent for path in self.logs.glob("*/events.*.jsonl")}
        return found

    def zygote(self) -> int:
        """Wait for the zygote, and return its pid."""
        until(self._of_the_zygote, "a zygote runs")
        return self._of_the_zygote()[0]

    def forks_of_the_zygote(self) -> list[int]:
        """Return the pids of the zygote's forks that are not workers."""
        return self._of_the_zygote()[1:]

    def _of_the_zygote(self) -> list[int]:
        return sorted(zygote_and_stores(self.pid), key=started_at)

    def kill_all(self) -> None:
        """Kill the remaining processes by pid."""
        if self._process is None:
            return
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(DEADLINE_S)


@contextmanager
def agent(
    folder: Path, *options: str, body: str = "", args: tuple[str, ...] = (), **env: str
) -> Iterator[Agent]:
    """Run a script with these options; `--no-zygote` unless `zygote` or `preload` is given."""
    words = ["--standalone", "--log-dir", "logs", *options]
    if not {"--preload", "--no-python", "--no-zygote"} & set(options):
        words.append("--no-zygote")
    with words_agent(folder, *words, write_script(folder, body), *args, **env) as running:
        yield running


@contextmanager
def words_agent(
    folder: Path, *words: str, lead: tuple[str, ...] = (), **env: str
) -> Iterator[Agent]:
    """Run `elastane run` with exactly these words, output in files; `lead` precedes the command."""
    one = Agent(folder)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        try:
            one.start(
                *words, stdio=(subprocess.DEVNULL, out.fileno(), err.fileno()), lead=lead, **env
            )
            yield one
        finally:
            one.kill_all()


def write_script(folder: Path, body: str, name: str = "script.py") -> str:
    """Write a worker's script with its reporting function; return its name."""
    (folder / "tell.py").write_text(_TELL)
    head = "from tell import *\n" if name.endswith(".py") else ""
    path = folder / name
    path.write_text(head + textwrap.dedent(body))
    path.chmod(0o755)
    return name


def ask(one: Agent, *words: str) -> subprocess.CompletedProcess[str]:
    """Run another command of elastane while an agent runs."""
    return subprocess.run(
        [sys.executable, "-m", "elastane", *words],
        cwd=one.folder,
        env=one.environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
