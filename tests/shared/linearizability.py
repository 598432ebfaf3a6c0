"""Whether a history of one key of a Store can be explained by operations that happen one at a time.

`check` takes the operations that clients did on one key, with the times at which each was begun and
answered, and looks for an order in which every answer is right (Wing and Gong 1993, with the
memoization of Lowe 2017). It is pure. It raises NotLinearizableError with the shortest piece of the
history that no order explains, in words, and SearchTooLongError after `states_max` states.

The key is a register whose version grows over its whole life, deletions included. Each write has a
value of its own, which names its writer, and no operation expects a version that no answer named.
What an operation may have done depends on its outcome:

ok, conflict
    It happened between its begin and its end, with that answer.
unsure
    It happened at some moment after its begin, or never. An unsure get is what a watch yielded: it
    shows a value and its version, and says nothing of when.
unreachable
    It did not happen. A read is counted so too, if it brought no answer.

A server may remove an entry that was written with a ttl, at any moment once the ttl has passed.
That is one more deletion of that version, of which it is not known whether it happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# A history of a minute had 4,100 operations on each key (etcd of three, 2026-11-28).
STATES_MAX = 200_000
# What a server's clock may gain on ours over a ttl, and what it rounds.
CLOCK_S = 0.02

Kind = Literal["get", "compare_and_set", "delete"]
Outcome = Literal["ok", "conflict", "unsure", "unreachable"]


class Versioned(NamedTuple):
    """A value of the key, and its version."""

    version: int
    value: str

    def __str__(self) -> str:
        """Return it as a person names it."""
        return f"version {self.version} ({self.value})"


@dataclass(frozen=True)
class Operation:
    """One operation of one client on the key; times in seconds of one clock.

    `value` is what a compare_and_set writes. `answer` is what a get or a conflict found (None: the
    key was absent), or what a compare_and_set wrote, with its version. `ttl_s`: after which the
    server may remove what it writes.
    """

    client: str
    kind: Kind
    begin_s: float
    end_s: float
    outcome: Outcome
    expected: int = 0
    value: str = ""
    answer: Versioned | None = None
    ttl_s: float | None = None

    @property
    def writes(self) -> bool:
        """Whether it changes the key if it happens."""
        return self.kind != "get"

    @property
    def may_happen_until_s(self) -> float:
        """The last moment at which it may have taken effect."""
        return math.inf if self.outcome == "unsure" else self.end_s

    def __str__(self) -> str:
        """Return one line in words."""
        what = self.kind
        if self.kind == "compare_and_set":
            what += f" of {self.value}, expecting {_named(self.expected)}"
        elif self.kind == "delete":
            what += f", expecting {_named(self.expected)}"
        end = f"{self.end_s:.6f}" if math.isfinite(self.end_s) else "no answer"
        return f"{self.begin_s:.6f} to {end}  {self.client}: {what}: {self._result()}"

    def _result(self) -> str:
        match self.outcome:
            case "ok" if self.kind == "delete":
                return "done"
            case "ok" | "conflict":
                found = str(self.answer) if self.answer else "absent"
                return f"conflict: {found}" if self.outcome == "conflict" else found
            case "unsure":
                return "not known whether it was done"
            case _:
                return "not done"


def _named(version: int) -> str:
    return f"version {version}" if version else "an absent key"


class NotLinearizableError(AssertionError):
    """No order explains the history: `piece` is the shortest part found that shows it."""

    def __init__(self, why: str, piece: Sequence[Operation]) -> None:
        lines = [f"not linearizable: {why}", *(f"  {operation}" for operation in piece)]
        super().__init__("\n".join(lines))
        self.why = why
        self.piece = tuple(piece)


class SearchTooLongError(AssertionError):
    """The search visited `states_max` states and found no order; the history may have one."""


class _State(NamedTuple):
    """The key at a moment: what it holds (None: absent), and the highest version so far."""

    found: Versioned | None
    top: int

    def __str__(self) -> str:
        return f"at {self.found}" if self.found else "absent"


_BEGINNING = _State(None, 0)


def check(operations: Iterable[Operation], states_max: int = STATES_MAX) -> None:
    """Raise NotLinearizableError if no order of the operations on one key explains all answers."""
    history = [*operations]
    history = sorted([*history, *_removals(history)], key=lambda operation: operation.begin_s)
    _check_values(history)
    stuck = _search(_known(history), [_BEGINNING], states_max)
    if stuck is not None:
        piece, stuck = _shortest(history, stuck, states_max)
        raise NotLinearizableError(str(stuck), piece)


def _removals(history: Sequence[Operation]) -> list[Operation]:
    """Return what the server may do of itself to entries that were written with a ttl."""
    seen = {one.answer.value: one.answer.version for one in history if one.answer}
    return [
        Operation(
            "the server",
            "delete",
            one.begin_s + one.ttl_s - CLOCK_S,
            math.inf,
            "unsure",
            expected=seen[one.value],
        )
        for one in history
        if one.ttl_s is not None and one.outcome in ("ok", "unsure") and one.value in seen
    ]


class _Stuck(NamedTuple):
    """How far the search came: the key then (None: in any state), and what cannot be explained."""

    state: _State | None
    operation: Operation

    def __str__(self) -> str:
        operation = f"the {self.operation.kind} of {self.operation.client}"
        if self.state is None:
            return f"no state of the key explains the answer to {operation}"
        return (
            f"by the end of {operation} the key can only be {self.state}, which does not explain"
            " its answer"
        )


def _check_values(history: Sequence[Operation]) -> None:
    """Check that each value seen has one writer that may have written it, and one version."""
    writers = {one.value: one for one in history if one.kind == "compare_and_set"}
    by_value: dict[str, Operation] = {}
    by_version: dict[int, Operation] = {}
    for one in history:
        if one.answer is None:
            continue
        writer = writers.get(one.answer.value)
        if writer is None:
            raise NotLinearizableError(f"no client wrote {one.answer.value}", [one])
        if writer.outcome in ("unreachable", "conflict"):
            raise NotLinearizableError(
                "a write that was reported as not done is there", [writer, one]
            )
        if writer.begin_s > one.end_s:
            raise NotLinearizableError("a value is there before it was written", [one, writer])
        for seen, same in ((by_value, one.answer.value), (by_version, one.answer.version)):
            first = seen.setdefault(same, one)
            if first.answer != one.answer:
                raise NotLinearizableError(
                    f"{first.answer} and {one.answer} cannot both be", [first, one]
                )


def _known(history: Iterable[Operation]) -> list[Operation]:
    """Return the operations that may have happened, each write with its version if one is known.

    An unsure write that nobody saw is left out: if it happened, no later answer could be explained,
    since each later one would name it.
    """
    kept = [one for one in history if one.outcome != "unreachable"]
    seen = {one.answer.value: one.answer for one in kept if one.answer}
    operations = []
    for one in kept:
        if one.outcome != "unsure" or one.kind == "delete":
            operations.append(one)
        elif one.writes and one.value in seen:
            operations.append(replace(one, answer=seen[one.value]))
    return operations


def _after(operation: Operation, state: _State) -> _State | None:
    """Return the key's state after the operation, None if its answer is wrong in `state`."""
    version = state.found.version if state.found else 0
    matches = version == operation.expected
    if operation.kind == "get":
        return state if operation.answer == state.found else None
    if operation.outcome == "conflict":
        refused = not matches or (operation.kind == "delete" and not version)
        return state if refused and operation.answer == state.found else None
    if not matches:
        return None
    if operation.kind == "delete":
        return _State(None, state.top) if version else None
    written = operation.answer
    assert written is not None, "a write whose version is unknown"
    return _State(written, written.version) if written.version > state.top else None


