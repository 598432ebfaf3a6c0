"""The wire between agent and coordinator: handshake and frames, as pure code.

Bytes in, bytes and messages out; sockets, clocks and random numbers are the caller's. A peer that
breaks the protocol is refused with `WireError`, never with another exception, and never holds more
memory than `protocol.limits` allows. The first bytes of a connection:

    agent        MAGIC | u16 version | u16 length of job | 32 bytes nonce | job
    coordinator  MAGIC | u16 version | u8 verdict | 32 bytes nonce     (nonce with GO_ON only)
    agent        32 bytes proof
    coordinator  u8 verdict | 32 bytes proof                           (proof with GO_ON only)

MAGIC and version come first in every version of the protocol, so two versions can name each other.
A refusal is one byte, and its reader supplies the words: no text of an unproven peer is logged.
`wrong-job` comes before any proof, since a peer of another job cannot prove anything. It reveals
that this is another job's endpoint, but not which job's. The agent proves first, so an unproven
peer receives nothing that depends on the secret.

The handshake proves that both sides know the job's secret. Every frame comes from the side that
proved it, once and in order:

    u32 length, little endian | 16 bytes of HMAC-SHA256 | msgpack body of `length` bytes

Each direction has a key of its own, and the code covers a 64-bit sequence number, the length and
the body. So a frame that was changed, replayed, reordered, left out or sent back is refused. The
length is checked before anything is stored. A codec that has refused one frame refuses all later
ones.

The handshake gives no privacy; TLS does. An impostor coordinator can try tokens offline against a
proof, so a token should be random.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import msgspec

from elastane.errors import WireError
from elastane.protocol.limits import FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, NAME_CHARS_MAX
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.unreadable import UNREADABLE

# MAGIC ends with a complete line and an empty one, so that a web server answers at once instead of
# waiting for more.
MAGIC = b"ELASTANE\r\n\r\n"
PROTOCOL = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
_JOB_BYTES_MAX = 4 * NAME_CHARS_MAX
_HELLO_BYTES = len(MAGIC) + 4 + NONCE_BYTES
_ANSWER_BYTES = len(MAGIC) + 3
assert _HELLO_BYTES + _JOB_BYTES_MAX + PROOF_BYTES < HANDSHAKE_BYTES_MAX
# How the first bytes of other protocols begin, from either side of a connection.
_STRANGERS = (
    (b"\x16\x03", "TLS, which this side does not use"),
    (b"\x15\x03", "a TLS alert: it expects TLS, which this side does not use"),
    (b"HTTP/", "HTTP: it is a web server"),
    (b"GET ", "HTTP: it is a web client"),
    (b"POST ", "HTTP: it is a web client"),
    (b"HEAD ", "HTTP: it is a web client"),
    (b"PRI * HTTP/2", "HTTP/2: it is a web or gRPC client"),
    (b"\x00\xce\xf7\x85\x3c", "the protocol of torch's TCPStore: it may be torchrun's c10d"),
    (b"SSH-", "SSH"),
)
T = TypeVar("T")
CODE_BYTES = 16
HEAD_BYTES = 4 + CODE_BYTES
# Consumed bytes at the front of the buffer are dropped once there are this many.
_COMPACT_BYTES = 64 << 10
Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")
_TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent, strict=True)
_TO_COORDINATOR: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(
    ToCoordinator, strict=True
)


class HandshakeVerdict(IntEnum):
    """The coordinator's one byte."""

    GO_ON = 0
    WRONG_VERSION = 1
    WRONG_JOB = 2
    WRONG_TOKEN = 3


def derive_secret(job: str, token: str | None) -> bytes:
    """Return the secret of a job from its token, or from its name without a token.

    A job's name is sent in clear. Without a token the secret prevents accidents (a stray agent, a
    port scanner, another job), and stops no attacker.
    """
    kind, text = ("job", job) if token is None else ("token", token)
    return hashlib.sha256(f"elastane secret of {kind}\0{text}".encode()).digest()


class Handshake(Protocol[Incoming, Outgoing]):
    """One side of a handshake, as a shell uses it."""

    @property
    def done(self) -> bool:
        """Whether both sides have proved what they must."""

    @property
    def received_bytes(self) -> int:
        """How many bytes the peer has sent so far. A port probe sends none."""

    @property
    def farewell(self) -> bytes:
        """The bytes to send after a WireError, before the connection is closed."""

    def start(self) -> bytes:
        """Return the first bytes that this side sends."""

    def feed(self, data: bytes) -> bytes:
        """Accept received bytes and return the answer; WireError if the peer is refused."""

    def codec(self) -> FrameCodec[Incoming, Outgoing]:
        """Return the codec of the session, once `done`; bytes fed too early are in it."""


