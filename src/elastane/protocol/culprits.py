"""Finds the culprit, the worker for which the others wait, from the rings of all workers. Pure.

`judge` compares the evidence of all workers of a world once none has made progress for a while.
The groups of torch count their collectives alike on all members, also those of
DistributedDataParallel. So a worker that has begun fewer than another has not entered a collective
in which others wait. It is the culprit, unless it waits in another group. A worker that waits is
never blamed, except where it called another collective than the others, or with another shape.

What a culprit does instead follows from the kernel and from the thread beside the script: a signal
has stopped it, it holds the interpreter's lock, it computes, it loads data, it reads a file, or it
sleeps. Only some kinds prove that the wait never ends; see `CERTAIN`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from elastane.protocol.hangs import HANG_CEILING_S, ranks_text
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.mismatches import judge_boards, judge_calls
from elastane.protocol.model import Count, Name, NamedWorker
from elastane.protocol.ring import (
    CALLS_SENT_MAX,
    GROUPS_MAX,
    GroupBoard,
    RecordedCall,
    Ring,
    Short,
    WorkerCalls,
    ranks_of,
)
from elastane.protocol.verdicts import Kind, Verdict
from elastane.protocol.words import UNKNOWN_PLACE

# A worker computes if its main thread ran, or could have run, in this share of the samples.
BUSY_SHARE = 0.7
# A world is judged after this multiple of its longest recent time without a new collective. It is
# not judged before it has made some: the first ones wait for compilers and downloads.
STANDSTILL_FACTOR = 10.0
STANDSTILL_MOVES_FIRST = 3
STANDSTILL_WINDOW_S = 1800.0
# Workers that called different collectives are found after the same multiple, and this time at
# least. No wait corrects that, so a short one suffices.
MISMATCH_FLOOR_S = 2.0
# A longer time between two looks counts as this much, since the host may have been suspended.
LOOK_MAX_S = 1.0
# A wait like one that ended by itself is reported only once it lasts this many times as long; the
# second bound is the number of places that are remembered.
PASSED_FACTOR = 2.0
PASSED_MAX = 256


# Workers of one node in one report: with full boards it still fits into a frame. A node with more
# is not compared with others.
EVIDENCE_MAX = 64
# Workers of a job whose stacks are read at one standstill: more show a person the same again.
STACKS_MAX = 4


# Of an error in the sentence of a verdict.
_ERROR_CHARS_MAX = 400
# In place of a letter of /proc: a signal has stopped the worker, but not for long.
PAUSED = "p"


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a worker's process, from the kernel and the status page.

    `state` is the letter of /proc. `busy` is the share of the looks at which its main thread ran or
    could have run. `lock_held`: elastane's thread in the worker no longer runs, so the script holds
    the interpreter's lock. `reads`: the file that the main thread waits for.
    """

    state: Annotated[str, msgspec.Meta(max_length=1)] = "S"
    exit_code: int | None = None
    busy: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    lock_held: bool = False
    loads: bool = False
    reads: Short = ""


class StandstillEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one worker at a standstill: its process, its groups, and its last calls."""

    rank: Count
    node_id: Name
    facts: ProcessFacts
    local_rank: Count = 0
    pid: Count = 0
    groups: Annotated[dict[Short, GroupBoard], msgspec.Meta(max_length=GROUPS_MAX)] = {}
    where: Short = ""
    debugged: bool = False
    calls: Annotated[tuple[RecordedCall, ...], msgspec.Meta(max_length=CALLS_SENT_MAX)] = ()

    @property
    def place(self) -> NamedWorker:
        """The worker's process, and where it is."""
        return NamedWorker(self.node_id, self.rank, self.local_rank, self.pid)

    def waits_in(self) -> set[str]:
        """Return the groups in which this worker has begun a collective that is not complete."""
        at = {name: group.position for name, group in self.groups.items()}
        return {name for name, position in at.items() if position.begun > position.completed}