class _Node:
    """A begin or an end in the list of all that are not yet in the order."""

    __slots__ = ("before", "bit", "end", "next", "operation")

    def __init__(self, operation: Operation | None, bit: int, end: _Node | None = None) -> None:
        self.operation = operation
        self.bit = bit
        self.end = end  # the end's node, for a begin; None for an end, and for an open one
        self.before: _Node | None = None
        self.next: _Node | None = None


def _linked(operations: Sequence[Operation]) -> _Node:
    """Return the head of the list of begins and ends, in the order of time."""
    marks: list[tuple[float, int, _Node]] = []
    for number, operation in enumerate(operations):
        end = None
        if math.isfinite(operation.may_happen_until_s):
            end = _Node(operation, 0)
            marks.append((operation.end_s, 1, end))
        marks.append((operation.begin_s, 0, _Node(operation, 1 << number, end)))
    head = last = _Node(None, 0)
    for _, _, node in sorted(marks, key=lambda mark: mark[:2]):
        last.next, node.before = node, last
        last = node
    return head


def _unlink(node: _Node | None) -> None:
    if node is not None and node.before is not None:
        node.before.next = node.next
        if node.next is not None:
            node.next.before = node.before


def _relink(node: _Node | None) -> None:
    if node is not None and node.before is not None:
        node.before.next = node
        if node.next is not None:
            node.next.before = node