class _Side:
    """The common part of both sides: a bounded buffer, and the transcript for the keys."""

    def __init__(self, job: str, secret: bytes, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES, len(nonce)
        assert len(job.encode()) <= _JOB_BYTES_MAX, len(job)
        self._job = job
        self._secret = secret
        self._nonce = nonce
        self._buffer = b""
        self._keys: tuple[bytes, bytes, SessionKeys] | None = None
        self.done = False
        self.received_bytes = 0
        self.farewell = b""

    def _store(self, data: bytes) -> None:
        assert not self.done
        self.received_bytes += len(data)
        self._buffer += data
        if len(self._buffer) > HANDSHAKE_BYTES_MAX:
            raise WireError(
                f"the peer sent {len(self._buffer)} bytes before any proof",
                slug="bad-handshake",
                expected=f"at most {HANDSHAKE_BYTES_MAX} bytes",
            )

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _derive(self, secret: bytes, transcript: bytes) -> tuple[bytes, bytes, SessionKeys]:
        """Return the client's proof, the server's proof and the session's keys."""
        root = hmac.digest(secret, b"elastane handshake\0" + transcript, "sha256")
        labels = (b"proof of agent", b"proof of coordinator", b"to coordinator", b"to agent")
        agent, coordinator, to_coordinator, to_agent = (
            hmac.digest(root, label, "sha256") for label in labels
        )
        return agent, coordinator, SessionKeys(to_coordinator, to_agent)

    def _settled(self) -> SessionKeys:
        assert self.done and self._keys is not None
        return self._keys[2]


class ClientHandshake(_Side):
    """The agent's side."""

    def __init__(self, job: str, secret: bytes, nonce: bytes) -> None:
        super().__init__(job, secret, nonce)
        name = job.encode()
        self._hello = b"".join(
            (MAGIC, _u16(PROTOCOL), _u16(len(name)), nonce, name),
        )

    def start(self) -> bytes:
        """Return the hello."""
        return self._hello

    def feed(self, data: bytes) -> bytes:
        """Accept bytes of the coordinator; return the answer."""
        self._store(data)
        answer = b""
        if self._keys is None:
            answer = self._read_challenge()
        if self._keys is not None and not self.done:
            self._read_proof(self._keys[1])
        return answer

    def codec_of(self, decoder: msgspec.msgpack.Decoder[T]) -> FrameCodec[T, object]:
        """Return the codec of a session, once `done`, whose messages are of another kind."""
        keys = self._settled()
        return FrameCodec(send_key=keys.to_coordinator, receive_key=keys.to_agent, decoder=decoder)

    def codec(self) -> FrameCodec[ToAgent, ToCoordinator]:
        """Return the agent's codec."""
        codec = codec_for_agent(self._settled())
        codec.feed(self._buffer)
        return codec

    def _read_challenge(self) -> bytes:
        _check_magic(self._buffer, "the endpoint is no elastane coordinator", "not-a-coordinator")
        if len(self._buffer) < _ANSWER_BYTES:
            return b""
        verdict = self._buffer[_ANSWER_BYTES - 1]
        if verdict != HandshakeVerdict.GO_ON:
            theirs = _version(self._buffer)
            raise self._refused(verdict, theirs)
        if len(self._buffer) < _ANSWER_BYTES + NONCE_BYTES:
            return b""
        challenge = self._take(_ANSWER_BYTES + NONCE_BYTES)
        if _version(challenge) != PROTOCOL:
            raise self._refused(HandshakeVerdict.WRONG_VERSION, _version(challenge))
        self._keys = self._derive(self._secret, self._hello + challenge)
        return self._keys[0]

    def _read_proof(self, expected: bytes) -> None:
        if not self._buffer:
            return
        if self._buffer[0] != HandshakeVerdict.GO_ON:
            raise self._refused(self._buffer[0], PROTOCOL)
        if len(self._buffer) < 1 + PROOF_BYTES:
            return
        if not hmac.compare_digest(self._take(1 + PROOF_BYTES)[1:], expected):
            raise WireError(
                f"the coordinator of job {self._job!r} does not know the job's token",
                slug="wrong-token",
                expected="the same token on every node",
                next_step="compare --rdzv-conf token=... or ELASTANE_TOKEN on both hosts",
            )
        self.done = True

    def _refused(self, verdict: int, theirs: int) -> WireError:
        if verdict == HandshakeVerdict.WRONG_VERSION:
            return WireError(
                f"the coordinator speaks protocol version {theirs}, this agent {PROTOCOL}",
                slug="protocol-version",
                expected="the same elastane on every node",
                next_step="pip install the same version of elastane on all nodes",
            )
        if verdict == HandshakeVerdict.WRONG_JOB:
            return WireError(
                f"the coordinator there serves another job than {self._job!r}",
                slug="wrong-job",
                expected="one job to an endpoint",
                next_step="use the same --rdzv-id on all nodes, or another --rdzv-endpoint",
            )
        if verdict == HandshakeVerdict.WRONG_TOKEN:
            return WireError(
                f"the coordinator of job {self._job!r} has another token than this agent",
                slug="wrong-token",
                expected="the same token on every node",
                next_step="compare --rdzv-conf token=... or ELASTANE_TOKEN on both hosts",
            )
        return WireError(
            f"the coordinator's verdict is {verdict}, of no meaning", slug="bad-handshake"
        )


class ServerHandshake(_Side):
    """The coordinator's side; costs one buffer of a hello until the peer has proved itself.

    `others` are secrets that also count, while the job's secret is being changed.
    """

    def __init__(
        self, job: str, secret: bytes, nonce: bytes, others: tuple[bytes, ...] = ()
    ) -> None:
        super().__init__(job, secret, nonce)
        self._secrets = (secret, *others)
        self._transcript = b""

    def start(self) -> bytes:
        """Return no bytes: a peer receives nothing before it has sent its hello."""
        return b""

    def feed(self, data: bytes) -> bytes:
        """Accept bytes of the agent; return the answer."""
        self._store(data)
        answer = b""
        if not self._transcript:
            answer = self._read_hello()
        if self._transcript:
            answer += self._read_proof()
        return answer

    def codec_of(self, decoder: msgspec.msgpack.Decoder[T]) -> FrameCodec[T, object]:
        """Return the codec of a session, once `done`, whose messages are of another kind."""
        keys = self._settled()
        return FrameCodec(send_key=keys.to_agent, receive_key=keys.to_coordinator, decoder=decoder)

    def codec(self) -> FrameCodec[ToCoordinator, ToAgent]:
        """Return the coordinator's codec."""
        codec = codec_for_coordinator(self._settled())
        codec.feed(self._buffer)
        return codec

    def _read_hello(self) -> bytes:
        _check_magic(self._buffer, "the peer is no elastane agent", "not-an-agent")
        if len(self._buffer) < len(MAGIC) + 2:
            return b""
        version = _version(self._buffer)
        if version != PROTOCOL:
            what = f"the peer speaks protocol version {version}, this coordinator {PROTOCOL}"
            raise self._refuse(HandshakeVerdict.WRONG_VERSION, what, "protocol-version")
        if len(self._buffer) < _HELLO_BYTES:
            return b""
        job_bytes = int.from_bytes(self._buffer[len(MAGIC) + 2 : len(MAGIC) + 4], "little")
        if job_bytes > _JOB_BYTES_MAX:
            raise WireError(f"the peer names a job of {job_bytes} bytes", slug="bad-handshake")
        if len(self._buffer) < _HELLO_BYTES + job_bytes:
            return b""
        hello = self._take(_HELLO_BYTES + job_bytes)
        self._check_job(hello[_HELLO_BYTES:])
        challenge = b"".join((MAGIC, _u16(PROTOCOL), bytes((HandshakeVerdict.GO_ON,)), self._nonce))
        self._transcript = hello + challenge
        return challenge

    def _check_job(self, name: bytes) -> None:
        if name != self._job.encode():
            theirs = name.decode(errors="replace")
            what = f"the peer belongs to job {theirs!r}, this coordinator serves {self._job!r}"
            raise self._refuse(HandshakeVerdict.WRONG_JOB, what, "wrong-job")

    def _read_proof(self) -> bytes:
        if len(self._buffer) < PROOF_BYTES:
            return b""
        proof = self._take(PROOF_BYTES)
        for secret in self._secrets:
            keys = self._derive(secret, self._transcript)
            if hmac.compare_digest(proof, keys[0]):
                self._keys = keys
        if self._keys is None:
            self.farewell = bytes((HandshakeVerdict.WRONG_TOKEN,))
            what = f"the peer has another token than job {self._job!r}"
            raise WireError(what, slug="wrong-token")
        self.done = True
        return bytes((HandshakeVerdict.GO_ON,)) + self._keys[1]

    def _refuse(self, verdict: HandshakeVerdict, what: str, slug: str) -> WireError:
        self.farewell = b"".join((MAGIC, _u16(PROTOCOL), bytes((verdict,))))
        return WireError(what, slug=slug)


def _u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def _version(data: bytes) -> int:
    return int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "little")