class Reports:
    """Selects the verdicts of one world that are worth a report.

    A wait that ended by itself may come again, since a script may evaluate on one rank after each
    epoch. A wait of the same kind for the same ranks at the same place is reported only once it
    lasts twice as long. The ranks count too: loaders that hang at one line hang on any rank.
    """

    def __init__(self) -> None:
        self._passed_s: dict[tuple[Kind, str, tuple[int, ...]], float] = {}
        self.current: Verdict | None = None

    def is_new(self, verdict: Verdict, still_s: float) -> bool:
        """Whether to report this verdict of the current standstill; if so, it becomes `current`."""
        before = self.current
        if before is not None and (before.is_certain or not verdict.is_certain):
            return False
        if still_s < self.due_after_s(verdict):
            return False
        self.current = verdict
        return True

    def due_after_s(self, verdict: Verdict) -> float:
        """Return how long a wait has to last before this verdict of it is reported."""
        passed_s = self._passed_s.get((verdict.kind, verdict.place, verdict.ranks), 0.0)
        return 0.0 if verdict.is_certain else PASSED_FACTOR * passed_s

    def end(self, still_s: float) -> bool:
        """Record that the workers move again; return whether their standstill was reported."""
        reported, self.current = self.current, None
        if reported is None:
            return False
        if len(self._passed_s) >= PASSED_MAX:
            self._passed_s.clear()
        self._passed_s[reported.kind, reported.place, reported.ranks] = still_s
        return True

    def forget(self) -> None:
        """Record that the world has ended."""
        self.current = None


class StandstillRules:
    """When to compare workers: after a time without progress that is far longer than usual.

    A reported standstill is not learned as usual: the next fault would be found ten times as late.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._shown: Mapping[int, tuple[int, ...]] = {}
        self._moved_s = 0.0
        self._moves = 0
        self._looked_s: float | None = None
        self.now_s = 0.0
        self._longest_s = self._longest_before_s = 0.0
        self._turned_s = 0.0
        self._is_reported = False

    def look(self, shown: Mapping[int, tuple[int, ...]], now_s: float) -> float:
        """Record each worker's counters, by process id; return for how long none has changed.

        Time without a look, while this host or agent was suspended, is left out of all times.
        """
        passed_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        self.now_s += min(passed_s, LOOK_MAX_S)
        if shown.keys() != self._shown.keys():
            self._begin(self.now_s)
        elif shown != self._shown:
            self._learn(self.now_s)
            self._moves, self._moved_s = self._moves + 1, self.now_s
        self._shown = dict(shown)
        return self.now_s - self._moved_s

    def is_due(self, still_s: float, floor_s: float | None = None) -> bool:
        """Whether to compare workers that have made no progress for this long.

        `floor_s`: the least time; None: that of any standstill.
        """
        longest_s = max(self._longest_s, self._longest_before_s)
        floor_s = self._floor_s if floor_s is None else min(floor_s, self._floor_s)
        limit_s = max(floor_s, min(STANDSTILL_FACTOR * longest_s, HANG_CEILING_S))
        return self._moves >= STANDSTILL_MOVES_FIRST and still_s >= limit_s

    def forget(self) -> None:
        """Record that the world has ended, so that its times say nothing about the next one."""
        self._shown = {}
        self._begin(self.now_s)

    def note_report(self) -> None:
        """Record that this standstill was reported, so that its length is not learned."""
        self._is_reported = True

    def _begin(self, now_s: float) -> None:
        self._moves, self._moved_s, self._is_reported = 0, now_s, False

    def _learn(self, now_s: float) -> None:
        still_s, was_reported, self._is_reported = now_s - self._moved_s, self._is_reported, False
        if was_reported:
            return
        if now_s - self._turned_s >= STANDSTILL_WINDOW_S:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
            self._turned_s = now_s
        if self._moves >= STANDSTILL_MOVES_FIRST:
            self._longest_s = max(self._longest_s, still_s)


def evidence_of(place: NamedWorker, ring: Ring, facts: ProcessFacts) -> StandstillEvidence:
    """Return a worker's evidence, from its ring and the facts about its process."""
    return StandstillEvidence(
        rank=place.rank,
        node_id=place.node_id,
        facts=facts,
        local_rank=place.local_rank,
        pid=place.pid,
        groups=ring.board.groups,
        where=ring.board.where,
        debugged=ring.board.debugged,
        calls=ring.calls[-CALLS_SENT_MAX:],
    )


def hung_alone(worker: StandstillEvidence, reason: str) -> Verdict:
    """Return the verdict about a worker that recovers in place and hangs, for this reason.

    It reported that it does not wait, or did not answer (`protocol.hangs`).
    """
    case = _Case({worker.rank: worker}, {})
    kind = case.kind(worker.rank)
    who = f"rank {worker.rank} on node {worker.node_id}"
    text = f"{who} hangs, {reason}; {_doing(worker, kind)}"
    ranks = (worker.rank,)
    return Verdict(
        kind=kind,
        ranks=ranks,
        sentence=text[:REASON_CHARS_MAX],
        worker=worker.place,
        ends=ranks,
    )


