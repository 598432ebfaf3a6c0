"""The ring of collectives of one worker: how it lies in memory, and how another process reads it.

The worker writes a record before each collective and completes it afterwards. It also writes a
board now and then: how many collectives each process group has begun and completed, and the place
of its main thread. The agent reads both at any moment, also after the worker was killed.

A record carries its number at both ends, and the board carries a checksum. So a record or board
that was being written when the worker died is recognised, and left out. Whatever the worker wrote
is bounded and checked here, since a faulty worker may write anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Annotated

import msgspec

from elastane.protocol.limits import COUNT_MAX, WHERE_CHARS_MAX

# The recorded collectives of a worker: those of some steps, where each step calls many.
RECORDS = 256
RECORD = struct.Struct("<8Q")
# Lines of code that call collectives; the calls of further lines have no known site.
SITES = 128
SITE_BYTES = 128
# Bytes of a board: the positions of some groups and the last calls of each. A worker writes no
# longer one.
BOARD_BYTES = 32 << 10
BOARD_HEAD = struct.Struct("<2Q")
SITES_AT = RECORDS * RECORD.size
BOARD_AT = SITES_AT + SITES * SITE_BYTES
RING_BYTES = BOARD_AT + BOARD_BYTES
# Groups of one worker, and the last collectives of each, that a board names.
GROUPS_MAX = 32
CALLS_MAX = 16
# The last recorded calls of a worker that a message carries, and the workers of one message.
CALLS_SENT_MAX = 8
CALLERS_MAX = 64

# The second word of a record holds three numbers: group, site and operation.
GROUP_SHIFT, SITE_SHIFT, LOW_BITS = 40, 8, 8
GROUP_MASK = (1 << 64 - GROUP_SHIFT) - 1
# The count of a call begins at the number of its world, so that it is equal on all members, also on
# those that joined later.
WORLD_SHIFT = 32
CALL_MASK = (1 << WORLD_SHIFT) - 1
_SITE_MASK = (1 << (GROUP_SHIFT - SITE_SHIFT)) - 1

# The operations by their numbers in a record. New ones are appended, so that numbers stay.
OPERATIONS = (
    "",
    *("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "broadcast_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "gather", "scatter", "gather_object", "scatter_object_list"),
    *("all_to_all", "all_to_all_single", "send", "recv", "all_reduce_coalesced"),
    *("all_gather_coalesced", "send_object_list", "recv_object_list", "monitored_barrier"),
)

Short = Annotated[str, msgspec.Meta(max_length=WHERE_CHARS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that the program called.

    `number` counts the calls of this worker, `count` those within the group. `group` is a digest of
    its name, equal on all members; 0 is the default group. `returned_ns` is 0 while the call lasts.
    """

    number: Number
    operation: Short
    site: Short
    nbytes: Number
    group: Number
    count: Number
    entered_ns: Number
    returned_ns: Number = 0


class WorkerCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The last collectives that the worker of a rank called, the oldest first."""

    rank: Number
    local_rank: Number = 0
    pid: Number = 0
    calls: Annotated[tuple[RecordedCall, ...], msgspec.Meta(max_length=CALLS_SENT_MAX)] = ()

    def after(self, earlier: WorkerCalls | None) -> WorkerCalls:
        """Return the calls of this record and of an earlier one of the same process.

        The earlier one may have been read before the worker made the call that matters, the later
        one after it had made many more.
        """
        if earlier is None or earlier.pid != self.pid:
            return earlier or self
        calls = {each.number: each for each in (*earlier.calls, *self.calls)}
        return msgspec.structs.replace(self, calls=tuple(calls[each] for each in sorted(calls)))


class Position(msgspec.Struct, frozen=True):
    """How many collectives a group has begun, and how many it has completed, as torch counts."""

    begun: Number
    completed: Number


class GroupCall(msgspec.Struct, frozen=True):
    """One collective that a group has begun, also from C++: its number there and its tensors."""

    sequence: Number
    operation: Short
    elements: Number = 0
    dtype: Short = ""


class GroupBoard(msgspec.Struct, frozen=True, kw_only=True):
    """One process group. `ranks` are the ranks of its members as spans, "0-3,6"; "": all.

    `sends`: messages between two members count in its position too, so members may differ in it.
    """

    position: Position
    ranks: Short = ""
    backend: Short = ""
    sends: bool = False
    calls: Annotated[tuple[GroupCall, ...], msgspec.Meta(max_length=CALLS_MAX)] = ()


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's positions in its groups, by name, and the place of its main thread.

    The worker fills in `where` and the calls of the groups once it has made no collective for some
    seconds. `debugged`: a debugger holds the main thread.
    """

    groups: Annotated[dict[Short, GroupBoard], msgspec.Meta(max_length=GROUPS_MAX)] = {}
    where: Short = ""
    debugged: bool = False


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a ring at one moment: the recorded calls, the oldest first, and the board."""

    calls: tuple[RecordedCall, ...] = ()
    board: Board = Board()


_BOARD = msgspec.json.Decoder(Board)


def read_ring(memory: bytes, head: int) -> Ring:
    """Decode a copy of a ring's memory; `head` is the number of the last record."""
    assert len(memory) == RING_BYTES, "a whole ring"
    first = max(1, head - RECORDS + 1)
    calls = (_call(memory, number) for number in range(first, head + 1))
    return Ring(calls=tuple(filter(None, calls)), board=_board(memory))


def _call(memory: bytes, number: int) -> RecordedCall | None:
    words = RECORD.unpack_from(memory, (number % RECORDS) * RECORD.size)
    operation = words[1] % (1 << LOW_BITS)
    if words[0] != number or words[7] != number or operation >= len(OPERATIONS):
        return None
    return RecordedCall(
        number=number,
        operation=OPERATIONS[operation],
        site=_site(memory, words[1] >> SITE_SHIFT & _SITE_MASK),
        nbytes=min(words[2], COUNT_MAX - 1),
        group=words[1] >> GROUP_SHIFT,
        count=min(words[3], COUNT_MAX - 1),
        entered_ns=min(words[4], COUNT_MAX - 1),
        returned_ns=min(words[5], COUNT_MAX - 1),
    )


def _site(memory: bytes, number: int) -> str:
    if not 0 < number < SITES:
        return ""
    at = SITES_AT + number * SITE_BYTES
    return memory[at : at + SITE_BYTES].rstrip(b"\0").decode("utf-8", "replace")


def _board(memory: bytes) -> Board:
    size, checksum = BOARD_HEAD.unpack_from(memory, BOARD_AT)
    begin = BOARD_AT + BOARD_HEAD.size
    text = memory[begin : begin + size] if size <= BOARD_BYTES - BOARD_HEAD.size else b""
    if not text or zlib.crc32(text) != checksum:
        return Board()
    try:
        return _BOARD.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return Board()


def spans(ranks: Iterable[int]) -> str:
    """Return ranks, in any order, as "0-3,6"."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def ranks_of(text: str, world_size: int) -> frozenset[int]:
    """Return the ranks of spans; "" means all of the world. Unreadable spans give no rank."""
    if not text:
        return frozenset(range(world_size))
    found: set[int] = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return frozenset()
        found.update(range(int(first), min(int(last or first), world_size - 1) + 1))
    return frozenset(found)
