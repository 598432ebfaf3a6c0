"""The messages of a snapshot server: with workers, with other servers, and from its agent.

Owns the types and their bounds. Each request of a worker has one answer, in the order of the
requests; descriptors follow an answer, in the order that it states. A server connects to the one
that is to hold its replica, once for each replica. It sends an offer, which is taken or declined;
then the description, the pieces as raw memory, and a proof. The answer is stored or declined.
Nothing is ever unpickled: a frame that is no message of this version raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import (
    FILE_BYTES_MAX,
    PARTS_MAX,
    Count,
    FileName,
    Key,
    Nonce,
    Text,
)
from elastane.protocol.limits import LOCAL_WORLD_SIZE_MAX
from elastane.protocol.unreadable import decoded
from elastane.snapshots.limits import FAILURES_MAX, REQUEST_BYTES_MAX, SLOTS_MAX
from elastane.snapshots.rules.copy_times import CopyTime
from elastane.snapshots.rules.replicas import COPIES_MAX

# Both sides refuse another version: they may come from two installations.
VERSION = 7
FINAL_FLUSH = "final flush"
# Each part's file with the streams of its workers: a list of them, in msgpack.
STREAMS_FILE = "streams-{:05d}.msgpack"

Size = Annotated[int, msgspec.Meta(ge=0, le=FILE_BYTES_MAX)]
Local = Annotated[int, msgspec.Meta(ge=0, lt=LOCAL_WORLD_SIZE_MAX)]
Locals = Annotated[int, msgspec.Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)]
SlotNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Parts = Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)]
PartNumber = Annotated[int, msgspec.Meta(ge=0, lt=PARTS_MAX)]
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Label = Annotated[str, msgspec.Meta(max_length=200)]
Where = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Range = tuple[FileName, Size, Size]
Files = dict[FileName, bytes]
Address = Annotated[str, msgspec.Meta(max_length=300)]
Group = Annotated[str, msgspec.Meta(max_length=4096)]


class PersistRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to write a snapshot to storage, and this server's part of it.

    `where` is an absolute path or a URL. `ranges` are (file, first, end): a range of the serialized
    layout and the file that holds it. With `small` this server also writes the small files. `keep`
    is how many checkpoints the writer of part 0 retains; 0 is all. `wait_s` bounds the wait for
    the other parts.
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
    """A request to copy this node's part of a snapshot to the snapshot server of another node.

    `replica_address` is that server's HOST:PORT; "" does not copy this save, since one is in
    transit. `group` is the group of its workers. `safe` is the nonce of the last save that every
    node has replicated: it is kept until there is a later one. "" means that it has not changed.
    """

    replica_address: Address
    group: Group
    safe: Annotated[str, msgspec.Meta(max_length=32)]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a filled slot: bytes `first` to `end` of the serialized layout of a state.

    The worker is number `local` of the `locals` that keep this snapshot on this node. `files` are
    its small files; the server joins those of all workers. `layout` is the digest of files that
    `SnapshotClient.layout` gave before. `streams` belongs to this worker and is given back
    unchanged. `replicated` means that the slots of this node hold the whole layout. Otherwise
    `together` is the nonce of the last save that all nodes kept, held until there is a later one.
    The save began `took_s` seconds before this message.
    """

    key: Key
    nonce: Nonce
    took_s: Wait = 0.0
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
    """A snapshot that did not become durable, and why."""

    key: Key
    reason: str
    slug: str


class WriteProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a server's writes.

    `writing` is being written, `waiting` is next. `published` is the newest checkpoint that this
    server knows to be durable. `failures` are the last ones, newest last. `last_write_s` is how
    long the last durable write took. `copying`: a replica is in transit to another node. `copied`
    are the nonces of the replicas there, oldest first.
    """

    writing: Key | None = None
    waiting: Key | None = None
    published: Key | None = None
    failures: Annotated[tuple[SaveFailed, ...], msgspec.Meta(max_length=FAILURES_MAX)] = ()
    last_write_s: float = 0.0
    copying: bool = False
    copied: Annotated[tuple[Nonce, ...], msgspec.Meta(max_length=COPIES_MAX)] = ()

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written or waits for that."""
        return self.writing is not None or self.waiting is not None

    @property
    def failed(self) -> SaveFailed | None:
        """Return the last failure."""
        return self.failures[-1] if self.failures else None

    def may_follow(self, key: Key) -> bool:
        """Whether a newer one than `key` is written or waits for that, or `key` just ended."""
        return any(other is not None and other >= key for other in (self.writing, self.waiting))

    def failure_of(self, key: Key) -> SaveFailed | None:
        """Return the failure of writing `key`, unless it or a newer one is durable."""
        if self.published is not None and self.published >= key:
            return None
        return next((f for f in reversed(self.failures) if f.key == key), None)


