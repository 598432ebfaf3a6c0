"""View-synchronous collectives: the state of one member, and what survivors decide when one dies.

Theory of operation
===================

All surviving members see the same result of each collective, and the same change of membership
between the same two collectives (virtual synchrony; Birman and Joseph, SOSP 1987). A program that
communicates only by collectives then needs no knowledge of faults: no collective fails, replicas
stay equal, and only the world size changes.

A *view* is one world: members in the order of their ranks. Views are totally ordered. Each member
numbers its operations in the order in which it issues them, over all groups, from 0. All members
run the same program, so a number means the same operation on all of them.

Three counters, each a count of operations: stable <= delivered <= issued.

- *issued*: the program has called it.
- *delivered*: its result was returned to the program. Always in order; the gradients of one
  backward pass (a *unit*) are delivered together.
- *stable*: known to be delivered by all members.

A member keeps the contribution of what is issued and not delivered, and the result of what is
delivered and not stable. An operation that needs all members proves, when it completes, that all
have issued it. So what the program waited for before it issued that operation is stable, since
waits are a part of the program and the same on all members. A result that was delivered by then,
but not waited for, may not be stable: that depends on a member's speed. A vote follows each unit
and each 64th operation, and makes what is delivered stable.

After a fault, each member seals its view: nothing of it counts as completed any more. The survivors
enter the next view and exchange their `Table`. `plan` is a function of these tables alone, so all
survivors decide the same:

1. The *cut* is the highest count that any survivor has delivered. A survivor that has less receives
   the results up to there from one that keeps them. A call that torch has refused has no result:
   it would be refused to each, so each gets the error.
2. Everything after the cut runs again over the survivors, from the contributions that were kept. A
   member that has not issued such an operation issues it when its program reaches it.
3. Rank and world size, as the program reads them, change when the program has waited for the first
   operation after the cut. No member has returned from it before, and each will. Its delivery
   alone changes nothing: that may come while the program does something else.

A newcomer has no state and no position in the program, so it cannot enter where a fault interrupted
the others. It enters at a *boundary*: a place of the program that all members pass, numbered by the
program. A member that arrives there has waited for all its operations. If all survivors that meet
are at one boundary, nothing is in flight; members without a state (NEW) may be in their view. One
survivor hands its state to them. A newcomer installs the view once it has that state, a survivor
once all newcomers have it, and no member leaves the boundary before it has installed the view. So

- if a survivor has left the boundary, all newcomers of that view have the state, and are survivors
  of the next fault like any other;
- if a newcomer lacks the state, all survivors are still at the boundary, where the next view can
  hand it over again.

Rank and world size change as the program leaves the boundary.

The job restarts if it cannot continue: a program diverged, no survivor keeps a result, or an
operation has no meaning in a smaller world (`operations.Rule`). So does the loss of the first
member of the first view, while a program may have kept its rank in a variable: no other member
would save and log in its place. The same holds of the first member of each node, as long as others
of that node are left. At the end of all programs nothing is left to save.

States of a member::

    NEW ──first view──> RUNNING ──the view ends──> SEALED ──all tables of a view──> RUNNING
     │                                               │ └──another member is lost──> SEALED
     │                                               └──it was left out of a view──> LEFT
     ├──it has the state of a view at a boundary──> RUNNING
     └──a view has members that are not at a boundary──> LEFT

This module is pure: no torch, no clock, no I/O. The caller serialises all calls of one member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from elastane.protocol.words import OTHER_PROGRAM, counted
from elastane.synchrony.operations import Identity, Rule, Signature

# A vote follows this many operations, also without units. It bounds what is kept of operations
# that prove nothing about others, such as broadcasts.
VOTE_EVERY = 64

# A program that does not wait for its operations reads their results at a time that depends on its
# speed.
UNREAD_MAX = 1024

# Round and attempt of a world; views are ordered by it.
ViewNumber = tuple[int, int]


@dataclass(frozen=True, slots=True)
class View:
    """The members of one world, in the order of their ranks."""

    number: ViewNumber
    members: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """The members as the program sees them once it has waited for operation `at`.

    `boundary`: the number of the boundary at which it sees them instead, as it leaves that; all
    operations before `at` are delivered there, and none after it is issued.
    """

    at: int
    members: tuple[Identity, ...]
    boundary: int | None = None

    @property
    def order(self) -> tuple[int, bool, int]:
        """The key that orders switches as the program reaches them."""
        return self.at, self.boundary is None, self.boundary or 0


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Why torch itself refuses a call, such as for a type that gloo cannot sum.

    `kind` and `text`: the name of the error's type, and its text. `is_at_call`: the call raises it;
    else the wait does.
    """

    kind: str
    text: str
    is_at_call: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """What one member tells the others before they decide together.

    `view`: the last view that it installed. `switches`: those that it has passed and that another
    survivor may lack, and those to come. `kept`: the numbers of the delivered operations whose
    results it keeps. `received`: the numbers of operations that it has completed and not delivered,
    whose result another member may take from it. `signatures`: of its unstable operations, by
    number. `refusals`: why torch has refused delivered ones, by number. `refused`: why the job can
    only restart; or "". `first`: the member of rank 0 in the first view. `node_first`: that of
    local rank 0 on this member's node; None if another takes its place. `keeps_ranks`: the program
    may have kept its rank. `all_ended`: the programs of all members have ended. `leaves`: this
    member's program has ended, or ended its group, and issues no more. `is_new`: the member has no
    state; the other fields are void. `boundary`: the number of the boundary at which the program
    waits; None elsewhere.
    """

    identity: Identity
    view: View
    stable: int
    delivered: int
    issued: int
    switches: tuple[Switch, ...] = ()
    kept: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    signatures: Mapping[int, Signature] = field(default_factory=dict)
    refusals: Mapping[int, RefusedCall] = field(default_factory=dict)
    refused: str = ""
    first: Identity | None = None
    node_first: Identity | None = None
    keeps_ranks: bool = False
    all_ended: bool = False
    leaves: bool = False
    is_new: bool = False
    boundary: int | None = None


