"""View-synchronous collectives of a whole group, played in random order with faults, and checked.

`python -m simulation.collectives --seeds 1000`. From a seed come a program, which all members run,
and an order of events: issues, completions, deliveries, votes, deaths, exclusions of living
members, and each part of a meeting. The members are the product's (`elastane.synchrony.rules`);
only their world is played here. It completes operations as gloo does: an operation completes at a
member once those that it needs have started it in the same view, at each member at another time.

With `--admits` the program has boundaries, at which a coordinator holds all members and admits new
ones, or changes its mind.

A result is who contributed to it, so the checks are exact. `Violation` names the first one broken.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastane.synchrony.operations import Identity, Rule, Signature, Site
from elastane.synchrony.rules import (
    Delivery,
    Gift,
    Plan,
    RefusedCall,
    Start,
    Table,
    View,
    ViewMember,
    ViewPhase,
    plan,
)

EVENTS_MAX = 20_000
_OPERATIONS = 16
# Kinds of operations whose interruption never restarts a job, and all of them.
_KEPT = ("max", "count", "true sum", "authority", "barrier")
_ALL = (*_KEPT, "sum", "broadcast", "gather", "private")
_REFUSAL = RefusedCall("RuntimeError", "Invalid scalar type")


class CollectiveViolation(AssertionError):
    """A property that the collectives promise does not hold."""


@dataclass(frozen=True)
class CollectiveAct:
    """One statement of the program; `what` with the operation of `index`, or with `buckets`."""

    what: str
    kind: str = ""
    index: int = 0
    buckets: int = 0


@dataclass(frozen=True)
class CollectiveResult:
    """What an operation returns: its kind, and the contributions that it is made of."""

    number: int
    parts: frozenset[tuple[Identity, int]]


def program_of(
    choose: random.Random, kinds: Sequence[str], *, in_order: bool, has_boundaries: bool = False
) -> list[CollectiveAct]:
    """Return a program: operations in flight together, backward passes, waits, reads of the size.

    `in_order`: it waits for everything before a backward pass, and before a boundary.
    """
    acts, open_, index = list[CollectiveAct](), list[int](), 0
    while index < _OPERATIONS:
        if has_boundaries and choose.random() < 0.2:
            while in_order and open_:
                acts.append(CollectiveAct("wait", index=open_.pop(0)))
            acts += [CollectiveAct("arrive"), CollectiveAct("depart"), CollectiveAct("read")]
        dice = choose.random()
        if dice < 0.2:
            buckets = choose.randint(1, 3)
            while in_order and open_:
                acts.append(CollectiveAct("wait", index=open_.pop(0)))
            acts += [
                CollectiveAct("forward"),
                *(CollectiveAct("bucket", index=index + i) for i in range(buckets)),
            ]
            acts += [CollectiveAct("close", index=index, buckets=buckets)]
            acts += [CollectiveAct("wait", index=index + i) for i in range(buckets)]
            index += buckets
        elif dice < 0.55 and len(open_) < 4:
            acts.append(CollectiveAct("issue", choose.choice(kinds), index))
            open_.append(index)
            index += 1
        elif dice < 0.8 and open_:
            acts.append(CollectiveAct("wait", index=open_.pop(0)))
        else:
            acts.append(CollectiveAct("read"))
    return [*acts, *(CollectiveAct("wait", index=each) for each in open_), CollectiveAct("read")]


class Process:
    """One member: its rules, its place in the program, and what it has in memory."""

    def __init__(self, identity: Identity, *, keeps_ranks: bool) -> None:
        self.identity = identity
        self.member = ViewMember(identity, keeps_ranks=keeps_ranks)
        self.at = 0
        self.is_alive = True
        self.has_left = False
        # The view whose meeting it is in, and what it has of that meeting.
        self.tables_of: int | None = None
        self.taken: set[int] = set()
        self.decided: Plan | None = None
        # How many operations the job had delivered when this newcomer got its state.
        self.began_at = 0
        # Results by number: complete here, kept for others, handed over by others.
        self.complete: dict[int, CollectiveResult] = {}
        self.kept: dict[int, CollectiveResult] = {}
        self.handed: dict[int, CollectiveResult] = {}
        # What the checks compare.
        self.returned: dict[int, CollectiveResult] = {}
        self.reads: dict[int, int] = {}
        self.roots: dict[int, Identity | None] = {}
        # Operations whose kept result lies in buckets that were filled again since.
        self.overwritten: set[int] = set()
        self.buckets: set[int] = set()

    @property
    def is_present(self) -> bool:
        """Whether it lives and has not left."""
        return self.is_alive and not self.has_left and self.member.phase is not ViewPhase.LEFT


class Restart(Exception):
    """The job restarts; no error where the program has operations that cannot be kept."""


@dataclass
class Played:
    """How one history ended, and what happened in it."""

    restarted: str = ""
    counts: Counter[str] = field(default_factory=Counter)


class CollectiveHistory:
    """One history: `play` runs it to its end."""

    def __init__(self, seed: int, *, keepable: bool, admits: bool = False) -> None:
        self.choose = random.Random(seed)
        self.keepable = keepable
        kinds = _KEPT if keepable else _ALL
        program = program_of(self.choose, kinds, in_order=keepable, has_boundaries=admits)
        # Chosen by a generator of its own: the histories of kept seeds stay the same.
        aside = random.Random(seed)
        self.program = [
            replace(act, kind="first size") if act.kind == "max" and aside.random() < 0.5 else act
            for act in program
        ]
        self.program = [
            replace(act, kind="refused") if act.kind == "barrier" and aside.random() < 0.5 else act
            for act in self.program
        ]
        # How often new members may still be admitted, and the boundary at which all are held.
        self.admissions = self.choose.randint(1, 3) if admits else 0
        self.gate: int | None = None
        size = self.choose.randint(2, 5)
        keeps = not keepable and self.choose.random() < 0.3
        self.processes = [Process(Identity(100 + i), keeps_ranks=keeps) for i in range(size)]
        everybody = tuple(each.identity for each in self.processes)
        self.views = [View((1, 0), everybody)]
        self.deaths = self.choose.randint(1, 3)
        self.exclusions = self.choose.randint(0, 1)
        self.keeps_ranks = keeps
        # By view and number: the operations that each member has started; the votes; the members
        # whose program has ended, those that know that all have; the tables of a meeting.
        self.started: dict[tuple[int, int], dict[Identity, tuple[Signature, Start]]] = {}
        self.votes: dict[int, dict[Identity, list[int]]] = {0: {}}
        self.ended: dict[int, set[Identity]] = {}
        self.leaving: dict[int, set[Identity]] = {}
        self.tables: dict[int, dict[Identity, Table]] = {}
        # By view with newcomers: the members that have all they need to install it.
        self.settled: dict[int, set[Identity]] = {}
        self.counts: Counter[str] = Counter()
        for process in self.processes:
            process.member.begin(self.views[0])

    def play(self) -> Played:
        """Play events in random order until all members have left or died."""
        try:
            for _ in range(EVENTS_MAX):
                events = self._events()
                if not events and self.gate is not None:
                    events = [lambda: self._hold_at(None)]
                if not events:
                    break
                self.choose.choice(events)()
                self._check()
            present = [process for process in self.processes if process.is_present]
            if present:
                stuck = [(p.identity, p.at, p.member.phase, p.member.delivered) for p in present]
                raise CollectiveViolation(f"liveness: {stuck} of {len(self.program)} acts")
        except Restart as restart:
            if self.keepable and not self._is_lost():
                raise CollectiveViolation(f"a needless restart: {restart}") from restart
            return Played(str(restart), self.counts)
        return Played("", self.counts)

    # What may happen now.

    def _events(self) -> list[Callable[[], None]]:
        found = list[Callable[[], None]]()
        for process in self.processes:
            if process.is_present:
                found += self._events_of(process)
        alive = [process for process in self.processes if process.is_present]
        if self.deaths and len(alive) > 1 and self.choose.random() < 0.05:
            found.append(lambda: self._die(self.choose.choice(alive)))
        if self._needs_view():
            found.append(self._next_view)
        elif self.exclusions and len(alive) > 2 and self.choose.random() < 0.02:
            found.append(self._exclude)
        return found + self._admission_events(alive)

    def _events_of(self, process: Process) -> list[Callable[[], None]]:
        found = list[Callable[[], None]]()
        member = process.member
        if process.at < len(self.program) and self._may_act(process):
            found.append(lambda: self._act(process))
        if member.phase is ViewPhase.RUNNING:
            view = self._view_of(process)
            for number in range(member.delivered, member.issued):
                if self._completes(process, view, number):
                    found.append(functools.partial(self._complete, process, view, number))
            if member.vote is not None:
                found += self._vote_events(process, view)
            elif process.at == len(self.program) and member.delivered == member.issued:
                found += self._end_events(process, view)
            if self._is_broken(view):
                found.append(lambda: self._seal(process))
        elif member.phase in (ViewPhase.SEALED, ViewPhase.NEW):
            found += self._meeting_events(process)
        return found

    # The program.

    def _may_act(self, process: Process) -> bool:
        act, member = self.program[process.at], process.member
        if act.what == "wait":
            return member.delivered > act.index
        if act.what == "forward":
            return member.vote is None
        if act.what == "arrive":
            return member.phase is ViewPhase.RUNNING and member.delivered == member.issued
        if act.what == "depart":
            return member.phase is ViewPhase.RUNNING and not self._is_held(process)
        return act.what in ("read", "close") or member.phase is ViewPhase.RUNNING

    def _act(self, process: Process) -> None:
        act, member = self.program[process.at], process.member
        process.at += 1
        if act.what == "read":
            process.reads[process.at] = len(member.visible)
        elif act.what == "wait" and act.index >= process.began_at:
            member.waited(act.index)
            self._restart_if_asked(process)
            self._check_result(process, act.index)
        elif act.what == "wait":
            return  # Begun by the program before this newcomer was a member: it holds no work.
        elif act.what in ("arrive", "depart"):
            if not (member.arrive() if act.what == "arrive" else member.depart()):
                raise CollectiveViolation(f"{process.identity} may {act.what}, and does not")
            self._restart_if_asked(process)
        elif act.what == "forward":
            process.overwritten |= process.buckets
        elif act.what == "close":
            member.close_unit(act.index + act.buckets)
            self._deliver(process)
            self._restart_if_asked(process)
        else:
            self._issue(process, act)

    def _restart_if_asked(self, process: Process) -> None:
        if process.member.restart:
            raise Restart(process.member.restart)

    def _issue(self, process: Process, act: CollectiveAct) -> None:
        member = process.member
        signature = self._signature(process, act)
        unit = None
        if act.what == "bucket":
            closes = next(a for a in self.program[process.at :] if a.what == "close")
            unit = closes.index + closes.buckets
        divided_by = len(member.visible) if act.what == "bucket" else 0
        if act.kind == "first size":
            divided_by = len(self.views[0].members)
        issued = member.issue(signature, unit=unit, divided_by=divided_by)
        process.roots[act.index] = signature.root
        if issued.restart:
            raise Restart(issued.restart)
        if issued.number != act.index:
            raise CollectiveViolation(f"order: operation {act.index} got number {issued.number}")
        if issued.start is not None:
            self._start(process, signature, issued.start)
        self._deliver(process)

    def _signature(self, process: Process, act: CollectiveAct) -> Signature:
        visible = process.member.visible
        if act.what == "bucket":
            return Signature("allreduce", reduction="sum", site=Site.REDUCER)
        root = visible[act.index % len(visible)]
        return {
            "max": Signature("allreduce", reduction="max"),
            "count": Signature("allreduce", reduction="sum", counts=True),
            "true sum": Signature("allreduce", reduction="sum", site=Site.TRUE_SUM),
            "sum": Signature("allreduce", reduction="sum"),
            "first size": Signature("allreduce", reduction="sum", site=Site.FIRST_SIZE),
            "barrier": Signature("barrier"),
            "refused": Signature("allreduce", reduction="max"),
            "broadcast": Signature("broadcast", root=root),
            "authority": Signature("broadcast", root=root, site=Site.AUTHORITY),
            "gather": Signature("allgather", shaped=len(visible)),
            "private": Signature("reduce_scatter", reduction="sum", shaped=len(visible)),
        }[act.kind]

    # The world.

    def _view_of(self, process: Process) -> int:
        return next(i for i, v in enumerate(self.views) if v.number == process.member.view.number)

    def _start(self, process: Process, signature: Signature, start: Start) -> None:
        view = self._view_of(process)
        started = self.started.setdefault((view, start.number), {})
        for other, _ in started.values():
            if other != signature:
                raise CollectiveViolation(
                    f"operation {start.number} is {other} and {signature} in one view"
                )
        started[process.identity] = (signature, start)

    def _completes(self, process: Process, view: int, number: int) -> bool:
        started = self.started.get((view, number), {})
        if process.identity not in started or number in process.complete:
            return False
        signature, start = started[process.identity]
        if self._kind(number) == "refused":
            return True
        if signature.kind == "broadcast":
            return start.root == process.identity or start.root in started
        return {*self.views[view].members} <= {*started}

    def _complete(self, process: Process, view: int, number: int) -> None:
        started = self.started[view, number]
        signature, start = started[process.identity]
        if signature.kind == "broadcast":
            assert start.root is not None
            if start.root in started and started[start.root][1].root != start.root:
                raise CollectiveViolation(f"operation {number}: two members take different roots")
            # Each member has the same value of what any of them may send.
            source = Identity(0) if signature.rule is Rule.AUTHORITY else start.root
            parts = frozenset({(source, 0)})
        else:
            parts = frozenset((who, begun.divisor) for who, (_, begun) in started.items())
        is_refused = self._kind(number) == "refused"
        process.complete[number] = CollectiveResult(number, frozenset() if is_refused else parts)
        process.member.complete(number, self.views[view], _REFUSAL if is_refused else None)
        self._deliver(process)

    def _deliver(self, process: Process) -> None:
        while (delivery := process.member.deliver()) is not None:
            self._return(process, delivery)
            self.counts["delivered"] += len(delivery.numbers)
            self.counts["handed"] += len(delivery.handed)
            self.counts["told"] += len(delivery.refused)

    def _return(self, process: Process, delivery: Delivery) -> None:
        for number in delivery.numbers:
            source = process.handed if number in delivery.handed else process.complete
            is_told = number in delivery.refused
            result = CollectiveResult(number, frozenset()) if is_told else source.pop(number)
            process.complete.pop(number, None)
            process.returned[number] = process.kept[number] = result
            if self._is_bucket(number):
                process.buckets.add(number)

    def _is_bucket(self, number: int) -> bool:
        return any(act.what == "bucket" and act.index == number for act in self.program)

    def _kind(self, number: int) -> str:
        act = next(a for a in self.program if a.what in ("issue", "bucket") and a.index == number)
        return act.kind or "bucket"

    def _check_result(self, process: Process, number: int) -> None:
        """Check what the program gets as it returns from its wait."""
        kind, result = self._kind(number), process.returned[number]
        size = len(process.member.visible)
        if kind == "broadcast" and result.parts != {(process.roots[number], 0)}:
            raise CollectiveViolation(f"root: operation {number} came from {result.parts}")
        if kind == "refused" and result.parts:
            raise CollectiveViolation(f"refusal: operation {number} has {result.parts}")
        if kind in ("broadcast", "authority", "refused"):
            return
        if process.identity not in {who for who, _ in result.parts}:
            raise CollectiveViolation(
                f"own contribution: operation {number} lacks {process.identity}"
            )
        is_mean = kind in ("bucket", "first size")
        if is_mean and any(divisor != len(result.parts) for _, divisor in result.parts):
            raise CollectiveViolation(
                f"mean: operation {number} of {len(result.parts)} has {result.parts}"
            )
        if kind in ("bucket", "true sum", "count", "gather") and len(result.parts) != size:
            raise CollectiveViolation(
                f"divisor: operation {number} has {len(result.parts)} contributions, and the size"
                f" reads {size} as it returns"
            )

    def _vote_events(self, process: Process, view: int) -> list[Callable[[], None]]:
        member = process.member
        votes = self.votes.setdefault(view, {})
        mine = votes.setdefault(process.identity, [])
        assert member.vote is not None
        if not mine or mine[-1] != member.vote:
            return [lambda: mine.append(member.vote or 0)]
        place = len(mine) - 1
        members = self.views[view].members
        theirs = [votes.get(each, []) for each in members]
        if any(len(each) <= place for each in theirs):
            return []
        if len({each[place] for each in theirs}) > 1:
            raise CollectiveViolation(f"votes: {theirs}")
        return [lambda: self._vote_passes(process, view)]

    def _vote_passes(self, process: Process, view: int) -> None:
        process.member.vote_passed(self.views[view])
        self._deliver(process)

    def _end_events(self, process: Process, view: int) -> list[Callable[[], None]]:
        """At the end of its program: it agrees twice with the others, then it leaves."""
        members = {*self.views[view].members}
        ended, leaving = self.ended.setdefault(view, set()), self.leaving.setdefault(view, set())
        ended.add(process.identity)
        if not ended >= members:
            return []
        if process.identity not in leaving:
            return [lambda: self._learn_that_all_ended(process, leaving)]
        return [lambda: self._leave(process)] if leaving >= members else []

    def _learn_that_all_ended(self, process: Process, leaving: set[Identity]) -> None:
        process.member.all_ended = True
        leaving.add(process.identity)

    def _leave(self, process: Process) -> None:
        process.has_left = True

    # Faults.

    def _die(self, process: Process) -> None:
        process.is_alive = False
        self.deaths -= 1
        self.counts["deaths"] += 1

    def _is_gone(self, identity: Identity) -> bool:
        process = next(p for p in self.processes if p.identity == identity)
        return not process.is_alive or process.member.phase is ViewPhase.LEFT

    def _is_broken(self, view: int) -> bool:
        gone = any(self._is_gone(each) for each in self.views[view].members)
        return gone or view < len(self.views) - 1

    def _needs_view(self) -> bool:
        latest = self.views[-1]
        present = [p for p in self.processes if p.identity in latest.members and p.is_present]
        # One may leave its view while the others already enter the next one.
        left = any(
            p.has_left and p.member.view.number < latest.number
            for p in self.processes
            if p.identity in latest.members
        )
        return bool(present) and (left or any(self._is_gone(each) for each in latest.members))

    def _has_left(self, identity: Identity) -> bool:
        return next(p for p in self.processes if p.identity == identity).has_left

    def _next_view(self) -> None:
        """The coordinator forms a view of survivors; one that was left out never comes back."""
        members = [e for e in self.views[-1].members if not self._is_gone(e)]
        members = [e for e in members if not self._has_left(e)]
        self._add_view(members)

    def _exclude(self) -> None:
        """The coordinator loses sight of a member that lives."""
        members = [e for e in self.views[-1].members if not self._is_gone(e)]
        members = [e for e in members if not self._has_left(e)]
        if len(members) < 2:
            return
        out = self.choose.choice(members)
        self.exclusions -= 1
        self.counts["exclusions"] += 1
        self._add_view([each for each in members if each != out])
        # Its agent ends it: one that was left out never comes back.
        next(p for p in self.processes if p.identity == out).is_alive = False

    def _add_view(self, members: Sequence[Identity]) -> None:
        if members:
            self.views.append(View((1, len(self.views)), tuple(members)))
            self.counts["views"] += 1

    def _seal(self, process: Process) -> None:
        process.member.seal()
        process.handed.clear()
        process.complete = {
            number: result
            for number, result in process.complete.items()
            if self._kind(number) in ("broadcast", "authority", "gather")
        }

    # Newcomers.

    def _admission_events(self, alive: Sequence[Process]) -> list[Callable[[], None]]:
        if self.gate is not None and self.choose.random() < 0.05:
            return [lambda: self._hold_at(None)]
        members = [p for p in alive if p.identity in self.views[-1].members]
        holders = [p for p in members if p.member.phase is not ViewPhase.NEW]
        if not self.admissions or not holders:
            return []
        if self.gate is None and self.choose.random() < 0.1:
            return [lambda: self._hold_at(1 + max(p.member.boundaries for p in holders))]
        if self.gate is not None and holders == members and all(map(self._is_held, holders)):
            return [lambda: self._admit(holders)]
        return []

    def _hold_at(self, boundary: int | None) -> None:
        self.gate = boundary

    def _is_held(self, process: Process) -> bool:
        """Whether it waits at the gate, or in a meeting at it for a view that is not complete."""
        member = process.member
        view = self._view_of(process) if member.phase is ViewPhase.RUNNING else 0
        settles = view in self.settled and not {*self.views[view].members} <= self.settled[view]
        return member.at_boundary and (settles or member.boundaries == self.gate)

    def _admit(self, holders: Sequence[Process]) -> None:
        """The coordinator forms a view of all members and of new ones."""
        self.admissions -= 1
        count, used = self.choose.randint(1, 2), len(self.processes)
        new = [
            Process(Identity(100 + used + each), keeps_ranks=self.keeps_ranks)
            for each in range(count)
        ]
        self.processes += new
        self.counts["arrivals"] += count
        self._add_view([each.identity for each in (*holders, *new)])

    def _is_lost(self) -> bool:
        """Whether no member is left that holds the state of the job."""
        present = [p for p in self.processes if p.is_present]
        return all(p.member.phase is ViewPhase.NEW for p in present)

    def _give_state(self, process: Process, giver: Process, view: int) -> None:
        assert process.decided is not None
        if not giver.member.at_boundary or giver.member.view.number >= self.views[view].number:
            raise CollectiveViolation(f"{giver.identity} gives its state after the boundary")
        process.at = giver.at
        process.began_at = giver.member.issued
        process.returned = dict(giver.returned)
        process.reads = dict(giver.reads)
        self.counts["joined"] += 1
        self._install(process, view)
        self.settled.setdefault(view, set()).add(process.identity)

    # Meetings.

    def _meeting_events(self, process: Process) -> list[Callable[[], None]]:
        view = len(self.views) - 1
        is_newer = self.views[view].number > process.member.view.number
        if not is_newer or process.identity not in self.views[view].members:
            return []
        if process.tables_of != view:
            return [lambda: self._bring_table(process, view)]
        tables = self.tables[view]
        if process.decided is None:
            if {*self.views[view].members} <= {*tables}:
                return [lambda: self._decide(process, view)]
            return []
        if process.identity in process.decided.newcomers:
            giver = self._process(process.decided.survivors[0])
            gives = giver.is_present and giver.tables_of == view and giver.decided is not None
            return [lambda: self._give_state(process, giver, view)] if gives else []
        gift = self._next_gift(process)
        if gift is None:
            return self._install_events(process, view)
        giver = self._process(gift.giver)
        if giver.is_present and giver.tables_of == view and giver.decided is not None:
            return [lambda: self._take(process, giver, gift)]
        return []

    def _install_events(self, process: Process, view: int) -> list[Callable[[], None]]:
        """Install the view; with newcomers in it, once all members know that they are whole."""
        assert process.decided is not None
        if not process.decided.newcomers:
            return [lambda: self._install(process, view)]
        settled = self.settled.setdefault(view, set())
        settled.add(process.identity)
        is_whole = {*self.views[view].members} <= settled
        return [lambda: self._install(process, view)] if is_whole else []

    def _leaves_newcomers_out(self, decided: Plan, view: int) -> bool:
        tables = self.tables[view]
        return bool(decided.left_out) and all(tables[each].is_new for each in decided.left_out)

    def _process(self, identity: Identity) -> Process:
        return next(p for p in self.processes if p.identity == identity)

    def _bring_table(self, process: Process, view: int) -> None:
        self._seal(process)
        process.tables_of, process.decided, process.taken = view, None, set()
        self.tables.setdefault(view, {})[process.identity] = process.member.table()

    def _decide(self, process: Process, view: int) -> None:
        tables = [self.tables[view][each] for each in self.views[view].members]
        process.decided = plan(tables)
        if process.decided.restart and self.processes[0].has_left:
            raise CollectiveViolation(f"rank 0 had ended: {process.decided.restart}")
        if process.decided.restart:
            raise Restart(process.decided.restart)

    def _next_gift(self, process: Process) -> Gift | None:
        assert process.decided is not None
        gifts = [g for g in process.decided.gifts if process.identity in g.takers]
        return next((g for g in gifts if g.number not in process.taken), None)

    def _take(self, process: Process, giver: Process, gift: Gift) -> None:
        process.taken.add(gift.number)
        held = {**giver.complete, **giver.kept, **giver.handed}
        if gift.number not in held:
            raise CollectiveViolation(
                f"retention: {gift.giver} has no result of operation {gift.number}"
            )
        if gift.number in giver.overwritten and gift.number in giver.kept:
            raise CollectiveViolation(
                f"retention: the bucket of operation {gift.number} was filled again"
            )
        process.handed[gift.number] = held[gift.number]

    def _install(self, process: Process, view: int) -> None:
        assert process.decided is not None
        starts = process.member.install(self.views[view], process.decided)
        again = {start.number for start in starts}
        process.complete = {n: r for n, r in process.complete.items() if n not in again}
        if process.member.phase is not ViewPhase.RUNNING:
            if self.tables[view][process.identity].is_new:
                return  # The members of a planned view continued without it: it ends.
            if self._leaves_newcomers_out(process.decided, view):
                return  # It waits for the next view.
            raise CollectiveViolation(f"{process.identity} was never excluded, and is left out")
        first = self.processes[0]
        is_missed = first.at < len(self.program) and first.identity not in self.views[view].members
        if process.member.keeps_ranks and is_missed:
            raise CollectiveViolation(
                f"rank 0 is lost before its end, and {process.identity} continues"
            )
        self.counts["repeated"] += len(starts)
        for start in starts:
            self._start(process, process.member.signature_of(start.number), start)
        self._deliver(process)

    # What holds always.

    def _check(self) -> None:
        gone = (ViewPhase.NEW, ViewPhase.LEFT)
        present = [p for p in self.processes if p.is_alive and p.member.phase not in gone]
        results: dict[int, CollectiveResult] = {}
        reads: dict[int, int] = {}
        for process in present:
            for number, result in process.returned.items():
                if results.setdefault(number, result) != result:
                    raise CollectiveViolation(
                        f"agreement: operation {number}: {results[number]}, {result}"
                    )
            for place, size in process.reads.items():
                if reads.setdefault(place, size) != size:
                    raise CollectiveViolation(
                        f"cut: the size reads {reads[place]} and {size} at {place}"
                    )
        delivered = min((p.member.delivered for p in present), default=0)
        for process in present:
            if process.member.stable > delivered:
                raise CollectiveViolation(
                    f"stability: {process.identity} takes {process.member.stable} operations for"
                    f" delivered by all, and one has {delivered}"
                )
            process.kept = {n: r for n, r in process.kept.items() if process.member.keeps(n)}


def play(seed: int, *, keepable: bool | None = None, admits: bool = False) -> Played:
    """Play the history of a seed; raises Violation."""
    is_keepable = seed % 2 == 0 if keepable is None else keepable
    return CollectiveHistory(seed, keepable=is_keepable, admits=admits).play()


def main(argv: Sequence[str] | None = None) -> int:
    """Play the histories of many seeds, and say what happened in them."""
    parser = argparse.ArgumentParser(prog="python -m simulation.collectives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--admits", action="store_true", help="members join at boundaries")
    options: Any = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            played = play(seed, admits=options.admits)
        except (CollectiveViolation, AssertionError) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
        counts.update(played.counts)
        counts["restarts"] += bool(played.restarted)
    print(f"{options.seeds} histories: {dict(sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
