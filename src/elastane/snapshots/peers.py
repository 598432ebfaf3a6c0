"""The messages between the snapshot servers of two nodes, and from an agent to its own.

Owns the types and their bounds. A server connects to the one that is to hold its replica, once for
each replica. It sends an offer, which is taken or declined; then the description, the pieces as raw
memory, and a proof. The answer is stored or declined. Any other message ends the connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import Key, Nonce, Text
from elastane.protocol.limits import KEEPER_FRAME_BYTES_MAX, LOCAL_WORLD_SIZE_MAX
from elastane.snapshots.messages import Door, Group, Size, SnapshotDescription

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
    words_bytes: Annotated[int, msgspec.Meta(ge=0, le=KEEPER_FRAME_BYTES_MAX)]
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


class ReplicationSettings(msgspec.Struct, frozen=True, tag="neighbours"):
    """Tells a snapshot server to replicate to other nodes and to accept their replicas.

    `secrets` are derived from the job's secret, which the server does not know. This node uses the
    first; callers may use any. `host` is this node's address for others, "" if it is unknown. `tls`
    are the agent's certificate, key and CA files, or empty.
    """

    job: Text
    secrets: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=_SECRETS_MAX)]
    host: Door = ""
    tls: tuple[str, str, str] = ("", "", "")

    def __repr__(self) -> str:
        return f"Neighbours({self.job!r}, ...)"


class AgentLeave(msgspec.Struct, frozen=True, tag="leave"):
    """Tells a snapshot server that its agent leaves."""


ToReceiver = ReplicaOffer | PeerProof
ToSender = ReplicaTaken | ReplicaStored | Declined
FromAgent = ReplicationSettings | AgentLeave
TO_RECEIVER: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
TO_SENDER: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
WORDS: msgspec.msgpack.Decoder[SnapshotDescription] = msgspec.msgpack.Decoder(SnapshotDescription)
