"""The event log of a thousand nodes after a week: how long its readers take, and their memory.

The log is made up: step counts every ten seconds, checkpoints every five minutes, workers that are
lost and replaced in place, and restarts of all workers. Each node logs to a file of its own, as
with a shared `--log-dir`. Run: python -m bench.long_log [NODES [DAYS]]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastane.observe.events import LoggedEvent, encode_line, iso_time
from elastane.protocol.log_events import EventKind

BEGUN_S = 1.79e9
WORKERS = 8
COUNT_S, SAVE_S = 10.0, 300.0
LOST_EVERY_S, RESTART_EVERY_S = 12_000.0, 60_000.0
_STEPS_PER_S = 2.0


class SimulatedLog:
    """Writes the events of a job, in the order of each file."""

    def __init__(self, folder: Path, nodes: int, days: float) -> None:
        self.lines = 0
        self._names = [f"node-{number:04d}" for number in range(nodes)]
        self._files: dict[str, list[bytes]] = {name: [] for name in self._names}
        self._seq = dict.fromkeys(self._names, 0)
        self._round = 0
        self._until_s = days * 86_400.0
        self._folder = folder

    def write(self) -> None:
        """Write one file for each node."""
        self._begin()
        times = sorted(
            [
                *((at_s, self._count) for at_s in _every(COUNT_S, self._until_s)),
                *((at_s + 1.0, self._save) for at_s in _every(SAVE_S, self._until_s)),
                *((at_s + 3.0, self._lose) for at_s in _every(LOST_EVERY_S, self._until_s)),
                *((at_s + 33.0, self._restart) for at_s in _every(RESTART_EVERY_S, self._until_s)),
            ],
            key=lambda item: item[0],
        )
        for at_s, add in times:
            add(at_s)
        self._folder.mkdir(parents=True)
        for name, lines in self._files.items():
            (self._folder / f"events.{name}.jsonl").write_bytes(b"".join(lines))
            self.lines += len(lines)

    def _begin(self) -> None:
        for name in self._names:
            self._log(0.0, EventKind.AGENT_STARTED, name, "the agent has started")
            self._log(0.5, EventKind.COORDINATOR_FOUND, name, "admitted")
        self._log(0.2, EventKind.COORDINATOR_STARTED, "", "this agent holds the store's lease")
        for name in self._names:
            self._log(0.6, EventKind.NODE_JOINED, "", "it asked to join", node=name)
        self._settle(1.0)
        self._start(1.1)

    def _settle(self, at_s: float) -> None:
        self._round += 1
        self._log(
            at_s,
            EventKind.ROUND_SETTLED,
            "",
            "all members are ready",
            nodes=len(self._names),
            world_size=WORKERS * len(self._names),
            members=" ".join(self._names)[:500],
        )

    def _start(self, at_s: float) -> None:
        for name in self._names:
            pids = str(tuple(range(100, 100 + WORKERS)))
            self._log(at_s, EventKind.WORKERS_STARTING, name, "an assignment")
            self._log(at_s + 0.5, EventKind.WORKERS_STARTED, name, "they run", pids=pids)
        self._train(at_s + 9.0)

    def _train(self, at_s: float) -> None:
        for name in self._names:
            ages = {"age_s": 0.011, "built_age_s": 0.31, "healed_age_s": 0.12}
            text = "its workers have made their first step"
            self._log(at_s, EventKind.WORKERS_TRAINING, name, text, **ages)

    def _count(self, at_s: float) -> None:
        steps = int(at_s * _STEPS_PER_S)
        self._log(at_s, EventKind.PROGRESS, "", "steps of the world", steps=steps, workers=8000)

    def _save(self, at_s: float) -> None:
        name, step = self._names[0], int(at_s * _STEPS_PER_S)
        self._log(
            at_s, EventKind.CHECKPOINT_SAVED, name, "published", step=step, seconds=2.0, bytes=9**9,
            location="/checkpoints", why="time",
        )  # fmt: skip

    def _lose(self, at_s: float) -> None:
        """Lose a worker; the others continue, and its replacement joins by a drain."""
        lost = self._names[int(at_s) % len(self._names)]
        self._fail(at_s, lost, EventKind.REPLACEMENT)
        for pause_s in (0.1, 20.0):
            if pause_s > 1.0:
                why = f"adding workers of {lost}"
                self._log(at_s + 19.0, EventKind.DRAIN_STARTED, "", why)
                for name in self._names:
                    self._log(at_s + 19.1, EventKind.WORKERS_DRAINING, name, why)
                self._log(at_s + 19.9, EventKind.DRAIN_ENDED, "", "all have parked")
            for name in self._names:
                self._log(
                    at_s + pause_s, EventKind.WORKERS_INTERRUPTED, name, "their world is over"
                )
            self._settle(at_s + pause_s + 0.1)
            for name in self._names:
                text = "8 workers continue in another world"
                self._log(at_s + pause_s + 0.2, EventKind.WORKERS_REGROUPED, name, text, workers=8)
            self._train(at_s + pause_s + 1.0)

    def _restart(self, at_s: float) -> None:
        """Lose a worker so that all restart."""
        lost = self._names[int(at_s) % len(self._names)]
        self._fail(at_s, lost, EventKind.RESTART)
        for name in self._names:
            self._log(at_s + 0.1, EventKind.WORKERS_STOPPING, name, "a restart", grace_s=30.0)
            self._log(at_s + 1.1, EventKind.WORKERS_STOPPED, name, "no process is left", at="")
        self._settle(at_s + 2.0)
        self._start(at_s + 2.1)

    def _fail(self, at_s: float, lost: str, kind: EventKind) -> None:
        facts = {"rank": 7, "local_rank": 7, "pid": 107, "exit_code": -9, "age_s": 0.01}
        self._log(at_s, EventKind.WORKER_EXITED, lost, "SIGKILL (from outside)", **facts)
        self._log(at_s + 0.02, EventKind.INCIDENT, "", "worker of rank 7 ended")
        cause = {"cause": "rank 7 ended with SIGKILL", "cause_node": lost, "cause_rank": 7}
        self._log(at_s + 0.02, kind, "", "a lost worker", used=1, allowed=999, **cause)

    def _log(
        self, at_s: float, kind: EventKind, host: str, reason: str, node: str = "", **data: object
    ) -> None:
        """Log an event; "" as the host is the coordinator's, in the first node."""
        source = "agent" if host else "coordinator"
        host = host or self._names[0]
        time_s = BEGUN_S + at_s + len(self._files[host]) % 97 / 1e5
        self._seq[host] += 1
        event = LoggedEvent(
            time=iso_time(int(time_s * 1e9)),
            time_s=time_s,
            mono_s=at_s,
            seq=self._seq[host],
            job="week",
            kind=kind,
            reason=reason,
            node=node or host,
            host=host,
            pid=17,
            round=self._round or None,
            attempt=0 if self._round else None,
            data=msgspec.convert(data, dict[str, str | int | float | bool]),
            source=source,
        )
        self._files[host].append(encode_line(event))


