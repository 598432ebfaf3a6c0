"""Attacks on a coordinator, by outsiders without the job's secret and by insiders with it.

An attack is a coroutine with a random generator as its argument. It may end by any OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator

import msgspec
from hostile_support import TOKEN, Attack

from elastane import __version__
from elastane.errors import WireError
from elastane.protocol import messages as m
from elastane.protocol.limits import FRAME_BYTES_MAX
from elastane.protocol.model import (
    Assignment,
    Failure,
    Fence,
    JobSpec,
    NodeSpec,
    PortOffer,
    Versions,
)
from elastane.protocol.wire import CODE_BYTES, MAGIC, ClientHandshake, derive_secret

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FAR = 1 << 62
_HUGE = 3 << 20


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def hear_end(reader: asyncio.StreamReader) -> None:
    """Read until the other side closes the connection."""
    while await reader.read(1 << 16):
        pass


def flip(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one changed bit."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


class Outsiders:
    """Attackers who know the port, the job's name, and recorded traffic."""

    def __init__(self, port: int, job: str, recorded: bytes, pieces: list[bytes]) -> None:
        self.port, self.job, self.recorded, self.pieces = port, job, recorded, pieces

    def attacks(self) -> list[Attack]:
        return [
            self.garbage,
            self.foreign,
            self.truncated,
            self.oversized,
            self.flipped,
            self.no_proof,
            self.wrong_secret,
            self.replayed,
            self.replayed_in_pieces,
            self.half_open,
            self.slow,
            self.probe,
            self.reset,
        ]

    def hello(self, rng: random.Random, job: str = "", secret: str = "a guess") -> ClientHandshake:
        job = job or self.job
        return ClientHandshake(job, derive_secret(job, secret), rng.randbytes(32))

    async def say(self, *data: bytes) -> None:
        async with connected(self.port) as (reader, writer):
            for piece in data:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            await hear_end(reader)

    async def garbage(self, rng: random.Random) -> None:
        await self.say(rng.randbytes(rng.choice([1, 20, 200, 5000])))

    async def foreign(self, rng: random.Random) -> None:
        firsts = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"SSH-2.0-x\r\n", b"\x00\xce\xf7")
        await self.say(rng.choice(firsts) + rng.randbytes(30))

    async def truncated(self, rng: random.Random) -> None:
        hello = self.hello(rng).start()
        async with connected(self.port) as (_, writer):
            writer.write(hello[: rng.randrange(1, len(hello))])
            await writer.drain()

    async def oversized(self, rng: random.Random) -> None:
        head = MAGIC + struct.pack("<HH", 1, rng.choice([801, 4000, 65535])) + rng.randbytes(32)
        await self.say(head + b"n" * rng.choice([0, 5000, 1 << 20]))

    async def flipped(self, rng: random.Random) -> None:
        await self.say(flip(self.hello(rng, rng.choice(["", "other"])).start(), rng), b"x" * 32)

    async def no_proof(self, rng: random.Random) -> None:
        """Send frames instead of the proof."""
        await self.say(self.hello(rng).start(), rng.choice(self.pieces)[-200:] * 3)

    async def wrong_secret(self, rng: random.Random) -> None:
        async with connected(self.port) as (reader, writer):
            hello = self.hello(rng, secret=rng.choice(["", "guess", self.job]))
            writer.write(hello.start())
            with contextlib.suppress(WireError):
                while data := await reader.read(1000):
                    writer.write(hello.feed(data))
            assert not hello.done

    async def replayed(self, rng: random.Random) -> None:
        await self.say(self.recorded[: rng.randrange(60, len(self.recorded))])

    async def replayed_in_pieces(self, rng: random.Random) -> None:
        pieces = self.pieces[:6]
        if rng.random() < 0.5:
            rng.shuffle(pieces)
        await self.say(*pieces)

    async def half_open(self, rng: random.Random) -> None:
        async with connected(self.port) as (reader, writer):
            writer.write(self.hello(rng).start()[: rng.randrange(20)])
            writer.write_eof()
            await hear_end(reader)

    async def slow(self, rng: random.Random) -> None:
        async with connected(self.port) as (_, writer):
            for byte in self.hello(rng).start()[: rng.randrange(2, 12)]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

    async def probe(self, rng: random.Random) -> None:
        async with connected(self.port):
            pass

    async def reset(self, rng: random.Random) -> None:
        async with connected(self.port) as (_, writer):
            writer.write(self.hello(rng).start())
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class _Raw:
    @staticmethod
    def encode(body: bytes) -> bytes:
        return body


