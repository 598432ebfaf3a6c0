"""The parts of the operator that need no server: queue, election, metrics."""

import asyncio
import base64
import contextlib
import random
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastane.errors import LeaseLostError
from elastane.kubernetes.client import ApiConflictError
from elastane.kubernetes.client.errors import ErrorDetails
from elastane.kubernetes.model import CreateToken
from elastane.kubernetes.operator.bounds import RETRY_MAX_S
from elastane.kubernetes.operator.executor import Executor
from elastane.kubernetes.operator.metrics import Metrics
from elastane.kubernetes.operator.probes import make_metrics
from elastane.kubernetes.operator.queue import KeyedQueue
from elastane.kubernetes.store.lease import LeaseCandidacy, LeasePlace, free_of
from elastane.kubernetes.store.objects import LeaseObject


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_key_is_given_out_once_however_often_it_was_added():
    queue = KeyedQueue()
    queue.add("a")
    queue.add("b")
    queue.add("a")
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a", "b", None]


def test_a_key_that_is_added_while_a_worker_has_it_comes_again_after_that():
    queue = KeyedQueue()
    queue.add("a")
    assert queue.pop() == "a"
    queue.add("a")
    queue.add("a")
    assert queue.pop() is None
    queue.done("a")
    assert queue.pop() == "a"
    queue.done("a")
    assert queue.pop() is None


def test_the_earliest_of_several_times_counts_and_a_look_makes_them_void():
    clock = Clock()
    queue = KeyedQueue(clock=clock)
    queue.add_in("a", 10.0)
    queue.add_in("a", 5.0)
    queue.add_in("a", 20.0)
    clock.now_s = 4.9
    assert queue.pop() is None
    clock.now_s = 5.0
    assert queue.pop() == "a"
    queue.done("a")
    clock.now_s = 100.0
    assert queue.pop() is None


def test_a_key_that_fails_waits_longer_each_time_until_it_succeeds():
    queue = KeyedQueue(clock=Clock(), rng=random.Random(1))
    waits = [queue.retry("a") for _ in range(30)]
    assert waits[0] < waits[2] < waits[5]
    assert max(waits) <= RETRY_MAX_S * 1.25
    assert queue.retry("b", at_least_s=7.0) == 7.0
    queue.succeeded("a")
    assert queue.retry("a") < 1.0


def test_a_waiting_task_is_woken_by_a_due_and_by_an_added_item():
    async def scenario():
        queue = KeyedQueue()
        queue.add_in("later", 0.01)
        async with asyncio.timeout(30):
            assert await queue.take() == "later"
            takers = [asyncio.create_task(queue.take()) for _ in range(3)]
            await asyncio.sleep(0)
            for key in "abc":
                queue.add(key)
            assert sorted(await asyncio.gather(*takers)) == ["a", "b", "c"]

    asyncio.run(scenario())