def _every(seconds: float, until_s: float) -> Iterator[float]:
    at_s = seconds
    while at_s < until_s:
        yield at_s
        at_s += seconds


def measure(*words: str) -> tuple[float, float, float]:
    """Run a command; return its seconds, those of the processor, and its memory in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_s = time.monotonic()
    # The memory is not that of getrusage, which has that of the process that forked it, if larger.
    code = (
        "import sys; from elastane.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, check=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun_s, used_s, _memory_mb(done.stderr)


def _memory_mb(status: str) -> float:
    """Return the largest memory of a process, from its file in /proc."""
    return round(int(status.rpartition("VmHWM:")[2].split()[0]) / 1024)


class MeasuredServer:
    """The server of the page, which reads a log."""

    def __init__(self, base: str, job: str) -> None:
        command = [sys.executable, "-m", "elastane", "dashboard", job, "--port", "0"]
        self._begun_s = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--log-dir", base], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().split("http://")[1].split("/")[0]
        self._job = job

    def measure(self) -> tuple[float, float, float, float]:
        """Wait until the log was read.

        Return the seconds until the first answer and until then, those of the processor, and the
        memory in MB.
        """
        first_s = None
        while True:
            with urllib.request.urlopen(f"http://{self._url}/api/jobs/{self._job}") as answer:
                shown = msgspec.json.decode(answer.read())
            first_s = first_s or time.monotonic() - self._begun_s
            if shown["job"]["is_read"]:
                break
            time.sleep(0.5)
        read_s = time.monotonic() - self._begun_s
        folder = Path("/proc") / str(self._process.pid)
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        used_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return first_s, read_s, used_s, _memory_mb((folder / "status").read_text())

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def main(nodes: int = 1000, days: float = 7.0) -> None:
    """Print the seconds and the memory of each command."""
    with tempfile.TemporaryDirectory() as base:
        log = SimulatedLog(Path(base) / "week", nodes, days)
        log.write()
        size_mb = sum(path.stat().st_size for path in Path(base).rglob("*.jsonl")) / 1e6
        print(f"{nodes} nodes, {days:g} days: {log.lines} events, {size_mb:.0f} MB")
        for words in (["status", "week"], ["explain", "week"], ["top", "week", "--once"]):
            wall_s, used_s, memory_mb = measure(*words, "--log-dir", base)
            print(f"elastane {words[0]:<8} {wall_s:6.2f} s, {used_s:6.2f} s of CPU, {memory_mb} MB")
        server = MeasuredServer(base, "week")
        try:
            first_s, read_s, used_s, memory_mb = server.measure()
        finally:
            server.close()
        print(
            f"the page's server: first answer after {first_s:.2f} s, all read after {read_s:.1f} s,"
            f" {used_s:.1f} s of CPU, {memory_mb} MB"
        )


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