class Insider:
    """One session with the right secret, which seals any bytes."""

    def __init__(self, streams: Streams, handshake: ClientHandshake) -> None:
        self.reader, self.writer = streams
        self.codec = handshake.codec()
        self._encoder = self.codec._encoder

    def seal(self, body: bytes) -> bytes:
        self.codec._encoder = _Raw()
        try:
            return self.codec.encode(body)
        finally:
            self.codec._encoder = self._encoder

    async def send(self, *messages: object) -> None:
        for message in messages:
            body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
            self.writer.write(self.seal(body))
        await self.writer.drain()

    async def answer(self) -> object:
        while (message := self.codec.next()) is None:
            data = await self.reader.read(1 << 16)
            if not data:
                raise ConnectionResetError("the coordinator hung up")
            self.codec.feed(data)
        return message


class Insiders:
    """Attackers who know the secret. They must not crash, block or deceive the coordinator."""

    def __init__(self, port: int, spec: JobSpec, members: tuple[str, ...], fence: Fence) -> None:
        self.port, self.spec, self.members, self.fence = port, spec, members, fence
        self.versions = own_versions()

    def attacks(self) -> list[Attack]:
        return [
            self.garbage_frames,
            self.flipped_frame,
            self.reordered_frames,
            self.replayed_frame,
            self.truncated_frame,
            self.oversized_frame,
            self.no_message,
            self.message_for_agents,
            self.messages_before_join,
            self.chatter,
            self.deaf,
            self.absurd_join,
            self.impostor,
            self.absurd_spare,
        ]

    @contextlib.asynccontextmanager
    async def session(self, rng: random.Random) -> AsyncIterator[Insider]:
        secret = derive_secret(self.spec.job, TOKEN)
        hello = ClientHandshake(self.spec.job, secret, rng.randbytes(32))
        async with connected(self.port) as (reader, writer):
            writer.write(hello.start())
            while not hello.done:
                data = await reader.read(1000)
                if not data:
                    raise ConnectionResetError("not let in")
                writer.write(hello.feed(data))
            yield Insider((reader, writer), hello)

    def join(self, rng: random.Random, **changes: object) -> m.Join:
        node = NodeSpec(
            node_id=str(changes.pop("node_id", f"spare-{rng.randrange(1 << 30)}")),
            incarnation=rng.randbytes(8).hex(),
            local_world_size=1,
            versions=self.versions,
        )
        spec = changes.pop("spec", self.spec)
        join = m.Join(spec=spec, node=node, offer=PortOffer(1, True), ready=False)
        return msgspec.structs.replace(join, **changes)

    async def garbage_frames(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            one.writer.write(rng.randbytes(rng.choice([4, 19, 300, 70_000])))
            one.writer.write_eof()
            await hear_end(one.reader)

    async def flipped_frame(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            frame = one.codec.encode(m.Heartbeat())
            one.writer.write(flip(frame, rng))
            one.writer.write_eof()
            await hear_end(one.reader)

    async def reordered_frames(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            frames = [one.codec.encode(m.Query()) for _ in range(4)]
            one.writer.write(b"".join(reversed(frames)))
            await hear_end(one.reader)

    async def replayed_frame(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            one.writer.write(one.codec.encode(m.Query()) * 2)
            await hear_end(one.reader)

    async def truncated_frame(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            frame = one.codec.encode(m.Leave("x" * 100))
            one.writer.write(frame[: rng.randrange(1, len(frame))])
            await one.writer.drain()

    async def oversized_frame(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            length = rng.choice([FRAME_BYTES_MAX + 1, (1 << 32) - 1])
            one.writer.write(struct.pack("<I", length) + rng.randbytes(CODE_BYTES + 1000))
            await hear_end(one.reader)

    async def no_message(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            await one.send(rng.choice(bodies(rng)))
            await hear_end(one.reader)

    async def message_for_agents(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            stop = m.Stop(fence=self.fence, grace_s=0.0, reason="because")
            await one.send(rng.choice([stop, m.Release("go"), m.Alive(False)]))
            await hear_end(one.reader)

    async def messages_before_join(self, rng: random.Random) -> None:
        """Send messages of a member without having joined."""
        async with self.session(rng) as one:
            await one.send(*self.words(self.fence), m.Conclude(ok=False, reason="over"), m.Query())
            assert isinstance(await one.answer(), m.Report)

    async def chatter(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            await one.send(*[m.Query()] * rng.randrange(1, 60))
            assert isinstance(await one.answer(), m.Report)

    async def deaf(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            one.writer.transport.pause_reading()
            await one.send(*[m.Query()] * 200)

    async def absurd_join(self, rng: random.Random) -> None:
        async with self.session(rng) as one:
            await one.send(rng.choice(self.absurd_joins(rng)))
            await hear_end(one.reader)

    async def impostor(self, rng: random.Random) -> None:
        """Join under a member's name from another process."""
        async with self.session(rng) as one:
            await one.send(self.join(rng, node_id=rng.choice(self.members)))
            assert isinstance(await one.answer(), m.Refused)

    async def absurd_spare(self, rng: random.Random) -> None:
        """Join as a spare, and send messages that only a member of the world may send."""
        async with self.session(rng) as one:
            holding = m.Holding(assignment=self.assignment(), state="failed")
            await one.send(self.join(rng, holding=rng.choice([None, holding])))
            answer = await one.answer()
            assert isinstance(answer, m.Welcome | m.Stop), answer
            await one.send(*self.words(self.fence), *self.words(Fence(9, 9)), m.Leave("bye" * 99))

    def assignment(self, **changes: object) -> Assignment:
        plain = Assignment(
            fence=self.fence, node_rank=1, nodes=2, rank_base=1, world_size=2, role_rank_base=1,
            role_world_size=2, master_addr="127.0.0.1", master_port=1, agent_store=True,
            restarts_used=0, max_restarts=0, reason="forged",
        )  # fmt: skip
        return msgspec.structs.replace(plain, **changes)

    def words(self, fence: Fence) -> list[object]:
        failure = Failure(local_rank=-1, rank=-7, pid=-1, exit_code=-FAR, message="no " * 999)
        return [
            m.Heartbeat(fence=fence, progress=1 << 52),
            m.Failed(fence=fence, failures=(failure,)),
            m.Returned(fence=fence, end=failure),
            m.Succeeded(fence),
            m.Marked(fence=fence, drain=1, calls=(1 << 53) - 1),
            m.Drained(fence=fence, drain=1),
            m.Stopped(fence, PortOffer(0, True)),
        ]

    def absurd_joins(self, rng: random.Random) -> list[object]:
        """Send absurd joins; each is refused by a message or by the end of the session."""

        def holding(**changes: object) -> m.Join:
            kept = m.Holding(assignment=self.assignment(**changes), state="running")
            return self.join(rng, holding=kept)

        timing = msgspec.structs.replace(self.spec.timing, silence_s=float("nan"))
        specs = [{"timing": timing}, {"min_nodes": -1}, {"max_nodes": FAR}, {"job": "../../x"}]
        names = ["../../x\n", "", "\0", "n" * 801, "\u202erorre", "\x1b[2J"]
        odd = self.join(rng)
        nodes = [{"role": "../x"}, {"role": "\x1b]0;x"}, {"local_addr": "\0"}, {"local_addr": "/"}]
        nodes += [{"local_world_size": 0}, {"local_world_size": -5}]
        return [
            *[self.join(rng, spec=msgspec.structs.replace(self.spec, **one)) for one in specs],
            *[self.join(rng, node_id=name) for name in names],
            *[self.join(rng, node=msgspec.structs.replace(odd.node, **one)) for one in nodes],
            *[self.join(rng, seen=fence) for fence in absurd_fences()],
            *[holding(fence=fence) for fence in absurd_fences()],
            *[holding(node_rank=rank) for rank in (-1, -100, -FAR)],
            self.join(rng, restarts_seen=-1),
            self.join(rng, offer=PortOffer(-1, True)),
        ]


def absurd_fences() -> list[Fence]:
    return [Fence(-1, 0), Fence(1, -1), Fence(FAR, 0), Fence((1 << 64) - 1, 0), Fence(1 << 53, 0)]


def bodies(rng: random.Random) -> list[bytes]:
    """Send sealed frames that are no messages."""
    nested = b"\x82\xa4type\xa5leave\xa6reason"
    return [
        b"",
        rng.randbytes(rng.randrange(1, 300)),
        b"\x91" * 100_000,
        nested + b"\x91" * 100_000,
        b"\x83\xa4type\xa5leave\xa1x" + b"\x81\xa1y" * 50_000,
        b"\x81\xa4type\xa6launch",
        b"\x81\xa4type\xa6failed",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa5leave\xa6reason\xdb\xff\xff\xff\xff",
        nested + b"\xa2\xff\xfe",
        msgspec.msgpack.encode({"type": "heartbeat", "fence": [1, 2]}),
        msgspec.msgpack.encode({"type": "heartbeat", "progress": FAR}),
    ]


def own_versions() -> Versions:
    from elastane.options.facts import versions

    assert versions().elastane == __version__
    return versions()
