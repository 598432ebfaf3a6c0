"""A worker's control socket closes: usually its process has ended, which is reported next."""

from __future__ import annotations

import asyncio

import pytest

from elastane.agent import control_sockets as of_lines
from elastane.agent.control_sockets import ControlSockets, _ignore, place_message
from elastane.process.control_socket import (
    CanRecoverInPlace,
    CheckpointWritten,
    Wait,
    WorkerFinished,
    encode,
)
from elastane.protocol.model import Assignment, Fence, Joining, Sharding


class Heard:
    """Records which workers are able, at each change."""

    def __init__(self) -> None:
        self.lines = ControlSockets(self._changed, lambda fence, reason: None)
        self.told: list[set[int]] = []
        self._news = asyncio.Event()

    def _changed(self) -> None:
        self.told.append({*self.lines.recoverable_or_unreported})
        self._news.set()

    async def wait(self, count: int) -> list[set[int]]:
        async with asyncio.timeout(30):
            while len(self.told) < count:
                self._news.clear()
                await self._news.wait()
        return self.told

    async def wait_closed(self, local_rank: int) -> None:
        async with asyncio.timeout(30):
            while local_rank in self.lines._ends:  # noqa: ASYNC110 - nothing is told of it
                await asyncio.sleep(0)


def test_a_closed_socket_counts_as_recoverable_until_the_workers_end_is_reported():
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as worker:
            worker.send(encode(CanRecoverInPlace()))
            assert await heard.wait(1) == [{0}]
        await heard.wait_closed(0)
        assert heard.told == [{0}] and not heard.lines.recoverable
        heard.lines.end_reported(0)
        heard.lines.end_reported(0)
        assert heard.told == [{0}, set()]

    asyncio.run(scenario())


def test_a_living_worker_with_a_closed_socket_has_left_its_loop_after_a_while(monkeypatch):
    monkeypatch.setattr(of_lines, "_END_S", 0.01)

    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as worker:
            worker.send(encode(CanRecoverInPlace()))
            await heard.wait(1)
        assert await heard.wait(2) == [{0}, set()]

    asyncio.run(scenario())


def test_the_time_of_a_lost_worker_does_not_end_that_of_its_lost_replacement(monkeypatch):
    """The replacement died one second after the first worker, and counted as one that finished."""

    async def scenario():
        heard, begun = Heard(), []
        loop = asyncio.get_running_loop()
        later = loop.call_later
        monkeypatch.setattr(
            loop, "call_later", lambda *args: begun.append(later(60, *args[1:])) or begun[-1]
        )
        for turn in range(2):
            with heard.lines.open(0) as worker:
                worker.send(encode(CanRecoverInPlace()))
                await heard.wait(2 * turn + 1)
            await heard.wait_closed(0)
            if not turn:
                heard.lines.end_reported(0)
        assert [handle.cancelled() for handle in begun] == [True, False]
        assert heard.told == [{0}, set(), {0}]
        begun[-1].cancel()

    asyncio.run(scenario())


def test_a_node_has_the_least_joining_of_the_latest_reports_of_its_workers():
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as one, heard.lines.open(1) as other:
            one.send(encode(CanRecoverInPlace(joining=Joining.NEVER)))
            await heard.wait(1)
            assert heard.lines.joining is Joining.NEVER
            other.send(encode(CanRecoverInPlace()))
            await heard.wait(2)
            assert heard.lines.joining is Joining.NEVER
            one.send(encode(CanRecoverInPlace(joining=Joining.PLANNED)))
            await heard.wait(3)
            assert heard.lines.joining is Joining.PLANNED
        await heard.wait_closed(0)
        await heard.wait_closed(1)
        assert heard.lines.joining is not Joining.NEVER


def test_a_node_whose_workers_are_all_gone_keeps_the_last_joining():
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as one:
            one.send(encode(CanRecoverInPlace(joining=Joining.NEVER)))
            await heard.wait(1)
        await heard.wait_closed(0)
        assert heard.lines.joining is Joining.NEVER

    asyncio.run(scenario())


def test_a_checkpoint_that_a_worker_wrote_is_reported():
    async def scenario():
        wrote = asyncio.Queue()
        lines = ControlSockets(lambda: None, _ignore, wrote=wrote.put_nowait)
        with lines.open(0) as worker:
            for message in (
                CheckpointWritten("run/last.pt"),
                CheckpointWritten("run/2.pt", resumed=True),
            ):
                worker.send(encode(message))
                assert await asyncio.wait_for(wrote.get(), 30) == message

    asyncio.run(scenario())


@pytest.mark.parametrize("says", [[CanRecoverInPlace(), WorkerFinished()], []])
def test_a_worker_that_could_not_recover_is_not_awaited_after_it_closed(says):
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as worker:
            for word in says:
                worker.send(encode(word))
            await heard.wait(len(says))
        await heard.wait_closed(0)
        assert not heard.lines.recoverable_or_unreported
        with heard.lines.open(0):
            assert heard.told == [{0}, set()][: len(says)]

    asyncio.run(scenario())


def test_sole_shards_are_known_until_a_worker_reports_otherwise_or_closes():
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as one, heard.lines.open(1) as other:
            one.send(encode(CanRecoverInPlace(Sharding(sole=True))))
            await heard.wait(1)
            other.send(encode(CanRecoverInPlace(Sharding(sole=True))))
            await heard.wait(2)
            other.send(encode(CanRecoverInPlace(Sharding())))
            await heard.wait(3)
            assert heard.lines.sharding.sole
        await heard.wait_closed(0)
        assert heard.lines.sharding is None

    asyncio.run(scenario())


def test_a_worker_without_a_place_gets_the_possible_size_of_its_world():
    standby = Assignment(
        fence=Fence(3, 0), node_rank=1, nodes=2, rank_base=6, world_size=4, role_rank_base=6,
        role_world_size=4, master_addr="", master_port=0, agent_store=False, restarts_used=0,
        max_restarts=3, reason="", waiting=True,
    )  # fmt: skip
    assert place_message(standby, 1) == Wait(local_rank=1, world_size=4)


def test_a_worker_without_a_place_cannot_join_before_its_script_has_boundaries():
    async def scenario():
        heard = Heard()
        with heard.lines.open(0) as member, heard.lines.open(1) as standby:
            member.send(encode(CanRecoverInPlace(joining=Joining.PLANNED)))
            await heard.wait(1)
            heard.lines.send(1, Wait(local_rank=1, world_size=2))
            standby.send(encode(CanRecoverInPlace(joining=Joining.NEVER)))
            assert await heard.wait(2) == [{0}, {0}]
            assert heard.lines.joining is Joining.PLANNED
            standby.send(encode(CanRecoverInPlace(joining=Joining.PLANNED)))
            assert (await heard.wait(3))[-1] == {0, 1}

    asyncio.run(scenario())
