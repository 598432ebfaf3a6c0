"""Finds the workers that called another collective than the others, or one of another size. Pure.

A backend pairs the collectives of a group by their order alone. So the worker that gloo ends is one
that received too much, and the worker that sent it lives on. `judge_boards` compares what torch's
flight recorder shows of the workers at a standstill. `judge_calls` compares the newest collectives
that the script called from Python, as each worker recorded them; after a crash there is no other
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from elastane.protocol.hangs import ranks_text
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.model import NamedWorker
from elastane.protocol.ring import CALL_MASK, GroupBoard, RecordedCall, WorkerCalls
from elastane.protocol.verdicts import Kind, Verdict

# Collectives that all members of a group call with tensors of one shape: as torch's flight
# recorder and its backends name them, ...
_EQUAL_SHAPES = frozenset(
    ("all_reduce", "allreduce", "broadcast", "reduce", "all_reduce_coalesced")
)
# ... and those whose size the ring records.
_EQUAL_SIZES = frozenset(
    (
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
        *("reduce_scatter_tensor", "gather", "scatter"),
    )
)
# Members of a group call these alone, so that they count its calls differently.
_MESSAGES = frozenset(("send", "recv", "send_object_list", "recv_object_list"))

# The ranks by what they called, and the place of each rank.
_Sides = Sequence[tuple[str, list[int]]]
_Words = Mapping[int, str]


def judge_boards(
    name: str, boards: Mapping[int, GroupBoard], places: _Words, nodes: _Words
) -> Verdict | None:
    """Return who called another collective, or with another shape, in a group at a standstill.

    Only collectives that are not complete on all members count, and only gloo's: a mismatch ends a
    worker, and other backends were not tried.
    """
    if any(each.backend != "gloo" for each in boards.values() if each.calls):
        return None
    done = min(each.position.completed for each in boards.values())
    calls = {
        rank: {c.sequence: c for c in each.calls if c.sequence > done}
        for rank, each in boards.items()
    }
    for sequence in sorted(set[int]().union(*calls.values())):
        seen = {rank: found[sequence] for rank, found in calls.items() if sequence in found}
        kind, sides = Kind.OTHER_COLLECTIVE, _sides({r: c.operation for r, c in seen.items()})
        if len(sides) == 1 and sides[0][0] in _EQUAL_SHAPES:
            words = {r: f"{c.operation} of {c.elements} x {c.dtype}" for r, c in seen.items()}
            kind, sides = Kind.OTHER_SHAPE, _sides(words)
        if len(sides) > 1:
            at = {rank: places[rank] for rank in seen}
            return _verdict(kind, name, sequence, sides, at, nodes)
    return None


def judge_calls(
    workers: Iterable[WorkerCalls], nodes: _Words, *, only_open: bool = False
) -> Verdict | None:
    """Return who called another collective, or with another size, by the workers' own records.

    Calls are compared only after one that all of them made alike, since a worker that joined later
    has counted fewer. `only_open`: compare a collective only if a worker has not returned from it.
    """
    groups: dict[int, dict[int, dict[int, RecordedCall]]] = {}
    places: dict[int, NamedWorker] = {}
    for worker in workers:
        rank = worker.rank
        places[rank] = NamedWorker(nodes[rank], rank, worker.local_rank, worker.pid)
        for call in worker.calls:
            calls = groups.setdefault(call.group, {}).setdefault(worker.rank, {})
            calls[call.count] = call
    for group in sorted(groups):
        found = _differing(group, groups[group], nodes, only_open=only_open)
        if found is not None:
            first = places[found.ranks[0]] if found.ranks else None
            return msgspec.structs.replace(found, worker=first)
    return None


def _differing(
    group: int, calls: Mapping[int, Mapping[int, RecordedCall]], nodes: _Words, *, only_open: bool
) -> Verdict | None:
    if any(call.operation in _MESSAGES for made in calls.values() for call in made.values()):
        return None
    counts = sorted({count for made in calls.values() for count in made})
    alike = 0  # the last collective that all known workers called alike
    for count in counts:
        seen = {rank: made[count] for rank, made in calls.items() if count in made}
        kind, sides = _sides_of(seen)
        if len(sides) < 2:
            alike = count if len(seen) == len(calls) else alike
            continue
        is_open = not all(call.returned_ns for call in seen.values())
        if count == alike + 1 and (is_open or not only_open):
            places = {rank: call.site for rank, call in seen.items()}
            name = "0" if group == 0 else "of fewer workers"
            return _verdict(kind, name, count & CALL_MASK, sides, places, nodes)
    return None


def _sides_of(seen: Mapping[int, RecordedCall]) -> tuple[Kind, _Sides]:
    """Return the ranks by the operation that they called, or else by its size."""
    by_operation = _sides({rank: call.operation for rank, call in seen.items()})
    if len(by_operation) > 1 or by_operation[0][0] not in _EQUAL_SIZES:
        return Kind.OTHER_COLLECTIVE, by_operation
    sized = {rank: call for rank, call in seen.items() if call.nbytes}
    words = {rank: f"{call.operation} of {call.nbytes:,} bytes" for rank, call in sized.items()}
    return Kind.OTHER_SHAPE, _sides(words)


def _sides(words: _Words) -> _Sides:
    """Return the ranks by the collective that they called, the most of them first."""
    found: dict[str, list[int]] = {}
    for rank, word in sorted(words.items()):
        found.setdefault(word, []).append(rank)
    return sorted(found.items(), key=lambda side: -len(side[1]))


def _verdict(
    kind: Kind, name: str, sequence: int, sides: _Sides, places: _Words, nodes: _Words
) -> Verdict:
    """Blame the smaller side; of two equal sides none, and the sentence names both."""
    most = len(sides[0][1])
    tied = sum(len(ranks) == most for _, ranks in sides) > 1
    ranks = [] if tied else [rank for _, side in sides[1:] for rank in side]
    texts = []
    for word, side in reversed(sides):
        at = f" ({places[side[0]]})" if places.get(side[0]) else ""
        texts.append(f"{ranks_text(side)} called {word}{at}")
    text = f"collective #{sequence} of group {name!r} differs: {'; '.join(texts)}"
    if ranks:
        text = f"{ranks_text(ranks)} on node {nodes[ranks[0]]}: {text}"
    return Verdict(
        kind=kind,
        ranks=tuple(sorted(ranks)),
        sentence=text[:REASON_CHARS_MAX],
        group=name,
        sequence=sequence,
    )