def ends_slowly(
    worker: StandstillEvidence, error: str, since_s: float, limit_s: float
) -> Verdict | None:
    """Return the verdict about a worker that raised `error` and lives; None if it has ended.

    `error` is "" if the program ended with an exit code or was interrupted.
    """
    kind = _Case({worker.rank: worker}, {}).kind(worker.rank)
    if kind is Kind.ENDED:
        return None
    who = f"rank {worker.rank} on node {worker.node_id}"
    failed = f"raised {error[:_ERROR_CHARS_MAX]}" if error else "ended its program as failed"
    text = (
        f"{who} {failed}; its process has not ended {since_s:.1f} s later,"
        f" and its agent ends it after {limit_s:g} s; {_doing(worker, kind)}"
    )
    return Verdict(
        kind=Kind.RAISED,
        ranks=(worker.rank,),
        sentence=text[:REASON_CHARS_MAX],
        worker=worker.place,
    )


def is_shown(worker: StandstillEvidence) -> bool:
    """Whether the evidence is complete: it will not grow at this standstill."""
    facts = worker.facts
    if facts.state == PAUSED:
        return False
    is_silent = facts.exit_code is not None or facts.lock_held or facts.state in ("T", "t")
    return is_silent or bool(worker.where)


def judge(evidence: Iterable[StandstillEvidence], world_size: int) -> Verdict | None:
    """Return the culprits; None if no worker waits for another, or some worker is not known."""
    workers = {each.rank: each for each in evidence}
    if set(workers) != {*range(world_size)} or world_size < 2:
        return None
    case = _Case(workers, _groups(workers, world_size))
    if not case.waiters:
        # torch does not count the collectives of elastane's own groups, which are only recorded.
        found = case.of_calls() if all(map(_is_in_call, workers.values())) else None
    else:
        found = case.of_stopped() or case.of_mismatch() or case.of_missing() or case.of_no_worker()
    if found is None:
        return None
    first = workers[found.ranks[0]].place if found.ranks else None
    found = msgspec.structs.replace(found, worker=first)
    if not found.is_certain:
        return found
    has_living = found.ranks and found.kind is not Kind.ENDED
    ends = found.ranks if has_living else tuple(case.waiters[:1])
    return msgspec.structs.replace(found, ends=ends)


def _is_in_call(worker: StandstillEvidence) -> bool:
    """Whether the last collective that a worker has called has not returned."""
    return bool(worker.calls) and not worker.calls[-1].returned_ns


def _groups(
    workers: Mapping[int, StandstillEvidence], world_size: int
) -> dict[str, frozenset[int]]:
    """Return the members of each group whose members all show a position that can be compared."""
    found: dict[str, frozenset[int]] = {}
    for each in workers.values():
        for name, group in each.groups.items():
            if name not in found:
                found[name] = ranks_of(group.ranks, world_size)
    return {
        name: members
        for name, members in found.items()
        if len(members) > 1
        and all(name in workers[rank].groups for rank in members)
        and not any(workers[rank].groups[name].sends for rank in members)
    }