@dataclass(frozen=True, slots=True)
class Gift:
    """A result that one survivor hands to others: operation `number`, from `giver` to `takers`."""

    number: int
    giver: Identity
    takers: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the survivors do in a new view; the same on all of them.

    `survivors`: members of the new view that were never left out, in the order of their ranks.
    `left_out`: the other members of the new view. `cut`: how many operations are delivered when
    everything was handed over. `restart`: why the job has to restart instead; or "".
    `state_lost`: since no member holds the state of the job. `refusals`: what torch has refused to
    one survivor, and so refuses to those that lack it, by number.
    `newcomers`: members that enter with the state of the first survivor. `boundary`: the number
    of the boundary at which all survivors are, if they are. `first`: the member of rank 0 in the
    first view.
    """

    survivors: tuple[Identity, ...]
    left_out: tuple[Identity, ...]
    cut: int
    stable: int
    gifts: tuple[Gift, ...] = ()
    switches: tuple[Switch, ...] = ()
    restart: str = ""
    state_lost: bool = False
    newcomers: tuple[Identity, ...] = ()
    boundary: int | None = None
    first: Identity | None = None
    refusals: Mapping[int, RefusedCall] = field(default_factory=dict)


def plan(tables: Sequence[Table]) -> Plan:
    """Decide what the members of a view do; `tables` are theirs, in the order of their ranks."""
    holders = [table for table in tables if not table.is_new]
    newcomers = tuple(table.identity for table in tables if table.is_new)
    if not holders:
        why = "no worker is left that holds the state of the job"
        return Plan((), (), 0, 0, restart=why, state_lost=True)
    latest = max(table.view.number for table in holders)
    informed = [table for table in holders if table.view.number == latest]
    lineage = informed[0].view.members
    # A member that missed the last view may be in its lineage: then it was waited for there.
    survivors = [table for table in holders if table.identity in lineage]
    identities = tuple(table.identity for table in survivors)
    left_out = tuple(t.identity for t in holders if t.identity not in identities)
    boundary = _boundary(survivors)
    if boundary is None:
        left_out, newcomers = (*left_out, *newcomers), ()
    cut = _cut(survivors)
    stable = cut if boundary is not None else max(table.stable for table in survivors)
    restart = _why_not(survivors, cut)
    if restart or left_out:
        return Plan(identities, left_out, cut, stable, restart=restart)
    gifts = (*_gifts_of_delivered(survivors, cut), *_gifts_of_received(survivors, cut))
    return Plan(
        identities,
        left_out,
        cut,
        stable,
        gifts,
        _switches(informed, cut, boundary, (*identities, *newcomers)),
        newcomers=newcomers,
        boundary=boundary,
        first=survivors[0].first,
        refusals=_refusals(survivors, cut),
    )


def _boundary(survivors: Sequence[Table]) -> int | None:
    """Return the number of the boundary at which all survivors are; None if they are not."""
    boundary = survivors[0].boundary
    return boundary if all(table.boundary == boundary for table in survivors) else None


def _switches(
    informed: Sequence[Table], cut: int, boundary: int | None, members: tuple[Identity, ...]
) -> tuple[Switch, ...]:
    """Return what any survivor may lack, and the switch to `members`.

    Switches of a member that missed the last view may be void. So is one at the boundary where all
    are: no member has left it.
    """
    known = {s.order: s for table in informed for s in table.switches}
    found = [s for s in known.values() if s.at < cut or s.boundary is not None]
    found = [s for s in found if s.at <= cut and (s.boundary is None or s.boundary != boundary)]
    own = Switch(cut, members, boundary)
    return tuple(sorted((*found, own), key=lambda switch: switch.order))


def _cut(survivors: Sequence[Table]) -> int:
    """Return how many operations count as delivered.

    An operation whose buffers are for the former number of members counts as delivered if one
    survivor has received it: the program then reads the former size as it returns.
    """
    alive = {table.identity for table in survivors}
    cut = max(table.delivered for table in survivors)
    while (holder := _receiver(survivors, cut)) is not None:
        signature = holder.signatures[cut]
        if signature.rule is not Rule.SHAPED or not why_not_repeated(signature, alive):
            break
        cut += 1
    return cut


def _refusals(survivors: Sequence[Table], cut: int) -> dict[int, RefusedCall]:
    """Return why torch has refused operations that a survivor lacks, by number."""
    least = min(table.delivered for table in survivors)
    found = ((n, why) for table in survivors for n, why in table.refusals.items())
    return {n: why for n, why in found if least <= n < cut}


def _receiver(survivors: Sequence[Table], number: int) -> Table | None:
    """Return the first survivor that can hand over the result of an operation."""
    holders = (t for t in survivors if number in t.kept or number in t.received)
    return next(holders, None)


def _why_not(survivors: Sequence[Table], cut: int) -> str:
    """Return why these survivors cannot continue; "" if they can."""
    refused = next((table.refused for table in survivors if table.refused), "")
    refused = refused or _why_calls_differ(survivors)
    if why := refused or _why_a_first_is_missed(survivors):
        return why
    if _boundary(survivors) is not None and len({table.issued for table in survivors}) > 1:
        counts = sorted({table.issued for table in survivors})
        return (
            f"{OTHER_PROGRAM}: at one boundary they have issued"
            f" {counts[0]} and {counts[-1]} collectives"
        )
    signatures: dict[int, Signature] = {}
    if why := _why_programs_differ(survivors, signatures):
        return why
    refusals = _refusals(survivors, cut)
    for number in range(min(table.delivered for table in survivors), cut):
        if number in refusals:
            continue
        reason = _why_not_given(survivors, number, signatures)
        if reason:
            return reason
    alive = {table.identity for table in survivors}
    for number, signature in sorted(signatures.items()):
        is_rooted = signature.rule is Rule.ROOTED and _receiver(survivors, number) is not None
        if number >= cut and not is_rooted and (why := why_not_repeated(signature, alive)):
            return why
    return ""


def _why_calls_differ(survivors: Sequence[Table]) -> str:
    """Return which call torch has refused to some survivors, and done for others; "" if none."""
    for table in survivors:
        for number, refusal in sorted(table.refusals.items()):
            for other in survivors:
                if other.stable <= number < other.delivered and number not in other.refusals:
                    what = other.signatures[number].described()
                    return f"{what} was refused by torch on some workers only: {refusal.text}"
    return ""


def _why_programs_differ(survivors: Sequence[Table], signatures: dict[int, Signature]) -> str:
    """Return why the survivors do not run the same program; "" if they may.

    Collects the operations that they know in `signatures`, by number.
    """
    for table in survivors:
        for number, signature in sorted(table.signatures.items()):
            other = signatures.setdefault(number, signature)
            if other != signature:
                sides = _sides(survivors, number)
                return f"{OTHER_PROGRAM}: operation {number} is {' and '.join(sides)}"
    return _why_one_is_missed(survivors, signatures)


def _sides(survivors: Sequence[Table], number: int) -> list[str]:
    """Return what the survivors called as operation `number`, with how many of them, most first."""
    calls = [t.signatures[number] for t in survivors if number in t.signatures]
    return [
        f"{what} on {counted(count, 'worker')}"
        for what, count in Counter(_sized(call) for call in calls).most_common()
    ]


def _sized(signature: Signature) -> str:
    size = f" of {counted(signature.elements, 'element')}" if signature.elements else ""
    return signature.described() + size


def _why_one_is_missed(survivors: Sequence[Table], signatures: Mapping[int, Signature]) -> str:
    """Return why an operation would wait for ever for a member whose program has ended; or ""."""
    last = min((table.issued for table in survivors if table.leaves), default=None)
    if last is None or all(table.issued <= last for table in survivors):
        return ""
    signature = signatures.get(last)
    what = "a collective" if signature is None else signature.described()
    return (
        f"{OTHER_PROGRAM}: one has ended, or has called"
        f" destroy_process_group(), after {last} collectives, and another waits in {what}"
    )


def _why_a_first_is_missed(survivors: Sequence[Table]) -> str:
    """Return why no survivor does the work of a lost rank 0, or local rank 0 of a node; or "".

    If one survivor knows that all programs have ended, the lost one's has: it may just have left.
    """
    alive = {table.identity for table in survivors}
    keepers = [table for table in survivors if table.keeps_ranks]
    if any(table.all_ended for table in survivors):
        return ""
    if any(table.first not in alive for table in keepers):
        return (
            "the worker of rank 0 is lost, and no other would save and log if the script keeps its"
            " rank in a variable; if it asks for it each time, add --ranks-may-change"
        )
    if any(table.node_first not in (None, *alive) for table in keepers):
        return (
            "the worker of local rank 0 on a node is lost, and no other would save there if the"
            " script saves on each node; if only rank 0 saves, and the script asks for its rank"
            " each time, add --ranks-may-change"
        )
    return ""


def _why_not_given(
    survivors: Sequence[Table], number: int, signatures: Mapping[int, Signature]
) -> str:
    signature = signatures.get(number)
    if signature is not None and signature.rule is Rule.PRIVATE:
        return (
            f"{signature.described()} was delivered by some workers only, and no worker holds"
            " another's part of the result"
        )
    assert _receiver(survivors, number) is not None, f"no survivor keeps a copy of {number}"
    return ""


def why_not_repeated(signature: Signature, members: Iterable[Identity]) -> str:
    """Return why an undelivered operation cannot run over `members`; "" if it can."""
    alive = set(members)
    rule, what = signature.rule, signature.described()
    if rule is Rule.REFUSED:
        return f"{what} was interrupted, and its meaning in a smaller world is not known"
    if rule is Rule.ROOTED and signature.root not in alive:
        return f"{what} was interrupted, and the worker that it comes from is lost"
    if rule is Rule.SHAPED and signature.shaped not in (0, len(alive)):
        return f"{what} was interrupted, and its buffers are for {signature.shaped} workers"
    if rule is Rule.PRIVATE and (signature.shaped or signature.root is not None):
        is_lost = signature.root is not None and signature.root not in alive
        if is_lost or signature.shaped not in (0, len(alive)):
            return f"{what} was interrupted, and it is for a world of another size"
    return ""


def root_in(signature: Signature, view: View) -> Identity:
    """Return the member that a rooted operation comes from in `view`."""
    assert signature.root is not None, "an operation without a root"
    if signature.root in view.members:
        return signature.root
    assert signature.rule is Rule.AUTHORITY, "why_not_repeated() refuses the others"
    return view.members[0]


def _gifts_of_delivered(survivors: Sequence[Table], cut: int) -> Iterable[Gift]:
    """Hand what any survivor has delivered to those who lack it."""
    refusals = _refusals(survivors, cut)
    for number in range(min(table.delivered for table in survivors), cut):
        if number in refusals:
            continue
        giver = _receiver(survivors, number)
        assert giver is not None, "_why_not_given() has looked"
        takers = tuple(t.identity for t in survivors if t.delivered <= number)
        yield Gift(number, giver.identity, takers)


def _gifts_of_received(survivors: Sequence[Table], cut: int) -> Iterable[Gift]:
    """Hand on a broadcast that a survivor has received from a member that is lost."""
    everybody = tuple(table.identity for table in survivors)
    numbers = sorted({n for table in survivors for n in table.received if n >= cut})
    for number in numbers:
        holder = next(table for table in survivors if number in table.received)
        signature = holder.signatures[number]
        if signature.rule is Rule.ROOTED and why_not_repeated(signature, everybody):
            yield Gift(number, holder.identity, everybody)


class ViewPhase(Enum):
    """The state of a member between views; the module docstring has the diagram."""

    NEW = "in no view yet"
    RUNNING = "in a view"
    SEALED = "its view has ended"
    LEFT = "left out of a view"


@dataclass(slots=True)
class Operation:
    """One operation that is issued and not delivered, or handed over and not issued.

    `unit`: the backward pass that it belongs to; None outside of one. `divided_by`: the number of
    members that its contribution was divided by, or that its sum is for; 0: none. `waited_before`:
    how many operations the program had waited for when it issued this one. `is_complete`: in the
    current view. `is_held`: it completed here since it was last started, so its tensors hold the
    result.
    """

    number: int
    signature: Signature
    unit: int | None
    divided_by: int
    waited_before: int
    is_complete: bool = False
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """An effect: start operation `number` in the current view.

    `root`: the member it comes from; None without one. `is_repeated`: it was started in an earlier
    view, so its contribution has to be restored. `divided_by` and `divisor`: by what the
    contribution was divided, and by what it has to be; zeros: it is used as it is. For an
    operation that is scaled, its sum is multiplied by the first and divided by the second.
    """

    number: int
    root: Identity | None = None
    is_repeated: bool = False
    divided_by: int = 0
    divisor: int = 0


@dataclass(frozen=True, slots=True)
class Issued:
    """An effect: operation `number` was issued.

    `start`: how to start it; None if its result was handed over. `restart`: why it cannot run in
    this view, so that the job restarts; or "".
    """

    number: int
    start: Start | None = None
    restart: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An effect: return these operations to the program, in order.

    `handed`: those of them whose result came from another member. `refused`: why torch refuses
    those of which another member has told.
    """

    numbers: tuple[int, ...]
    handed: frozenset[int]
    refused: Mapping[int, RefusedCall] = field(default_factory=dict)