class HeldPiece(msgspec.Struct, frozen=True):
    """Bytes `first` to `end` of the serialized layout, at the beginning of a slot."""

    first: Size
    end: Size


class SnapshotDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a whole snapshot; one descriptor for each piece accompanies it.

    `verified`: the pieces match the digests computed when the snapshot became whole. `final_flush`
    is what a final flush writes of it.
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
    final_flush: PersistRequest | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first request. Workers of different groups share nothing."""

    version: int
    group: Group = ""


class Slots(msgspec.Struct, frozen=True, tag="slots"):
    """Asks for at least `count` slots of this size."""

    count: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_MAX)]
    slot_bytes: Size


class SlotGrant(msgspec.Struct, frozen=True, tag="grant"):
    """Asks for the slot to fill next.

    `overdue`: an incomplete snapshot may be discarded, since other pieces of it are late.

    `together` is the field of that name in the `Snapshot` that will fill the slot.
    """

    overdue: bool
    together: Annotated[str, msgspec.Meta(max_length=32)] = ""


class LayoutFiles(msgspec.Struct, frozen=True, tag="layout", forbid_unknown_fields=True):
    """Files that snapshots name by `digest`, and what the final flush of those writes."""

    digest: Label
    files: Files
    final_flush: PersistRequest | None = None


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Reports that the slot of this number holds this snapshot."""

    slot: SlotNumber
    snapshot: Snapshot


class WriteStatusQuery(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the status of writes. `fence` is the round and attempt of the worker."""

    fence: tuple[Count, Count] = (0, 0)


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Asks for all whole snapshots, which stay unchanged until they are released."""


class ReleaseSnapshot(msgspec.Struct, frozen=True, tag="release"):
    """Releases a snapshot that was read."""

    key: Key
    nonce: Nonce


class RestoreReport(msgspec.Struct, frozen=True, tag="went-on"):
    """Reports that this node's workers were restored from "memory" or a place, and why."""

    key: Key
    place: Annotated[str, msgspec.Meta(max_length=4096)]
    why: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class SnapshotWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers `Hello`. `id` names the server; `survives`: it outlives the worker.

    Its descriptor is the status page (`snapshots.channel`). `replica_address` is where the server
    accepts replicas from other nodes: without a host if only the workers know this node's address,
    "" if it accepts none.
    """

    version: int
    id: str
    survives: bool
    replica_address: Address = ""


class SlotNumbers(msgspec.Struct, frozen=True, tag="slots"):
    """Answers `Slots` with the numbers of all of them; descriptors follow in this order."""

    slots: tuple[SlotNumber, ...]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Answers `SlotGrant` and `Keep` with the slot to fill next, or None if there is none yet."""

    slot: SlotNumber | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answers a request that needs no other answer."""


class WriteStatus(msgspec.Struct, frozen=True, tag="stands"):
    """Answers `WriteStatusQuery`."""

    progress: WriteProgress


class HeldSnapshots(msgspec.Struct, frozen=True, tag="given"):
    """Answers `Read`, newest first; the pieces' descriptors follow in this order."""

    held: tuple[SnapshotDescription, ...]


class SnapshotRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Refuses a request. `errno` is the system's error, or 0 if the request was wrong."""

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
    | RestoreReport
)
Answer = (
    SnapshotWelcome | SlotNumbers | Granted | Done | WriteStatus | HeldSnapshots | SnapshotRefused
)