class _Case:
    """The workers of one standstill, and the groups in which they meet.

    A worker waits in a group for the members that have begun fewer collectives there. If none has,
    it waits for those whose process cannot take part. The culprits are at the ends of these waits.
    """

    def __init__(
        self, workers: Mapping[int, StandstillEvidence], groups: Mapping[str, frozenset[int]]
    ) -> None:
        self._workers = workers
        self._groups = groups
        self._node_of = {rank: each.node_id for rank, each in workers.items()}
        self.waiters = [rank for rank in sorted(workers) if self._waits(rank)]
        self._own_kinds = {rank: self._find_own_kind(rank) for rank in workers}
        # By group and position: a world of thousands waits in a few collectives.
        self._known: dict[tuple[str, int], list[int]] = {}
        self._edges = {rank: self._awaited(rank) for rank in self.waiters}

    def of_stopped(self) -> Verdict | None:
        """Blame workers that a signal has stopped, wherever they were."""
        stopped = [rank for rank, each in self._workers.items() if each.facts.state == "T"]
        # A person who stops all workers will continue them later, so no worker is to blame.
        is_awaited = any(rank not in stopped for rank in self.waiters)
        return self._blame(Kind.STOPPED, sorted(stopped)) if stopped and is_awaited else None

    def of_mismatch(self) -> Verdict | None:
        """Blame workers that called another collective than most, or with another shape."""
        nodes = self._node_of
        places = {rank: place_of(each.where) for rank, each in self._workers.items()}
        for name in sorted(self._groups):
            boards = {rank: self._workers[rank].groups[name] for rank in self._groups[name]}
            found = judge_boards(name, boards, places, nodes)
            if found is not None:
                return found
        return self.of_calls()

    def of_calls(self) -> Verdict | None:
        """Blame workers by the collectives that the script called, as each of them recorded these.

        Other backends than gloo were not tried.
        """
        groups = [each for worker in self._workers.values() for each in worker.groups.values()]
        if any(each.backend not in ("", "gloo") for each in groups):
            return None
        calls = (WorkerCalls(rank=r, calls=each.calls) for r, each in self._workers.items())
        return judge_calls(calls, self._node_of, only_open=True)

    def of_missing(self) -> Verdict | None:
        """Blame the workers for which others wait, and which wait for no other themselves."""
        awaited = {
            rank for edges in self._edges.values() for found in edges.values() for rank in found
        }
        ends = sorted(rank for rank in awaited if not any(self._edges.get(rank, {}).values()))
        if not ends:
            return None
        first = min(ends, key=lambda rank: (-len(self._waiting_for(rank)), rank))
        kind, place = self.kind(first), self._missed(first)
        return self._blame(
            kind, [rank for rank in ends if (self.kind(rank), self._missed(rank)) == (kind, place)]
        )

    def of_no_worker(self) -> Verdict:
        """Return the verdict if each worker waits, and none of them is behind."""
        places = _places(self._workers.values())
        if any(any(edges.values()) for edges in self._edges.values()):
            text = f"each worker waits for another one: {places}"
            return Verdict(kind=Kind.DEADLOCK, ranks=(), sentence=text[:REASON_CHARS_MAX])
        group, sequence = self._open(self.waiters)
        text = (
            f"all workers are in collective #{sequence} of group {group!r}, and none is behind:"
            f" the network, or a device, does not complete it; {places}"
        )[:REASON_CHARS_MAX]
        return Verdict(kind=Kind.NETWORK, ranks=(), sentence=text, group=group, sequence=sequence)

    def _waits(self, rank: int) -> set[str]:
        return self._workers[rank].waits_in() & self._groups.keys()

    def _awaited(self, rank: int) -> dict[str, list[int]]:
        """Return the members that a worker waits for, by group; a process that cannot has none."""
        if self._own_kind(rank) is not None:
            return {}
        at = {name: self._position(rank, name) for name in sorted(self._waits(rank))}
        return {name: self._awaited_in(name, here) for name, here in at.items()}

    def _awaited_in(self, name: str, here: int) -> list[int]:
        """Return the members that a worker waits for after it has begun `here` collectives."""
        if (name, here) not in self._known:
            members = sorted(self._groups[name])
            behind = [rank for rank in members if self._position(rank, name) < here]
            unable = [rank for rank in members if self._own_kind(rank)]
            self._known[name, here] = behind or unable
        return self._known[name, here]

    def _own_kind(self, rank: int) -> Kind | None:
        return self._own_kinds[rank]

    def _find_own_kind(self, rank: int) -> Kind | None:
        """Return why the process of a worker cannot take part in anything; None if it can."""
        worker = self._workers[rank]
        if worker.facts.exit_code is not None:
            return Kind.ENDED
        if worker.facts.state == "T":
            return Kind.STOPPED
        if worker.debugged or worker.facts.state == "t":
            return Kind.DEBUGGED
        if worker.facts.state == "D":
            return Kind.DISK
        return Kind.LOCK_HELD if worker.facts.lock_held else None

    def kind(self, rank: int) -> Kind:
        """Return what a worker does in place of its next collective."""
        facts = self._workers[rank].facts
        own = self._own_kind(rank)
        if own is not None:
            return own
        if facts.busy >= BUSY_SHARE:
            return Kind.DATA_LOADER if facts.loads else Kind.BUSY
        if self._waits(rank):
            return Kind.NETWORK  # the others have completed the collective in which it waits
        if facts.reads:
            return Kind.DISK
        return Kind.DATA_LOADER if facts.loads else Kind.SLEEPS

    def _position(self, rank: int, name: str) -> int:
        return self._workers[rank].groups[name].position.begun

    def _waiting_for(self, rank: int) -> list[int]:
        return [who for who, edges in self._edges.items() if any(rank in e for e in edges.values())]

    def _missed(self, rank: int) -> tuple[str, int]:
        """Return the collective in which most workers wait for this one: its group and number."""
        waiting = Counter(
            name for edges in self._edges.values() for name, ranks in edges.items() if rank in ranks
        )
        if not waiting:
            return self._open([who for who in self.waiters if who != rank] or self.waiters)
        name = min(waiting, key=lambda each: (-waiting[each], each))
        furthest = max(self._position(member, name) for member in self._groups[name])
        if self._own_kind(rank) is not None:
            return name, furthest  # its board may be older than its last collective
        return name, min(self._position(rank, name) + 1, furthest)

    def _open(self, ranks: Sequence[int]) -> tuple[str, int]:
        """Return the collective in which most of these workers wait."""
        waiting = Counter(name for rank in ranks for name in self._waits(rank))
        name = min(waiting, key=lambda each: (-waiting[each], each))
        return name, max(self._position(rank, name) for rank in self._groups[name])

    def _blame(self, kind: Kind, ranks: Sequence[int]) -> Verdict:
        group, sequence = self._missed(ranks[0])
        waiting = [
            each
            for rank, each in sorted(self._workers.items())
            if rank not in ranks and group in self._waits(rank)
        ]
        lacks = all(
            group not in self._workers[rank].groups or self._position(rank, group) < sequence
            for rank in ranks
        )
        what = f"collective #{sequence} of group {group!r}"
        if waiting:
            what = f"{_operation(waiting[0], group, sequence)} #{sequence}{_place(waiting[0])}"
        in_it = f"; {_wait(waiting)} in it" if waiting else ""
        has = f"{_has(ranks)} not {'entered' if lacks else 'completed'} {what}"
        who = f"{ranks_text(ranks)} on {self._nodes(ranks)}"
        text = f"{who} {has}{in_it}; {_doing(self._workers[ranks[0]], kind)}"
        return Verdict(
            kind=kind,
            ranks=tuple(ranks),
            sentence=text[:REASON_CHARS_MAX],
            group=group,
            sequence=sequence,
            place=place_of(waiting[0].where) if waiting else "",
        )

    def _nodes(self, ranks: Iterable[int]) -> str:
        nodes = list(dict.fromkeys(self._workers[rank].node_id for rank in ranks))
        return f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}"


