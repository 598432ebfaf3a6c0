"""The wire between agent and coordinator: handshake and frames, as pure code.

Bytes in, bytes and messages out; sockets, clocks and random numbers are the caller's. A peer that
breaks the protocol is refused with `WireError`, never with another exception, and never holds more
memory than `protocol.limits` allows.

The handshake proves that both sides know the job's secret. Every frame comes from the side that
proved it, once and in order. It gives no privacy, which is TLS's task. It does not protect a
guessable token from an impostor coordinator that tries tokens offline: tokens should be random.
"""

from elastane.protocol.wire.frames import (
    HEAD_BYTES,
    FrameCodec,
    SessionKeys,
    codec_for_agent,
    codec_for_coordinator,
)
from elastane.protocol.wire.handshake import (
    MAGIC,
    NONCE_BYTES,
    PROTOCOL,
    ClientHandshake,
    Handshake,
    ServerHandshake,
    derive_secret,
)

__all__ = [
    "HEAD_BYTES",
    "MAGIC",
    "NONCE_BYTES",
    "PROTOCOL",
    "ClientHandshake",
    "FrameCodec",
    "Handshake",
    "ServerHandshake",
    "SessionKeys",
    "codec_for_agent",
    "codec_for_coordinator",
    "derive_secret",
]