def why_not_issued(signature: Signature, members: Sequence[Identity]) -> str:
    """Return why an operation of a program that sees lost members cannot begin; "" if it can."""
    what = signature.described()
    if signature.root is not None and signature.root not in members:
        return f"{what} has a lost worker as its root"
    if signature.shaped not in (0, len(members)):
        return (
            f"{what} has buffers for {signature.shaped} workers, of whom {len(members)} are left;"
            " if the script asks for the world size each time, add --ranks-may-change"
        )
    return ""


class ViewMember:
    """The view-synchronous state of one member."""

    def __init__(self, identity: Identity, *, keeps_ranks: bool = False) -> None:
        self.identity = identity
        # Whether the program may have kept a rank or a world size in a variable.
        self.keeps_ranks = keeps_ranks
        # Whether the programs of all members have ended.
        self.all_ended = False
        # Whether this member's program has ended, or ended its group: it issues no more.
        self.leaves = False
        self._first: Identity | None = None
        self._node_first: Identity | None = None
        self.phase = ViewPhase.NEW
        # The last view that was installed; the one before the first has no members.
        self.view = View((-1, -1), ())
        # The members as the program sees them.
        self.visible: tuple[Identity, ...] = ()
        self.stable = self.delivered = self.issued = 0
        # How many operations the program itself has waited for.
        self._waited = 0
        # Why the next fault can only restart the job, as the first such use; or "".
        self.refused = ""
        # Why torch has refused operations, by number; and those of which another member has told,
        # and that are not delivered.
        self._refusals: dict[int, RefusedCall] = {}
        self._refused_elsewhere: dict[int, RefusedCall] = {}
        # Why the job has to restart now; or "".
        self.restart = ""
        # Operations whose result depends on the size, and that the program has not waited for.
        self._unread: dict[int, Signature] = {}
        self._operations: dict[int, Operation] = {}
        self._kept: dict[int, Signature] = {}
        # Numbers of results that another member has handed over, and that are not delivered.
        self._handed: set[int] = set()
        self._passed: list[Switch] = []
        self._pending: list[Switch] = []
        # How many boundaries the program has arrived at, and whether it waits at the last.
        self.boundaries = 0
        self.at_boundary = False
        # The members that the program sees as it leaves the boundary where it waits; None:
        # unchanged.
        self._entering: Switch | None = None
        self._open_unit: int | None = None
        # How many operations the current vote is about: it follows each unit, and nothing else is
        # delivered before it passes, so that all members hold the same votes. None: no vote.
        self.vote: int | None = None

    def begin(self, view: View, node_first: Identity | None = None) -> None:
        """Install the first view; `node_first` has local rank 0 on the node of this member."""
        assert self.phase is ViewPhase.NEW, self.phase
        self.phase = ViewPhase.RUNNING
        self.view = view
        self.visible = view.members
        self._first, self._node_first = view.members[0], node_first

    def expect_newcomers(self) -> None:
        """Record that a newcomer takes the place of a lost member on its node."""
        self._node_first = None

    def refuse(self, reason: str) -> None:
        """Record an operation that no survivor could repeat: the next fault restarts the job."""
        self.refused = self.refused or reason

    # The program.

    def issue(
        self, signature: Signature, *, unit: int | None = None, divided_by: int = 0
    ) -> Issued:
        """Number an operation, and say how to start it.

        Only in a view: the caller waits until then. `unit`: the backward pass that it belongs to,
        until `close_unit`. `divided_by`: the number of members that the contribution of a RESCALE
        operation was divided by, or that the sum of a scaled one is for.
        """
        assert self.phase is ViewPhase.RUNNING, self.phase
        number = self.issued
        operation = Operation(number, signature, unit, divided_by, self._waited)
        if self._needs_no_start(number):
            operation.is_complete = True
        elif self.visible != self.view.members:
            # Its ranks and buffers are those of an older view, as the program still sees it.
            why = self.refused or why_not_repeated(signature, self.view.members)
            if why:
                return Issued(number, restart=why)
        self.issued += 1
        self._operations[number] = operation
        if unit is not None:
            self._open_unit = unit
        if signature.depends_on_size:
            self._unread[number] = signature
            if len(self._unread) > UNREAD_MAX:
                self._unread.pop(next(iter(self._unread)))
        return Issued(number, None if operation.is_complete else self._start(operation))

    def close_unit(self, unit: int) -> None:
        """End a backward pass: all its operations are issued, and the program waits for them."""
        if self._open_unit == unit:
            self._open_unit = None
        numbers = [n for n, operation in self._operations.items() if operation.unit == unit]
        if numbers:
            self.waited(max(numbers))

    def waited(self, number: int) -> None:
        """Record that the program itself waits, or has waited, for an operation."""
        self._waited = max(self._waited, number + 1)
        self._unread.pop(number, None)
        self._switch()

    def seen_after(self, number: int) -> tuple[Identity, ...]:
        """Return the members that the program sees once it has waited for an operation."""
        passed = [switch.members for switch in self._pending if switch.at <= number]
        return passed[-1] if passed else self.visible

    def arrive(self) -> bool:
        """Wait at the program's next boundary; False if operations are not delivered yet.

        Only in a view: the caller waits until then, and until all that it has issued is delivered.
        """
        if self.phase is not ViewPhase.RUNNING or self.delivered < self.issued:
            return False
        assert not self.at_boundary, "the program leaves a boundary before the next one"
        self.boundaries += 1
        self.at_boundary = True
        # It may still hold works of its operations, whose results it reads after the boundary.
        self._waited = self.issued
        self._switch()
        return True

    def depart(self) -> bool:
        """Leave the boundary; False while the view has ended: the next one may change the size."""
        assert self.at_boundary, "the program leaves a boundary after it has arrived there"
        if self.phase is not ViewPhase.RUNNING:
            return False
        self.at_boundary = False
        if self._entering is not None:
            if self._entering.members != self.visible:
                self._refuse_unread(self.delivered)
            self._passed.append(self._entering)
            self.visible = self._entering.members
            self._entering = None
        return True

    def _needs_no_start(self, number: int) -> bool:
        """Whether another member has handed its result over, or told that torch refuses it."""
        return number in self._handed or number in self._refused_elsewhere

    def complete(self, number: int, view: View, refusal: RefusedCall | None = None) -> None:
        """Record that an operation has completed in `view`; ignored if that view is sealed.

        `refusal`: why torch has refused the call, on this member or on all.
        """
        is_current = self.phase is ViewPhase.RUNNING and view.number == self.view.number
        if is_current and number in self._operations:
            operation = self._operations[number]
            operation.is_complete, operation.is_held = True, refusal is None
            if refusal is not None:
                self._refusals[number] = refusal

    def next_incomplete(self) -> int | None:
        """Return the first issued operation that has not completed; None if there is none."""
        for number in range(self.delivered, self.issued):
            if not self._operations[number].is_complete:
                return number
        return None

    def deliver(self) -> Delivery | None:
        """Deliver the next operation, or the next unit as a whole; None if it is not complete.

        None also while a vote is due.
        """
        numbers = self._next_unit()
        if self.phase is not ViewPhase.RUNNING or self.vote is not None or not numbers:
            return None
        if not all(self._operations[number].is_complete for number in numbers):
            return None
        handed = frozenset(numbers) & self._handed
        refused = {
            number: self._refused_elsewhere.pop(number)
            for number in numbers
            if number in self._refused_elsewhere
        }
        self._refusals |= refused
        for number in numbers:
            operation = self._operations.pop(number)
            self._kept[number] = operation.signature
            was_made = number not in handed and number not in self._refusals
            if operation.signature.needs_all and was_made:
                self.stable = max(self.stable, operation.waited_before)
        is_many = any((number + 1) % VOTE_EVERY == 0 for number in numbers)
        if operation.unit is not None or is_many:
            self.vote = numbers[-1] + 1
        self._handed -= handed
        self.delivered = numbers[-1] + 1
        self._switch()
        self._forget()
        return Delivery(tuple(numbers), handed, refused)

    def vote_passed(self, view: View) -> None:
        """Record that all members of `view` have delivered what the current vote is about."""
        is_current = self.phase is ViewPhase.RUNNING and view.number == self.view.number
        if is_current and self.vote is not None:
            self.stable = max(self.stable, self.vote)
            self._refusals = {n: why for n, why in self._refusals.items() if n >= self.vote}
            self.vote = None
            self._forget()

    def signature_of(self, number: int) -> Signature:
        """Return the signature of an issued operation that is not delivered."""
        return self._operations[number].signature

    def keeps(self, number: int) -> bool:
        """Whether the result of a delivered operation is still needed."""
        return number in self._kept

    # Faults.

    def seal(self) -> None:
        """End the current view: nothing of it counts as completed any more. Idempotent.

        Results that were handed over in it and not delivered are void, and so are refusals. A
        newcomer stays one.
        """
        if self.phase in (ViewPhase.NEW, ViewPhase.LEFT):
            return
        self.phase = ViewPhase.SEALED
        self._handed.clear()
        self._refused_elsewhere.clear()
        self._refusals = {n: why for n, why in self._refusals.items() if n < self.delivered}

    def table(self) -> Table:
        """Return what this member brings into the next meeting."""
        if self.phase is ViewPhase.NEW:
            return Table(self.identity, self.view, 0, 0, 0, is_new=True)
        assert self.phase is ViewPhase.SEALED, self.phase
        undelivered = {n: operation.signature for n, operation in self._operations.items()}
        received = tuple(
            n
            for n, operation in self._operations.items()
            if operation.is_held
            and operation.signature.rule in (Rule.ROOTED, Rule.AUTHORITY, Rule.SHAPED)
        )
        return Table(
            identity=self.identity,
            view=self.view,
            stable=self.stable,
            delivered=self.delivered,
            issued=self.issued,
            switches=(*self._passed, *self._entered(), *self._pending),
            kept=tuple(sorted(self._kept)),
            received=tuple(sorted(received)),
            signatures={**self._kept, **undelivered},
            refusals=dict(self._refusals),
            refused=self.refused,
            first=self._first,
            node_first=self._node_first,
            keeps_ranks=self.keeps_ranks,
            all_ended=self.all_ended,
            leaves=self.leaves,
            boundary=self.boundaries if self.at_boundary else None,
        )

    def install(self, view: View, decided: Plan) -> list[Start]:
        """Enter `view` as its members decided; return the operations to start, in order.

        All gifts to this member have arrived; all newcomers have the state, and this one if it is
        one. Not called if the plan is a restart. If the view has members that were left out, it is
        not entered: those leave, and the others wait for another.
        """
        assert self.phase in (ViewPhase.SEALED, ViewPhase.NEW) and not decided.restart
        if decided.left_out:
            if self.identity in decided.left_out:
                self.phase = ViewPhase.LEFT
            return []
        if self.phase is ViewPhase.NEW:
            self._begin_at_boundary(decided)
        self.phase = ViewPhase.RUNNING
        self.view = view
        self._handed = {g.number for g in decided.gifts if self.identity in g.takers}
        self._refused_elsewhere = {
            n: why for n, why in decided.refusals.items() if n >= self.delivered
        }
        self.stable = max(self.stable, decided.stable)
        if self.vote is not None and self.vote <= self.stable:
            self.vote = None
        own = [switch for switch in self._pending if switch.at < self.delivered]
        later = [s for s in decided.switches if s.boundary is None and s.at >= self.delivered]
        self._pending = own + later
        here = (s for s in decided.switches if self.at_boundary and s.boundary == self.boundaries)
        self._entering = next(here, None)
        self._forget()
        starts = []
        for number in range(self.delivered, self.issued):
            operation = self._operations[number]
            operation.is_complete = self._needs_no_start(number)
            if not operation.is_complete:
                operation.is_held = False
                starts.append(self._start(operation, is_repeated=True))
        return starts

    def _begin_at_boundary(self, decided: Plan) -> None:
        """Take the place in the program that all survivors have, with their state."""
        assert decided.boundary is not None and decided.first is not None, decided
        self.stable = self.delivered = self.issued = self._waited = decided.cut
        self.boundaries, self.at_boundary = decided.boundary, True
        self._first = decided.first

    def _entered(self) -> Iterable[Switch]:
        return () if self._entering is None else (self._entering,)

    def _start(self, operation: Operation, *, is_repeated: bool = False) -> Start:
        signature = operation.signature
        is_divided = signature.rule is Rule.RESCALE or signature.is_scaled
        return Start(
            operation.number,
            root=None if signature.root is None else root_in(signature, self.view),
            is_repeated=is_repeated,
            divided_by=operation.divided_by,
            divisor=len(self.view.members) if is_divided else 0,
        )

    def _switch(self) -> None:
        """Let the program see the members of the operations that it has returned from."""
        while self._pending and self._pending[0].at < min(self.delivered, self._waited):
            self._refuse_unread(self._pending[0].at)
            self._passed.append(self._pending.pop(0))
            self.visible = self._passed[-1].members

    def _refuse_unread(self, at: int) -> None:
        """Restart if the program would read an older result together with the new world size."""
        for number, signature in self._unread.items():
            if number < at:
                self.restart = self.restart or (
                    f"{signature.described()} was started before the world shrank, and is waited"
                    " for afterwards, when the world size is another"
                )

    def _next_unit(self) -> list[int]:
        """Return the numbers that are delivered next; empty while their unit is open.

        An operation after an unfinished unit may be waited for in the backward pass itself
        (SyncBatchNorm). Then what comes before it is delivered by itself.
        """
        if self.delivered == self.issued:
            return []
        unit = self._operations[self.delivered].unit
        if unit is None:
            return [self.delivered]
        end = self.delivered
        while end < self.issued and self._operations[end].unit == unit:
            end += 1
        is_open = unit == self._open_unit and end == self.issued
        return [] if is_open else [*range(self.delivered, end)]

    def _forget(self) -> None:
        """Drop what no survivor can need: results and switches of stable operations."""
        for number in [n for n in self._kept if n < self.stable]:
            del self._kept[number]
        self._passed = [switch for switch in self._passed if switch.at >= self.stable]
