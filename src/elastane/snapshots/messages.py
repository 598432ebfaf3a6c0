"""What workers and their keeper say to each other, and the values that cross between them.

Owns the types and their bounds. A request has one answer, in the order of the requests. Nothing
here is ever unpickled; what is no message of this version is a ValueError for the reader.
Descriptors go beside an answer, in the order that it says.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import Count, FileName, Key, Nonce, Text
from elastane.protocol.limits import (
    CHECKPOINT_FILE_BYTES_MAX,
    CHECKPOINT_PARTS_MAX,
    KEEPER_FAILURES_MAX,
    KEEPER_SLOTS_MAX,
    LOCAL_WORLD_SIZE_MAX,
)
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.rules.replicas import COPIES_MAX

# Both sides refuse another: they may be of two installations.
VERSION = 5
LAST_GASP = "last gasp"
# The file of each part with the streams of its workers: a list of them, in msgpack.
STREAMS_FILE = "streams-{:05d}.msgpack"

Size = Annotated[int, msgspec.Meta(ge=0, le=CHECKPOINT_FILE_BYTES_MAX)]
Local = Annotated[int, msgspec.Meta(ge=0, lt=LOCAL_WORLD_SIZE_MAX)]
Locals = Annotated[int, msgspec.Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)]
SlotNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Parts = Annotated[int, msgspec.Meta(ge=1, le=CHECKPOINT_PARTS_MAX)]
PartNumber = Annotated[int, msgspec.Meta(ge=0, lt=CHECKPOINT_PARTS_MAX)]
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Label = Annotated[str, msgspec.Meta(max_length=200)]
Where = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Range = tuple[FileName, Size, Size]
Files = dict[FileName, bytes]
Door = Annotated[str, msgspec.Meta(max_length=300)]
Group = Annotated[str, msgspec.Meta(max_length=4096)]


class PersistRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wish to have a snapshot written to storage, and this keeper's share in that.

    `where` is absolute, or a URL. `ranges` are (file, first, end): a range of the image, and the
    file that begins with it. `small`: this keeper writes the small files too. `keep` is how many
    checkpoints the writer of part 0 leaves; 0: all. `wait_s` is how long the other parts are
    waited for.
    """

    where: Where
    job: Text
    world: Count
    versions: dict[Text, Text]
    reason: Text
    part: PartNumber = 0
    parts: Parts = 1
    ranges: tuple[Range, ...]
    small: bool = True
    keep: Count = 0
    wait_s: Wait = 60.0


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wish to have another node's keeper hold a copy of what this node holds.

    `door` is where that keeper is (HOST:PORT), "" where this save is not copied: one is still on
    its way. `group` is that of its workers. `safe` is the nonce of the last save that all nodes
    have copied, which is kept until there is a later one; "": it is the one of before.
    """

    door: Door
    group: Group
    safe: Annotated[str, msgspec.Meta(max_length=32)]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's slot now holds: bytes `first` to `end` of the image of a state.

    This worker is `local` of the `locals` that keep the snapshot on this node. `files` are its
    small files; all workers' are put together. `layout` names the files that `Keeper.layout` was
    given before. `streams` is this worker's alone, and given back as it is. `replicated`: the
    slots of this node hold the whole image; else `together` is the nonce of the last save that all
    nodes have kept: it is held until there is a later one.
    """

    key: Key
    nonce: Nonce
    local: Local = 0
    locals: Locals = 1
    first: Size
    end: Size
    image_bytes: Size
    files: Files = {}
    layout: Label = ""
    streams: bytes = b""
    replicated: bool = True
    together: Annotated[str, msgspec.Meta(max_length=32)] = ""
    persist: PersistRequest | None = None
    replica: Replica | None = None


class SaveFailed(msgspec.Struct, frozen=True):
    """A snapshot that was to become durable and did not."""

    key: Key
    reason: str
    slug: str


class WriteProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How a keeper's writing stands.

    `writing` is under way, `waiting` comes next. `published` is the newest that this keeper knows
    to be durable. `failures` are the last ones, the newest last. The time and the bytes are those
    of the last that became durable. `copying`: a copy is on its way to another node; `copied` are
    the nonces of those that it has, oldest first.
    """

    writing: Key | None = None
    waiting: Key | None = None
    published: Key | None = None
    failures: Annotated[tuple[SaveFailed, ...], msgspec.Meta(max_length=KEEPER_FAILURES_MAX)] = ()
    last_write_s: float = 0.0
    last_write_bytes: int = 0
    copying: bool = False
    copied: Annotated[tuple[Nonce, ...], msgspec.Meta(max_length=COPIES_MAX)] = ()

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written out, or waits for that."""
        return self.writing is not None or self.waiting is not None

    @property
    def failed(self) -> SaveFailed | None:
        """Return the last that failed."""
        return self.failures[-1] if self.failures else None

    def failure_of(self, key: Key) -> SaveFailed | None:
        """Return how the writing of `key` failed, if it did and nothing as new is durable."""
        if self.published is not None and self.published >= key:
            return None
        return next((f for f in reversed(self.failures) if f.key == key), None)


