"""The election over a store in memory: holders, authority, records, and late agents.

Leases run out in the time of the event loop, which passes while no task is ready: a busy host ends
none of them.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from memory_store import MemoryBackend, MemoryStore, StoreFaults

from elastane.coordinator.election import Election
from elastane.errors import (
    ConfigurationError,
    JobClosedError,
    LeaseLostError,
)
from elastane.process.endpoint import Endpoint
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.limits import ENDED_LEASE_S, Timing
from elastane.protocol.model import JobRecord, JobSpec, Outcome
from elastane.stores.file import FileStore
from elastane.stores.jobs import Filed, JobKeys

DEADLINE_S = 90.0
PATIENCE_S = 0.6
TIMING = Timing(lease_ttl_s=0.3, lease_renew_s=0.05)
SPEC = JobSpec(job="j", min_nodes=1, max_nodes=2, max_restarts=3, timing=TIMING)
HERE = Endpoint("node0", 29400)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time moves to the next timer as soon as no task is ready."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now_s


class _Skipping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self._loop.now_s += timeout
        return ready


def asynchronous(
    test: Callable[..., Awaitable[None]], *, loop_factory: Callable[[], Any] = VirtualLoop
) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(bounded())

    return run


in_real_time = functools.partial(asynchronous, loop_factory=asyncio.SelectorEventLoop)


def backend_in_loop_time() -> MemoryBackend:
    return MemoryBackend(clock=asyncio.get_running_loop().time)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Node:
    """A candidate with its own faults, which records its events."""

    def __init__(self, backend: MemoryBackend, name: str, timing: Timing = TIMING) -> None:
        self.faults = StoreFaults()
        self.told: asyncio.Queue[AuthorityChanged] = asyncio.Queue()
        self.keys = JobKeys(MemoryStore(backend, self.faults), "j")
        self.election = Election(
            self.keys,
            name,
            msgspec.structs.replace(SPEC, timing=timing),
            on_authority=self.told.put_nowait,
            timeout_s=PATIENCE_S,
        )


def record(restarts_used: int = 0, outcome: Outcome | None = None) -> JobRecord:
    return JobRecord(spec=SPEC, restarts_used=restarts_used, outcome=outcome)


@asynchronous
async def test_one_is_elected_and_the_next_finds_its_record() -> None:
    backend = backend_in_loop_time()
    a, b = Node(backend, "a"), Node(backend, "b")
    assert await a.election.campaign() is None
    assert a.told.get_nowait().held
    waiting = asyncio.ensure_future(b.election.campaign())
    await a.election.save(record(1))
    assert a.election.held()
    assert not b.election.held()
    assert not waiting.done()
    await a.election.resign()
    assert await waiting == record(1)
    assert b.election.term > 1


@asynchronous
async def test_the_lease_of_a_coordinator_that_refuses_connections_need_not_run_out() -> None:
    backend = MemoryBackend(clock=lambda: 0.0)  # no lease ever runs out
    a, b = Node(backend, "a"), Node(backend, "b")
    await a.election.campaign()
    await a.election.save(record(1))
    await a.election.publish(HERE)
    campaign = asyncio.ensure_future(b.election.campaign())
    b.election.note_refusal(Endpoint("node0", 29401))  # another coordinator's address
    await until(lambda: not b.election._must_end.is_set())
    assert not campaign.done() and a.election.held()
    b.election.note_refusal(HERE)
    assert await campaign == record(1)
    assert b.election.held() and b.election.term > 1
    with pytest.raises(LeaseLostError):  # if it was alive after all
        await a.election.save(record(9))
    with pytest.raises(LeaseLostError):
        await a.election.keep()
    assert await b.election.load() == record(1)


@asynchronous
async def test_a_lease_that_is_longer_than_others_wait_for_its_holder_runs_out() -> None:
    timing = msgspec.structs.replace(TIMING, lease_ttl_s=ENDED_LEASE_S + 0.1)
    backend = backend_in_loop_time()
    a, b = Node(backend, "a", timing), Node(backend, "b", timing)
    await a.election.campaign()
    await a.election.publish(HERE)
    b.election.note_refusal(HERE)
    assert not await b.election._try_once()
    assert a.election.held()


@asynchronous
async def test_a_deposed_holder_learns_it_and_cannot_write() -> None:
    backend = backend_in_loop_time()
    a, b = Node(backend, "a"), Node(backend, "b")
    await a.election.campaign()
    await a.election.save(record(1))
    await b.election.campaign()  # a does not renew
    with pytest.raises(LeaseLostError):
        await a.election.keep()
    assert [a.told.get_nowait().held for _ in range(a.told.qsize())] == [True, False]
    for write in (a.election.save(record(9)), a.election.publish(HERE)):
        with pytest.raises(LeaseLostError):
            await write
    assert await b.election.load() == record(1)


@asynchronous
async def test_a_write_in_flight_loses_to_the_successor_that_has_read_the_record() -> None:
    """The holder was suspended right after it had confirmed its lease."""
    backend = backend_in_loop_time()
    a, b = Node(backend, "a"), Node(backend, "b")
    await a.election.campaign()
    await a.election.save(record(1))
    assert await b.election.campaign() == record(1)
    with pytest.raises(LeaseLostError, match="deposed"):
        await a.election._file(record(9))
    assert await b.election.load() == record(1)


@asynchronous
async def test_lost_and_regained_authority_are_reported() -> None:
    node = Node(backend_in_loop_time(), "a")
    await node.election.campaign()
    await node.election.save(record(1))
    keeping = asyncio.ensure_future(node.election.keep())
    assert (await node.told.get()).held
    node.faults.unreachable = True
    away = await node.told.get()
    assert (away.held, node.election.held()) == (False, False)
    assert "out of reach" in away.reason
    with pytest.raises(LeaseLostError, match="cannot decide"):
        await node.election.save(record(2))
    node.faults.unreachable = False
    assert (await node.told.get()).held
    await node.election.save(record(3))
    assert await node.keys.load() == record(3)
    keeping.cancel()


@asynchronous
async def test_a_silent_store_is_reported_the_moment_the_lease_ends() -> None:
    backend = backend_in_loop_time()
    node = Node(backend, "a")
    await node.election.campaign()
    assert node.told.get_nowait().held
    hanging = asyncio.Event()

    async def hang() -> None:
        await hanging.wait()

    node.keys.store.reach = hang
    keeping = asyncio.ensure_future(node.election.keep())
    away = await node.told.get()
    assert not away.held
    assert "silent" in away.reason
    assert backend.clock() < backend.leases["j/leadership"].until, "told after others could take it"
    hanging.set()
    assert (await node.told.get()).held
    keeping.cancel()


@asynchronous
async def test_a_save_whose_reply_was_lost_is_repeated() -> None:
    node = Node(backend_in_loop_time(), "a")
    await node.election.campaign()
    await node.election.save(record(1))
    node.faults.replies_to_lose = 1
    await node.election.save(record(2))
    assert await node.keys.load() == record(2)
    await node.election.save(record(3))
    assert await node.keys.load() == record(3)


@asynchronous
async def test_a_save_retries_while_the_store_is_away() -> None:
    node = Node(backend_in_loop_time(), "a")
    await node.election.campaign()
    node.faults.unreachable = True
    saving = asyncio.ensure_future(node.election.save(record(1)))
    publishing = asyncio.ensure_future(node.election.publish(HERE))
    await until(lambda: not node.election.held())
    assert not saving.done() and not publishing.done()
    node.faults.unreachable = False
    await asyncio.gather(saving, publishing)
    assert await node.keys.load() == record(1)
    assert (await node.keys.leader()).endpoint == HERE


@in_real_time
async def test_a_late_renewal_with_a_new_term_keeps_what_was_written_last(tmp_path) -> None:
    """A late renewal of the file store raises the term; a lost reply must restore no old record."""
    store = FileStore(tmp_path)
    told: asyncio.Queue[AuthorityChanged] = asyncio.Queue()
    election = Election(JobKeys(store, "j"), "a", SPEC, on_authority=told.put_nowait)
    await election.campaign()
    await election.save(record(1))
    filed, version = await election.keys.filed()
    assert filed is not None
    newer = JobKeys(store, "j")
    content = (await store.get(newer.record)).value.replace(
        b'"restarts_used":1', b'"restarts_used":2'
    )
    await store.compare_and_set(newer.record, content, version)  # ours, its reply lost
    term = election.term
    await until(lambda: not election.held())
    keeping = asyncio.ensure_future(election.keep())
    assert [(await told.get()).held for _ in range(3)] == [True, False, True]
    keeping.cancel()
    assert election.term > term
    assert await election.load() == record(2)


@in_real_time
async def test_tasks_that_all_find_the_lease_late_do_not_depose_one_another(tmp_path) -> None:
    keys = JobKeys(FileStore(tmp_path), "j")
    election = Election(keys, "a", SPEC, on_authority=lambda event: None)
    await election.campaign()
    await until(lambda: not election.held())
    await asyncio.gather(*(election.save(record(number)) for number in range(5)))
    await election.save(record(5))  # which raises if one of them deposed the others
    assert await election.load() == record(5)


@asynchronous
async def test_a_record_of_another_term_deposes_whatever_the_lease_says() -> None:
    backend = backend_in_loop_time()
    node = Node(backend, "a")
    await node.election.campaign()
    _, version = await node.keys.filed()
    between = msgspec.json.encode(Filed(term=2, record=record(7)))
    await node.keys.store.compare_and_set(node.keys.record, between, version)
    node.election._lease._term = backend.leases["j/leadership"].term = 3
    with pytest.raises(LeaseLostError, match="term 2"):
        await node.election.save(record(9))
    assert await node.keys.load() == record(7)


@asynchronous
async def test_of_many_candidates_one_is_elected() -> None:
    backend = backend_in_loop_time()
    nodes = [Node(backend, str(number)) for number in range(8)]
    campaigns = [asyncio.ensure_future(node.election.campaign()) for node in nodes]
    await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED)
    assert [node.election.held() for node in nodes].count(True) == 1
    for campaign in campaigns:
        campaign.cancel()


@asynchronous
async def test_a_campaign_retries_while_the_store_is_away(caplog) -> None:
    node = Node(backend_in_loop_time(), "a")
    node.faults.unreachable = True
    campaign = asyncio.ensure_future(node.election.campaign())
    done, _ = await asyncio.wait({campaign}, timeout=0.3)
    assert not done
    assert caplog.text.count("out of reach") == 1
    node.faults.unreachable = False
    await campaign
    assert node.election.held()


@asynchronous
async def test_agents_find_the_coordinator_of_the_latest_term() -> None:
    backend = backend_in_loop_time()
    a, b, agent = Node(backend, "a"), Node(backend, "b"), JobKeys(MemoryStore(backend), "j")
    assert await agent.locate() is None
    await a.election.campaign()
    await a.election.publish(HERE)
    leader = await agent.leader()
    assert (leader.endpoint, leader.node_id, leader.term) == (HERE, "a", a.election.term)
    await a.election.resign()
    await b.election.campaign()
    await b.election.publish(Endpoint("node1", 1))
    assert (await agent.leader()).node_id == "b"
    assert await agent.locate() == Endpoint("node1", 1)


@pytest.mark.parametrize(("nodes", "look_s"), [(2, 0.1), (8, 0.1), (80, 1.0), (10_000, 1.0)])
def test_many_candidates_together_poll_no_more_often_than_a_few(nodes: int, look_s: float) -> None:
    spec = JobSpec(job="j", min_nodes=1, max_nodes=nodes, max_restarts=3)
    keys = JobKeys(MemoryStore(MemoryBackend()), "j")
    assert Election(keys, "a", spec, on_authority=print)._look_s == pytest.approx(look_s)


@asynchronous
async def test_all_agents_get_one_secret() -> None:
    backend = backend_in_loop_time()
    keys = [JobKeys(MemoryStore(backend), "j") for _ in range(5)]
    tokens = await asyncio.gather(*(one.token() for one in keys))
    assert len(set(tokens)) == 1
    assert len(bytes.fromhex(tokens[0])) == 32
    assert await JobKeys(MemoryStore(backend), "k").token() not in tokens


@asynchronous
async def test_a_finished_job_leaves_its_record_and_tells_late_agents() -> None:
    backend = backend_in_loop_time()
    a, b, late = Node(backend, "a"), Node(backend, "b"), JobKeys(MemoryStore(backend), "j")
    assert await a.keys.token() == await late.token()
    await a.election.campaign()
    await a.election.publish(HERE)
    waiting = asyncio.ensure_future(b.election.campaign())
    await asyncio.sleep(0)
    outcome = Outcome(ok=True, reason="all workers succeeded")
    await a.election.save(record(outcome=outcome))
    await a.keys.tidy()
    await a.election.resign()
    assert list(backend.entries) == ["j/record"]
    calls = [waiting, late.check_open(), late.token(), late.locate()]
    for call in calls:
        with pytest.raises(JobClosedError, match="closed: job j has ended: all workers"):
            await call
    assert await late.load() == record(outcome=outcome)
    assert await late.store.holder(late.leadership) is None
    await late.purge()
    assert backend.entries == {}
    await late.check_open()


@asynchronous
async def test_a_record_of_another_version_is_refused_with_the_next_step() -> None:
    node = Node(backend_in_loop_time(), "a")
    await node.keys.store.compare_and_set(node.keys.record, b'{"term": 1, "record": 5}', 0)
    with pytest.raises(ConfigurationError, match="store-record"):
        await node.election.campaign()
    assert node.election.term == 0