class QueueMachine(RuleBasedStateMachine):
    """For any sequence of calls no key is with two workers, and no added key is lost."""

    KEYS = st.sampled_from("abc")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.queue = KeyedQueue(clock=self.clock)
        self.working = []
        self.wanted = set()

    @rule(key=KEYS)
    def add(self, key):
        self.queue.add(key)
        self.wanted.add(key)

    @rule(key=KEYS, delay_s=st.sampled_from([0.5, 3.0]))
    def add_in(self, key, delay_s):
        self.queue.add_in(key, delay_s)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def pass_time(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def take(self):
        key = self.queue.pop()
        if key is None:
            assert self.wanted <= set(self.working)
        else:
            assert key not in self.working
            self.working.append(key)
            self.wanted.discard(key)

    @rule()
    def done(self):
        if self.working:
            self.queue.done(self.working.pop(0))

    @invariant()
    def counts(self):
        assert self.queue.working == len(self.working)


TestQueue = QueueMachine.TestCase


class Notebook(LeasePlace):
    """A Lease in memory for one of its candidates, with the candidate's `clock`."""

    def __init__(self, shared, clock):
        api = SimpleNamespace(access=SimpleNamespace(where="here"))
        super().__init__(api, "default", lambda: {"name": "lease"}, clock=clock)
        self.shared = shared

    async def find(self):
        found = self.shared.get("lease")
        return msgspec.convert(found, LeaseObject) if found else None

    async def write(self, version, spec, annotations):
        found = self.shared.get("lease")
        if version != (int(found["metadata"]["resourceVersion"]) if found else 0):
            raise ApiConflictError("changed", slug="kube-conflict")
        self.shared["count"] = self.shared.get("count", 0) + 1
        meta = {"resourceVersion": str(self.shared["count"]), "annotations": annotations}
        self.shared["lease"] = {"metadata": meta, "spec": spec}
        return await self.find()


class Candidate(LeaseCandidacy):
    """A candidacy that keeps the lease that it took last."""

    lease = None

    async def take(self):
        self.lease = await super().take()
        return self.lease

    async def renew(self):
        await self.lease.renew()

    def held(self):
        return self.lease is not None and self.lease.held()


def candidate(shared, clock, name="one"):
    return Candidate(Notebook(shared, clock), "lease", name.encode(), 15.0, margin=1 / 3)


def test_its_holder_may_act_until_before_any_other_may_take_it():
    now_s = 100.0
    shared = {}
    one, two = (candidate(shared, lambda: now_s, name) for name in ("one", "two"))
    assert asyncio.run(one.take()) and not asyncio.run(two.take())
    now_s = 109.9
    assert one.held()
    now_s = 110.0
    assert not one.held() and not asyncio.run(two.take())
    asyncio.run(one.renew())
    assert one.held(), "no other operator led meanwhile"
    now_s = 115.5
    assert not asyncio.run(two.take()), "it was renewed meanwhile"
    now_s = 130.5
    assert asyncio.run(two.take())
    with pytest.raises(LeaseLostError):
        asyncio.run(one.renew())


def test_a_claim_whose_answer_was_lost_is_known_as_ones_own():
    shared = {}
    one = candidate(shared, lambda: 0.0)
    write, lost = one.place.write, [ApiConflictError("no answer", slug="kube-unreachable")]

    async def losing(*what):
        written = await write(*what)
        if what[1].get("holderIdentity") and lost:
            raise lost.pop()
        return written

    one.place.write = losing
    assert not asyncio.run(one.take())
    assert asyncio.run(one.take()) and one.held()


@pytest.mark.parametrize("taken", [False, True])
def test_a_lease_is_given_back_for_a_dead_pod_unless_another_pod_has_taken_it(taken):
    """The other pod may take it between the read and the write."""
    now_s, shared = 0.0, {}
    dead, other = (candidate(shared, lambda: now_s, name) for name in ("dead", "other"))
    dead.place.pod = "dead's"
    place, find = Notebook(shared, lambda: now_s), dead.place.find

    async def found_late():
        seen = await find()
        if taken and not other.held():
            assert await other.take()
        return seen

    place.find = found_late
    assert asyncio.run(dead.take()) and not asyncio.run(other.take())
    now_s = 16.0
    assert asyncio.run(free_of(place, {"dead's"})) == ("" if taken else "dead's")
    assert other.held() == taken
    assert asyncio.run(find()).holder.partition("_")[0] == ("other" if taken else "")


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.floats(0.1, 12.0)), max_size=60))
def test_no_two_candidates_hold_the_lease_at_any_time(steps):
    """Three candidates with clocks of equal rate; writes are conditional on the version."""
    now_s, shared = 0.0, {}
    all_of_them = [
        candidate(shared, lambda offset_s=offset_s: now_s + offset_s, str(offset_s))
        for offset_s in (0.0, 1000.0, -500.0)
    ]

    async def play():
        nonlocal now_s
        for number, wait_s in steps:
            now_s += wait_s
            one = all_of_them[number]
            with contextlib.suppress(LeaseLostError):
                await (one.renew() if one.held() else one.take())
            assert sum(each.held() for each in all_of_them) <= 1

    asyncio.run(play())


def test_metrics_are_as_prometheus_reads_them():
    metrics = Metrics()
    metrics.counter("a_total", "How many.")
    metrics.histogram("b_seconds", "How long.")
    metrics.gauge("c", "How it is.", lambda: {"": 2.0, '{x="y"}': 0.5})
    metrics.count("a_total", by=1_234_567, kind='x"\n\\')
    metrics.observe("b_seconds", 0.02)
    metrics.observe("b_seconds", 100.0)
    lines = metrics.text().splitlines()
    assert r'a_total{kind="x\"\n\\"} 1234567' in lines
    assert "# TYPE b_seconds histogram" in lines
    assert 'b_seconds_bucket{le="0.025"} 1' in lines
    assert 'b_seconds_bucket{le="60.0"} 1' in lines
    assert 'b_seconds_bucket{le="+Inf"} 2' in lines
    assert "b_seconds_count 2" in lines
    assert "c 2" in lines and 'c{x="y"} 0.5' in lines


def test_all_counted_metrics_are_declared():
    with pytest.raises(KeyError):
        make_metrics().count("elastane_no_such_total")


# ---- the token of a job


class Secrets:
    """The part of the API that creates Secrets; `taken` has existing names."""

    def __init__(self, taken=()):
        self.taken, self.made = set(taken), []

    async def create(self, resource, namespace, manifest, kind):
        name = manifest["metadata"]["name"]
        if name in self.taken:
            raise ApiConflictError("exists", answer=ErrorDetails(reason="AlreadyExists"))
        self.taken.add(name)
        self.made.append(manifest)


def create_token(api, name="t"):
    job = SimpleNamespace(metadata=SimpleNamespace(namespace="ns"))
    action = CreateToken(name=name, manifest={"metadata": {"name": name}})
    executor = Executor(api, None, make_metrics(), lambda: True)
    return asyncio.run(executor._create_token("ns/j", job, action))


def test_each_job_gets_a_random_token():
    api = Secrets()
    assert not create_token(api, "a") and not create_token(api, "b")
    first, second = (base64.b64decode(one["data"]["value"]) for one in api.made)
    assert first != second and min(len(first), len(second)) >= 32


def test_a_token_that_exists_already_stays_and_is_not_refused():
    api = Secrets(taken={"t"})
    assert not create_token(api)
    assert not api.made