_Words = Annotated[str, msgspec.Meta(max_length=4096)]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is durable: the last of `saves`. `reason` says why it was saved.

    Its save began at `began_s` of this host's monotonic clock; the write took `seconds`.
    """

    key: Key
    place: Where
    reason: Text
    size_bytes: int
    seconds: float
    began_s: float
    saves: Count = 1


class PersistFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A snapshot did not become durable. `place` is "" if no place was given."""

    key: Key
    place: _Words
    reason: _Words
    slug: Text


class RestoredEvent(msgspec.Struct, frozen=True, tag="restored"):
    """This node's workers were restored from `place`: "memory", or a path or URL."""

    key: Key
    place: _Words
    why: _Words = ""


class CopiesHeld(msgspec.Struct, frozen=True, tag="held", kw_only=True):
    """The newest copies of the state of this node's workers, for the agent's heartbeats.

    `memory` is in this server, `replica` in that of another node, `storage` is durable.
    `replicated`: each of them is the whole state, not this node's part of it.
    """

    memory: CopyTime | None = None
    replica: CopyTime | None = None
    storage: CopyTime | None = None
    replicated: bool = True


SnapshotEvent = Saved | PersistFailed | RestoredEvent
SnapshotNews = SnapshotEvent | CopiesHeld
encode = msgspec.msgpack.Encoder().encode
_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def request_of(frame: bytes) -> Request:
    """Decode a worker's request; raises ValueError."""
    return decoded(_request, frame, "request")


def answer_of(frame: bytes) -> Answer:
    """Decode a server's answer; raises ValueError."""
    return decoded(_answer, frame, "answer")


_Several = msgspec.Meta(max_length=LOCAL_WORLD_SIZE_MAX)
_SECRETS_MAX = 2


class ReplicaOffer(msgspec.Struct, frozen=True, tag="offer"):
    """A node's part of a snapshot, from the server `origin`, for the workers of `group`.

    `words_bytes` of a packed SnapshotDescription follow, and pieces of these sizes. `safe` is the
    nonce of the save that must stay; every other replica may be removed for this one.
    """

    origin: Text
    group: Group
    key: Key
    nonce: Nonce
    safe: Annotated[str, msgspec.Meta(max_length=32)]
    words_bytes: Annotated[int, msgspec.Meta(ge=0, le=REQUEST_BYTES_MAX)]
    sizes: Annotated[tuple[Size, ...], _Several]


class PeerProof(msgspec.Struct, frozen=True, tag="proof"):
    """The digests of what was sent: of the description, and of each piece."""

    digests: Annotated[tuple[str, ...], msgspec.Meta(max_length=LOCAL_WORLD_SIZE_MAX + 1)]


class ReplicaTaken(msgspec.Struct, frozen=True, tag="taken"):
    """Accepts a `ReplicaOffer`: send it."""


class ReplicaStored(msgspec.Struct, frozen=True, tag="stored"):
    """Answers `PeerProof`: the replica is stored, and matches its digests."""


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """Refuses an offer or a replica, and says why."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class ReplicationSettings(msgspec.Struct, frozen=True, tag="replication"):
    """Tells a snapshot server to replicate to other nodes and to accept their replicas.

    `secrets` are derived from the job's secret, which the server does not know. This node uses the
    first; callers may use any. `host` is this node's address for others, "" if it is unknown. `tls`
    are the agent's certificate, key and CA files, or empty.
    """

    job: Text
    secrets: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=_SECRETS_MAX)]
    host: Address = ""
    tls: tuple[str, str, str] = ("", "", "")

    def __repr__(self) -> str:
        return f"ReplicationSettings({self.job!r}, ...)"


class AgentLeave(msgspec.Struct, frozen=True, tag="leave"):
    """Tells a snapshot server that its agent leaves.

    `within_s`: it has no longer than this; None: as long as its own bound allows.
    """

    within_s: Annotated[float, msgspec.Meta(ge=0.0)] | None = None


ToReceiver = ReplicaOffer | PeerProof
ToSender = ReplicaTaken | ReplicaStored | Declined
FromAgent = ReplicationSettings | AgentLeave
TO_RECEIVER: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
TO_SENDER: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
WORDS: msgspec.msgpack.Decoder[SnapshotDescription] = msgspec.msgpack.Decoder(SnapshotDescription)
SNAPSHOT_NEWS: msgspec.msgpack.Decoder[SnapshotNews] = msgspec.msgpack.Decoder(SnapshotNews)