class HeldPiece(msgspec.Struct, frozen=True):
    """Bytes `first` to `end` of the image, the beginning of a slot."""

    first: Size
    end: Size


class HeldWords(msgspec.Struct, frozen=True, kw_only=True):
    """A whole snapshot in words; one descriptor for each piece comes beside it.

    `verified`: the pieces have the digests that were taken when it became whole. `gasp` is what is
    to be written of it where nobody is left to ask.
    """

    key: Key
    nonce: Nonce
    locals: Locals
    image_bytes: Size
    replicated: bool
    verified: bool
    layout: Label
    layout_files: Files
    files: Files
    streams: dict[int, bytes]
    pieces: tuple[HeldPiece, ...]
    gasp: PersistRequest | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first request. Workers of other groups share nothing with this one."""

    version: int
    group: Group = ""


class Slots(msgspec.Struct, frozen=True, tag="slots"):
    """Have at least `count` slots of this size."""

    count: Annotated[int, msgspec.Meta(ge=1, le=KEEPER_SLOTS_MAX)]
    slot_bytes: Size


class SlotGrant(msgspec.Struct, frozen=True, tag="grant"):
    """Which slot is to be filled next? `overdue`: others' pieces were waited for long enough.

    `together` is that of the `Snapshot` that will be in it.
    """

    overdue: bool
    together: Annotated[str, msgspec.Meta(max_length=32)] = ""


class LayoutFiles(msgspec.Struct, frozen=True, tag="layout", forbid_unknown_fields=True):
    """Files that snapshots refer to by `digest`, and what a last gasp of those writes."""

    digest: Label
    files: Files
    gasp: PersistRequest | None = None


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """This slot, by its number among the worker's, is filled."""

    slot: SlotNumber
    snapshot: Snapshot


class WriteStatusQuery(msgspec.Struct, frozen=True, tag="ask"):
    """How does the writing stand? `fence` is the round and attempt of who asks."""

    fence: tuple[Count, Count] = (0, 0)


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Give me all whole snapshots, and leave them alone."""


class ReleaseSnapshot(msgspec.Struct, frozen=True, tag="release"):
    """I have read this one."""

    key: Key
    nonce: Nonce


class WentOn(msgspec.Struct, frozen=True, tag="went-on"):
    """The workers of this node were restored from there: from "memory", or a place."""

    key: Key
    place: Annotated[str, msgspec.Meta(max_length=4096)]
    why: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class SnapshotWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """To `Hello`: who keeps, and whether it outlives the worker.

    Beside it comes the page of memory that says what `Stands` would (`snapshots.status_page`).
    `door` is where it takes copies from other nodes' keepers; without a host where only the
    workers know by which address others reach this node, "" where it takes none.
    """

    version: int
    id: str
    survives: bool
    door: Door = ""


class HasSlots(msgspec.Struct, frozen=True, tag="slots"):
    """To `Slots`: the numbers of all of them; their descriptors come beside it, in this order."""

    slots: tuple[SlotNumber, ...]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """To `SlotGrant`, and to `Keep`: the slot to fill next; None: there is none yet."""

    slot: SlotNumber | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """To what needs no other answer."""


class Stands(msgspec.Struct, frozen=True, tag="stands"):
    """To `WriteStatusQuery`."""

    progress: WriteProgress


class Given(msgspec.Struct, frozen=True, tag="given"):
    """To `Read`: newest first; the pieces' descriptors come beside it, in this order."""

    held: tuple[HeldWords, ...]


class SnapshotRefused(msgspec.Struct, frozen=True, tag="refused"):
    """To anything: it was not done. `errno` is the world's fault, 0: the request's own."""

    errno: int
    reason: str


Request = (
    Hello
    | Slots
    | SlotGrant
    | LayoutFiles
    | Keep
    | WriteStatusQuery
    | Read
    | ReleaseSnapshot
    | WentOn
)
Answer = SnapshotWelcome | HasSlots | Granted | Done | Stands | Given | SnapshotRefused
encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request).decode
_answer = msgspec.msgpack.Decoder(Answer).decode


def request_of(frame: bytes) -> Request:
    """Return what a worker asks, which may be anything; raises ValueError."""
    try:
        request: Request = _request(frame)
    except UNREADABLE as error:
        raise ValueError(f"no request of this version: {error}") from error
    return request


def answer_of(frame: bytes) -> Answer:
    """Return what a keeper answers; raises ValueError."""
    try:
        answer: Answer = _answer(frame)
    except UNREADABLE as error:
        raise ValueError(f"no answer of this version: {error}") from error
    return answer
