"""Reports what the local workers show once none of them makes progress.

Owns the reads of their rings and of what /proc shows of them. The coordinator compares the workers
of all nodes by `protocol.culprits`, which also says when to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastane.agent.worker import GroupSetup, LocalWorker
from elastane.process.kernel import blocking_descriptor
from elastane.protocol.culprits import (
    EVIDENCE_MAX,
    MISMATCH_FLOOR_S,
    PAUSED,
    ProcessFacts,
    StandstillEvidence,
    StandstillRules,
    ends_slowly,
    evidence_of,
    hung_alone,
    is_shown,
)
from elastane.protocol.limits import WHERE_CHARS_MAX
from elastane.protocol.model import Failure, NamedWorker
from elastane.protocol.pauses import Pause
from elastane.protocol.verdicts import Verdict

# After this long without progress, workers are sampled at each look.
_CLOSE_S = 1.0
# The thread beside a script runs four times a second; on a busy host it may be late.
_BEAT_LATE_S = 2.0
# A thread beside a script shows the main thread's place this long after it is due, at the latest.
_SHOWN_LATE_S = 12.0
# A worker counts as stopped after this many samples in a row, at four samples a second; at once
# where another rule has found that it hangs.
_STOPS, _STOPS_OF_HUNG = 8, 0
# Open files that hold no data: a terminal, a socket, an anonymous pipe.
_NO_FILES = ("/dev/", "socket:", "pipe:", "anon_inode:", "/memfd:")


@dataclass(frozen=True)
class MonitorPosts:
    """The receivers of a monitor's findings.

    `evidence` receives that of all workers here, and whether it is early, so that it serves to find
    a mismatch alone; empty once they move again. `paused` receives how long rank 0 saved, evaluated
    or restored, and until when.
    """

    failed: Callable[[Failure, float], None]
    culprit: Callable[[Verdict, float], None]
    evidence: Callable[[tuple[StandstillEvidence, ...], float, bool], None]
    paused: Callable[[Pause, float, float], None]


@dataclass
class _Sample:
    """The samples of one process: its beats, since when they stand, its main thread's states."""

    beats: int
    beat_s: float
    looks: int = 0
    runs: int = 0
    stops: int = 0  # samples in a row in which a signal had stopped it


class StandstillWatch:
    """Sends the evidence of the workers of one node, once they have come to a standstill.

    It is sent early for a mismatch of collectives, which no wait corrects, and again once any other
    standstill is judged. Where another rule finds that all workers wait for one another, it is sent
    before that rule ends their world, which names no worker.
    """

    def __init__(self, setup: GroupSetup, post: MonitorPosts) -> None:
        self._node_id = setup.run.node_id
        self._limit_s = setup.error_exit_limit_s
        self._post = post
        self._rules = StandstillRules(setup.hang_floor_s)
        self._samples: dict[int, _Sample] = {}
        self._still_s = 0.0
        self._sent: tuple[object, ...] = ()

    def world_ended(self) -> None:
        """Forget what was seen: other workers, or other places, come next."""
        self._rules.forget()
        self._samples.clear()
        self._sent = ()

    def look(self, members: Sequence[LocalWorker], now_s: float, *, all_wait: bool = False) -> None:
        """Look at the members of a world, and send their evidence if it is due.

        `all_wait`: each of them has waited for others for a while, by a rule of its own.
        """
        shown = {w.process.pid: w.page.moves for w in members if w.process is not None}
        self._still_s = self._rules.look(shown, now_s)
        now_s = self._rules.now_s
        if self._still_s < _CLOSE_S:
            self._move()
            return
        for worker in members:
            self._sample(worker, now_s)
        is_due = self._rules.is_due(self._still_s)
        if not (is_due or all_wait or self._rules.is_due(self._still_s, MISMATCH_FLOOR_S)):
            return
        evidence = [self._evidence(worker, now_s) for worker in members]
        is_late = self._rules.is_due(self._still_s - _SHOWN_LATE_S)
        if is_late or all_wait or all(map(is_shown, evidence)):
            self._send(evidence, is_due=is_due)

    def describe(self, worker: LocalWorker, reason: str) -> None:
        """Report the activity of a worker that hangs by another rule, unless it is being ended."""
        self._rules.note_report()
        if not (worker.hung or worker.given_up):
            evidence = self._evidence(worker, self._rules.now_s, _STOPS_OF_HUNG)
            self._post.culprit(hung_alone(evidence, reason), self._still_s)

    def describe_end(self, worker: LocalWorker, error: str, lived_s: float) -> None:
        """Report that a worker lives on after this error; "": a failure without a text."""
        evidence = self._evidence(worker, self._rules.now_s)
        verdict = ends_slowly(evidence, error, lived_s, self._limit_s)
        if verdict is not None:
            self._post.culprit(verdict, lived_s)

    def _move(self) -> None:
        """Note that the workers move again."""
        self._samples.clear()
        if self._sent:
            self._sent = ()
            self._post.evidence((), 0.0, False)

    def _send(self, evidence: Sequence[StandstillEvidence], *, is_due: bool) -> None:
        """Send the evidence of the workers, and again if one of their processes has changed."""
        facts = tuple(
            (each.rank, each.facts.state in "Tt", each.facts.lock_held, each.facts.exit_code)
            for each in evidence
        )
        if len(evidence) <= EVIDENCE_MAX and self._sent != (is_due, *facts):
            self._sent = (is_due, *facts)
            if is_due:
                self._rules.note_report()
            self._post.evidence(tuple(evidence), self._still_s, not is_due)

    def _sample(self, worker: LocalWorker, now_s: float) -> None:
        process = worker.process
        if process is None:
            return
        beats = worker.page.beats
        sample = self._samples.setdefault(process.pid, _Sample(beats, now_s))
        if sample.beats != beats:
            sample.beats, sample.beat_s = beats, now_s
        sample.looks += 1
        state = _state(process.pid)
        sample.runs += state == "R"
        sample.stops = sample.stops + 1 if state == "T" else 0

    def _evidence(
        self, worker: LocalWorker, now_s: float, stops: int = _STOPS
    ) -> StandstillEvidence:
        pid = worker.process.pid if worker.process is not None else 0
        place = NamedWorker(self._node_id, worker.rank, worker.local_rank, pid)
        return evidence_of(place, worker.page.ring(), self._facts(worker, now_s, stops))

    def _facts(self, worker: LocalWorker, now_s: float, stops: int) -> ProcessFacts:
        process = worker.process
        if process is None or process.exit_code is not None:
            code = process.exit_code if process is not None else None
            return ProcessFacts(state="X", exit_code=code if code is not None else 0)
        sample = self._samples.get(process.pid)
        late = sample is not None and now_s - sample.beat_s >= _BEAT_LATE_S
        state = _state(process.pid)
        if state == "T" and sample is not None and sample.stops < stops:
            state = PAUSED  # perhaps for a moment, by a scheduler
        return ProcessFacts(
            state=state,
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