def _check_magic(data: bytes, what: str, slug: str) -> None:
    """Refuse as soon as the bytes cannot become MAGIC, and say what they look like."""
    if data[: len(MAGIC)] == MAGIC[: len(data)]:
        return
    looks = next((words for start, words in _STRANGERS if data.startswith(start)), "")
    spoke = f"it speaks {looks}" if looks else f"it began with {data[:16]!r}"
    raise WireError(
        f"{what}: {spoke}",
        slug=slug,
        expected="elastane's protocol",
        next_step="check --rdzv-endpoint: host, port, and TLS on both sides or on neither",
    )


class SessionKeys(msgspec.Struct, frozen=True):
    """The keys of one session, one for each direction."""

    to_coordinator: bytes
    to_agent: bytes

    def __repr__(self) -> str:
        return "SessionKeys(...)"


class FrameCodec(Generic[Incoming, Outgoing]):
    """Encodes sent messages, and collects and decodes received ones, for one side of a session.

    `feed` stores bytes; `next` returns one message at a time, so the receiver decides how much work
    it does at once. The caller stops feeding while `ready` is true and `waiting_bytes` is large.
    """

    def __init__(
        self,
        *,
        send_key: bytes,
        receive_key: bytes,
        decoder: msgspec.msgpack.Decoder[Incoming],
    ) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()
        self._start = 0
        self._fault: WireError | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were fed and not yet decoded."""
        return len(self._buffer) - self._start

    @property
    def ready(self) -> bool:
        """Whether `next` returns a message, or raises, without further bytes."""
        if self._fault is not None:
            return True
        length = self._length()
        return length is not None and (
            length > FRAME_BYTES_MAX or self.waiting_bytes >= HEAD_BYTES + length
        )

    def encode(self, message: Outgoing) -> bytes:
        """Return the frame of `message`; frames must be sent in the order of these calls.

        Raises WireError if the message is larger than any peer accepts; the sequence is then
        unchanged.
        """
        body = self._encoder.encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise WireError(
                f"a {type(message).__name__} of {len(body)} bytes",
                slug="frame-too-large",
                expected=f"at most {FRAME_BYTES_MAX} bytes",
            )
        length = len(body).to_bytes(4, "little")
        code = _code(self._send_key, self._sent, length, body)
        self._sent += 1
        return b"".join((length, code, body))

    def feed(self, data: bytes | memoryview) -> None:
        """Store received bytes; `next` checks them."""
        if self._fault is None:
            self._buffer += data

    def next(self) -> Incoming | None:
        """Return the next message, or None while its frame is incomplete.

        Raises WireError for a frame that does not belong to this session, and on every later call.
        """
        if self._fault is not None:
            raise self._fault
        length = self._length()
        if length is None:
            return None
        if length > FRAME_BYTES_MAX:
            raise self._refuse(f"a frame of {length} bytes, larger than any", "bad-frame")
        if self.waiting_bytes < HEAD_BYTES + length:
            return None
        return self._decode(self._cut(length))

    def _length(self) -> int | None:
        if self.waiting_bytes < HEAD_BYTES:
            return None
        return int.from_bytes(self._buffer[self._start : self._start + 4], "little")

    def _cut(self, length: int) -> bytes:
        """Remove the first frame, which is complete, from the buffer and return its body."""
        head = bytes(self._buffer[self._start : self._start + HEAD_BYTES])
        end = self._start + HEAD_BYTES + length
        body = bytes(self._buffer[self._start + HEAD_BYTES : end])
        self._start = end
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        elif self._start >= _COMPACT_BYTES:
            del self._buffer[: self._start]
            self._start = 0
        code = _code(self._receive_key, self._received, head[:4], body)
        if not hmac.compare_digest(code, head[4:]):
            raise self._refuse("a frame that is not the next one of this session", "bad-frame")
        self._received += 1
        return body

    def _decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except (*UNREADABLE, MemoryError) as error:
            refusal = self._refuse(f"a frame that holds no message: {error}", "bad-message")
            raise refusal from error

    def _refuse(self, what: str, slug: str) -> WireError:
        self._buffer.clear()
        self._start = 0
        self._fault = WireError(f"the peer sent {what}", slug=slug)
        return self._fault


def codec_for_agent(keys: SessionKeys) -> FrameCodec[ToAgent, ToCoordinator]:
    """Return the codec of the agent's side."""
    return FrameCodec(send_key=keys.to_coordinator, receive_key=keys.to_agent, decoder=_TO_AGENT)


def codec_for_coordinator(keys: SessionKeys) -> FrameCodec[ToCoordinator, ToAgent]:
    """Return the codec of the coordinator's side."""
    return FrameCodec(
        send_key=keys.to_agent, receive_key=keys.to_coordinator, decoder=_TO_COORDINATOR
    )


def _code(key: bytes, sequence: int, length: bytes, body: bytes) -> bytes:
    covered = b"".join((sequence.to_bytes(8, "little"), length, body))
    return hmac.digest(key, covered, "sha256")[:CODE_BYTES]