def _wait(waiting: Sequence[StandstillEvidence]) -> str:
    return f"{ranks_text([each.rank for each in waiting])} wait{'s' * (len(waiting) == 1)}"


def _has(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _doing(worker: StandstillEvidence, kind: Kind) -> str:
    """Return what a culprit does instead of its next collective, as a clause with its place."""
    who, is_known = f"rank {worker.rank}", worker.where not in ("", UNKNOWN_PLACE)
    at = f" at {place_of(worker.where)}" if is_known else ""
    file = f": {worker.facts.reads}" if worker.facts.reads else ""
    call = worker.calls[-1] if worker.calls else None
    last = f"; its last collective was {call.operation} ({call.site})" if call else ""
    return {
        Kind.STOPPED: f"{who} is stopped by a signal (SIGSTOP){last}",
        Kind.ENDED: f"{who} has ended with exit code {worker.facts.exit_code}{last}",
        Kind.LOCK_HELD: f"{who} holds the interpreter's lock in a call that does not return{last}",
        Kind.DATA_LOADER: f"{who} waits for its data loader{at}",
        Kind.DISK: f"{who} waits for a file{file}{at}",
        Kind.BUSY: f"{who} computes{at}",
        Kind.SLEEPS: f"{who} sleeps or waits for something else{at}",
        Kind.DEBUGGED: f"{who} is held by a debugger{at}",
        Kind.NETWORK: f"its part of it does not complete{at}",
    }[kind]


def _operation(worker: StandstillEvidence, group: str, sequence: int) -> str:
    for call in worker.groups[group].calls:
        if call.sequence == sequence:
            return call.operation
    return worker.where.partition(" (")[0] or "collective"


def _place(worker: StandstillEvidence) -> str:
    return f" ({place_of(worker.where)})" if worker.where else ""


def place_of(where: str) -> str:
    """Return the line and the function of a description such as "barrier (train.py:8, main)"."""
    _, opened, place = where.partition(" (")
    return place.removesuffix(")") if opened else where


def _places(workers: Iterable[StandstillEvidence]) -> str:
    places: dict[str, list[int]] = {}
    for each in sorted(workers, key=lambda each: each.rank):
        places.setdefault(each.where or UNKNOWN_PLACE, []).append(each.rank)
    return ", ".join(f"{ranks_text(ranks)} in {where}" for where, ranks in places.items())
