"""Looks at local workers that wait for one another, and says which of them is to blame.

Owns the reads of their rings and of what /proc shows of them. `protocol.culprits` judges. A worker
is ended only for a fault after which the wait provably never ends, and only in a script that no
other hang rule watches. Everything else is reported, and left to the timeout of the script's own
process group: a worker that computes or loads data may be busy with something that takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastane.agent.worker import GroupSetup, LocalWorker
from elastane.process.kernel import blocking_descriptor
from elastane.protocol.culprits import (
    ProcessFacts,
    Standing,
    StandstillRules,
    Verdict,
    is_shown,
    judge,
    standing_of,
)
from elastane.protocol.limits import WHERE_CHARS_MAX
from elastane.protocol.model import Assignment, Failure

# Workers are looked at more closely from the first such time without a move on.
_CLOSE_S = 1.0
# The thread beside a script runs four times a second; on a busy host it may be late.
_BEAT_LATE_S = 2.0
# A thread beside a script shows where its main thread is, this long after it is due at the latest.
_SHOWN_LATE_S = 12.0
# Files that are no files: a terminal, a socket, an anonymous pipe.
_NO_FILES = ("/dev/", "socket:", "pipe:", "anon_inode:", "/memfd:")


@dataclass(frozen=True)
class MonitorPosts:
    """Where a monitor's findings go, and the world of the workers that it watches."""

    failed: Callable[[Failure, float], None]
    culprit: Callable[[Verdict, float], None]
    world: Callable[[], Assignment]


@dataclass
class _Sample:
    """What was seen of one process: its beats, and since when; its main thread at each look."""

    beats: int
    beat_s: float
    looks: int = 0
    runs: int = 0


class StandstillWatch:
    """Compares the rings of the workers of one node, once they have come to a standstill."""

    def __init__(self, setup: GroupSetup, post: MonitorPosts) -> None:
        self._node_id = setup.run.node_id
        self._post = post
        self._rules = StandstillRules(setup.hang_floor_s)
        self._samples: dict[int, _Sample] = {}

    def world_ended(self) -> None:
        """Forget what was seen: other workers, or other places, come next."""
        self._rules.look({}, 0.0)
        self._samples.clear()

    def look(
        self, members: Sequence[LocalWorker], now_s: float
    ) -> Iterator[tuple[LocalWorker, str]]:
        """Look at the members of a world; yield those that are to be ended, and why."""
        shown = {w.process.pid: w.page.moves for w in members if w.process is not None}
        still_s = self._rules.look(shown, now_s)
        if still_s < _CLOSE_S:
            self._samples.clear()
            return
        for worker in members:
            self._sample(worker, now_s)
        if not self._rules.is_due(still_s):
            return
        standings = [self._standing(worker, now_s) for worker in members]
        if not self._rules.is_due(still_s - _SHOWN_LATE_S) and not all(map(is_shown, standings)):
            return
        verdict = judge(standings, self._post.world().world_size)
        if verdict is None or not self._rules.is_new(verdict, still_s):
            return
        self._post.culprit(verdict, still_s)
        if verdict.is_certain:
            yield from self._to_be_ended(members, verdict)

    def _to_be_ended(
        self, members: Sequence[LocalWorker], verdict: Verdict
    ) -> Iterator[tuple[LocalWorker, str]]:
        """Yield the culprits that live, or a worker that waits if there is none."""
        alive = [worker for worker in members if worker.is_alive and not worker.page.mark]
        guilty = [worker for worker in alive if worker.rank in verdict.ranks]
        for worker in guilty or alive[:1]:
            yield worker, verdict.sentence

    def _sample(self, worker: LocalWorker, now_s: float) -> None:
        process = worker.process
        if process is None:
            return
        beats = worker.page.beats
        sample = self._samples.setdefault(process.pid, _Sample(beats, now_s))
        if sample.beats != beats:
            sample.beats, sample.beat_s = beats, now_s
        sample.looks += 1
        sample.runs += _state(process.pid) == "R"

    def _standing(self, worker: LocalWorker, now_s: float) -> Standing:
        return standing_of(
            worker.rank, self._node_id, worker.page.ring(), self._facts(worker, now_s)
        )

    def _facts(self, worker: LocalWorker, now_s: float) -> ProcessFacts:
        process = worker.process
        if process is None or process.exit_code is not None:
            code = process.exit_code if process is not None else None
            return ProcessFacts(state="X", exit_code=code if code is not None else 0)
        sample = self._samples.get(process.pid)
        late = sample is not None and now_s - sample.beat_s >= _BEAT_LATE_S
        return ProcessFacts(
            state=_state(process.pid),
            busy=sample.runs / sample.looks if sample is not None else 0.0,
            lock_held=late and worker.page.beats > 0,
            loads=worker.page.is_loading,
            reads=_read_file(process.pid),
        )


def _state(pid: int) -> str:
    """Return the state letter of the main thread; X if it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(") ")[2][:1] or "X"


def _read_file(pid: int) -> str:
    """Return the file that the main thread waits to read or open; "" if it waits for none."""
    try:
        text = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # it has ended, or this kernel does not show it
    fd = blocking_descriptor(text)
    if fd is None:
        return ""
    if fd < 0:
        return "one that it opens"
    try:
        path = str(Path(f"/proc/{pid}/fd/{fd}").readlink())
    except OSError:
        return ""
    return "" if path.startswith(_NO_FILES) else path[:WHERE_CHARS_MAX]