def _search(
    operations: Sequence[Operation], beginnings: Sequence[_State], states_max: int
) -> _Stuck | None:
    """Return None if there is an order from one of the beginnings, else where the best one ends."""
    best: tuple[int, _Stuck] | None = None
    for beginning in beginnings:
        search = _Search(operations, states_max)
        if search.finds_order(beginning):
            return None
        assert search.stuck is not None, "a search that fails has met an end"
        if best is None or search.depth > best[0]:
            best = search.depth, search.stuck
    if best is not None and best[0] == 0 and len(beginnings) > 1:
        return best[1]._replace(state=None)
    return best[1] if best else None


class _Search:
    """A depth-first search for an order, which visits no set of operations twice in one state."""

    def __init__(self, operations: Sequence[Operation], states_max: int) -> None:
        self._head = _linked(operations)
        self._open = sum(math.isfinite(one.may_happen_until_s) for one in operations)
        self._states_max = states_max
        self.depth = -1
        self.stuck: _Stuck | None = None

    def finds_order(self, beginning: _State) -> bool:
        """Return whether there is one."""
        state, done, certain = beginning, 0, 0
        visited: set[tuple[int, _State]] = set()
        chosen: list[tuple[_Node, _State]] = []
        node = self._head.next
        while certain < self._open:
            assert node is not None and node.operation is not None, "an end stops each pass"
            if not node.bit:  # An end: what ends here has to come before anything that follows.
                if certain > self.depth:
                    self.depth, self.stuck = certain, _Stuck(state, node.operation)
                if not chosen:
                    return False
                node, state = chosen.pop()
                done ^= node.bit
                certain -= node.end is not None
                _relink(node.end)
                _relink(node)
                node = node.next
                continue
            after = _after(node.operation, state)
            if after is None or (done | node.bit, after) in visited:
                node = node.next
                continue
            if len(visited) >= self._states_max:
                raise SearchTooLongError(f"no order found among {self._states_max} states")
            visited.add((done | node.bit, after))
            chosen.append((node, state))
            state, done = after, done | node.bit
            certain += node.end is not None
            _unlink(node)
            _unlink(node.end)
            node = self._head.next
        return True


def _shortest(
    history: Sequence[Operation], stuck: _Stuck, states_max: int
) -> tuple[list[Operation], _Stuck]:
    """Return a piece of the history that shows it: the first that fails, from as late as it can be.

    A later piece begins in any state. Answers that are not needed are left out, but never a write.
    """

    def fails(piece: Sequence[Operation], beginnings: Sequence[_State]) -> _Stuck | None:
        return _search(_known(piece), beginnings, states_max)

    ends = sorted({one.end_s for one in history if math.isfinite(one.may_happen_until_s)})
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if fails(_until(history, ends[middle]), [_BEGINNING]):
            high = middle
        else:
            low = middle + 1
    piece = _until(history, ends[low])
    beginnings, stuck = [_BEGINNING], fails(piece, [_BEGINNING]) or stuck
    for start in reversed(range(1, len(piece))):
        later = [one for one in piece if one.may_happen_until_s >= piece[start].begin_s]
        anywhere = _states_in(later, history)
        if len(later) < len(piece) and (found := fails(later, anywhere)):
            piece, beginnings, stuck = later, anywhere, found
            break
    for one in [one for one in piece if one.outcome == "conflict" or not one.writes]:
        fewer = [other for other in piece if other is not one]
        if found := fails(fewer, beginnings):
            piece, stuck = fewer, found
    return piece, stuck


def _until(history: Sequence[Operation], moment_s: float) -> list[Operation]:
    """Return what was known at a moment: a write without its answer by then is unsure."""
    piece = []
    for one in history:
        if one.begin_s > moment_s or one.outcome == "unreachable":
            continue
        if one.end_s <= moment_s or one.outcome == "unsure":
            piece.append(one)
        elif one.kind != "get" and one.outcome == "ok":
            answer = None if one.kind == "delete" else one.answer
            piece.append(replace(one, outcome="unsure", end_s=math.inf, answer=answer))
    return piece


def _states_in(piece: Iterable[Operation], history: Iterable[Operation]) -> list[_State]:
    """Return the states in which some operation of the piece may be answered as it was."""
    values = {one.answer.version: one.answer for one in history if one.answer}
    found = {one.answer for one in piece if one.answer}
    found |= {values[one.expected] for one in piece if one.expected in values}
    return [_BEGINNING, *(_State(one, one.version) for one in sorted(found))]
