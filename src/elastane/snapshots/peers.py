"""What the keepers of two nodes say to each other, and what an agent says to its own.

Owns the types and their bounds. Who has a copy for another connects to it; each connection is for
one copy: Offer, then Taken or Declined; the words and the pieces as they are, then Proof; then
Stored or Declined. What is no message of these ends the connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import Key, Nonce, Text
from elastane.protocol.limits import KEEPER_FRAME_BYTES_MAX, LOCAL_WORLD_SIZE_MAX
from elastane.snapshots.messages import Door, Group, HeldWords, Size

_Several = msgspec.Meta(max_length=LOCAL_WORLD_SIZE_MAX)
_SECRETS_MAX = 2


class ReplicaOffer(msgspec.Struct, frozen=True, tag="offer"):
    """A node's part of a snapshot, of the keeper `origin`, for the workers of `group`.

    What follows is `words_bytes` of packed HeldWords, and the pieces, of these sizes. `safe` is the
    nonce of what is to stay; all else that was copied before makes room.
    """

    origin: Text
    group: Group
    key: Key
    nonce: Nonce
    safe: Annotated[str, msgspec.Meta(max_length=32)]
    words_bytes: Annotated[int, msgspec.Meta(ge=0, le=KEEPER_FRAME_BYTES_MAX)]
    sizes: Annotated[tuple[Size, ...], _Several]


class PeerProof(msgspec.Struct, frozen=True, tag="proof"):
    """The digests of what was sent: of the words, and of each piece."""

    digests: Annotated[tuple[str, ...], msgspec.Meta(max_length=LOCAL_WORLD_SIZE_MAX + 1)]


class ReplicaTaken(msgspec.Struct, frozen=True, tag="taken"):
    """To `ReplicaOffer`: there is room, send it."""


class ReplicaStored(msgspec.Struct, frozen=True, tag="stored"):
    """To `PeerProof`: it is here, as it was sent."""


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """To anything: why not."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Neighbours(msgspec.Struct, frozen=True, tag="neighbours"):
    """An agent's word to its keeper: copies go to other nodes and come from them.

    `secrets` are made from the job's, which a keeper does not know; the first is this node's, the
    others count as well. `host` is how others reach this node, "" where that is not known. TLS
    files are those of the agent, or none.
    """

    job: Text
    secrets: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=_SECRETS_MAX)]
    host: Door = ""
    tls: tuple[str, str, str] = ("", "", "")

    def __repr__(self) -> str:
        return f"Neighbours({self.job!r}, ...)"


class AgentLeave(msgspec.Struct, frozen=True, tag="leave"):
    """An agent's last word to its keeper."""


ToReceiver = ReplicaOffer | PeerProof
ToSender = ReplicaTaken | ReplicaStored | Declined
FromAgent = Neighbours | AgentLeave
TO_RECEIVER: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
TO_SENDER: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
WORDS: msgspec.msgpack.Decoder[HeldWords] = msgspec.msgpack.Decoder(HeldWords)
