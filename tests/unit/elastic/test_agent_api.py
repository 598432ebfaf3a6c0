"""Agents as subclasses written for torch use them; torch's own SimpleElasticAgent is the reference.

The hooks are scripted and the handler is a fake over a HashStore: no process is started.
"""

from __future__ import annotations

import importlib
import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from elastane.elastic.agent.server import _telling
from elastane.elastic.agent.server import api as ours
from elastane.elastic.multiprocessing import SignalException
from elastane.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

theirs = importlib.import_module("torch.distributed.elastic.agent.server.api")
WAIT_S = 20.0
APIS = {"elastane": ours, "torch": theirs}
FAILED_RANK = 1


class Handler:
    """A rendezvous of one node that a test scripts: `waiting` are the answers to its agent."""

    use_agent_store = True

    def __init__(self, waiting=(), infos=None):
        self.waiting, self.infos, self.met = list(waiting), infos, 0
        self.hash_store = dist.HashStore()

    def next_rendezvous(self):
        self.met += 1
        info = next(self.infos) if self.infos else self.info()
        if isinstance(info, Exception):
            raise info
        return info

    def info(self, store=None):
        store = store or dist.PrefixStore(str(self.met), self.hash_store)
        where = RendezvousStoreInfo("host", 1000 + self.met)
        return SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=where)

    def num_nodes_waiting(self):
        answer = self.waiting.pop(0) if self.waiting else 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_backend(self):
        return "fake"

    def get_run_id(self):
        return "run"


def spec_of(api, handler=None, **more):
    given = {
        "role": "trainer",
        "local_world_size": 2,
        "rdzv_handler": handler or Handler(),
        "entrypoint": "train",
        "max_restarts": 2,
        "monitor_interval": 0.001,
    }
    return api.WorkerSpec(**{**given, **more})


def agent_of(api, states=(), handler=None, **more):
    """Return an agent whose workers are in these states, one after another."""
    errors = importlib.import_module(
        api.__name__.replace("agent.server.api", "multiprocessing.errors")
    )

    class Scripted(api.SimpleElasticAgent):
        def __init__(self, spec):
            super().__init__(spec, exit_barrier_timeout=5, shutdown_timeout=7)
            self.calls, self.states = [], list(states)

        def _start_workers(self, worker_group):
            where = (worker_group.master_addr, worker_group.master_port)
            self.calls.append(("start", worker_group.state.value, str(worker_group.workers), where))
            return {worker.local_rank: f"id-{worker.local_rank}" for worker in worker_group.workers}

        def _stop_workers(self, worker_group):
            self.calls.append(("stop", worker_group.state.value))

        def _monitor_workers(self, worker_group):
            state = self.states.pop(0)
            self.calls.append(("monitor", [worker.id for worker in worker_group.workers]))
            if isinstance(state, signal.Signals):
                raise errors_signal(state)
            result = api.RunResult(api.WorkerState[state])
            if state == "SUCCEEDED":
                result.return_values = {0: "a", 1: "b"}
            if state == "FAILED":
                failure = errors.ProcessFailure(FAILED_RANK, 99999, 3, "<N/A>")
                result.failures = {FAILED_RANK: failure}
            return result

        def _shutdown(self, death_sig=signal.SIGUSR1, timeout=30):
            self.calls.append(("shutdown", death_sig.name, timeout))

    def errors_signal(sigval):
        name = api.__name__.replace("agent.server.api", "multiprocessing")
        return importlib.import_module(name).SignalException("got it", sigval)

    return Scripted(spec_of(api, handler, **more))


def played(api, states, waiting=()):
    """Run an agent; return it, the calls of its hooks, and how it ended."""
    agent = agent_of(api, states, Handler(waiting))
    try:
        result = agent.run()
        end = (result.return_values, {rank: f.exitcode for rank, f in result.failures.items()})
    except Exception as error:
        end = (type(error).__name__ == "SignalException", getattr(error, "sigval", None))
    return agent, end


STORIES = {
    "all succeed": (["HEALTHY", "SUCCEEDED"], []),
    "a failure is made good": (["FAILED", "HEALTHY", "SUCCEEDED"], []),
    "the budget is used up": (["FAILED", "FAILED", "HEALTHY", "FAILED"], []),
    "unhealthy for good": (["UNHEALTHY"] * 3, []),
    "the membership changes": (["HEALTHY", "HEALTHY", "SUCCEEDED"], [0, 2]),
    "membership and failure": (["HEALTHY", "FAILED", "HEALTHY", "SUCCEEDED"], [1]),
    "a signal": (["HEALTHY", signal.SIGINT], []),
    "the agent lost track": (["UNKNOWN"], []),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_hooks_are_called_as_torch_calls_them(story):
    states, waiting = STORIES[story]
    mine, my_end = played(ours, states, waiting)
    reference, their_end = played(theirs, states, waiting)
    assert mine.calls == reference.calls
    assert my_end == their_end
    assert mine._worker_group.state == reference._worker_group.state
    assert mine._remaining_restarts == reference._remaining_restarts


class Numbers:
    """A metric handler that keeps what it gets, but for durations."""

    def __init__(self):
        self.got = []

    def emit(self, data):
        if not data.name.endswith(".duration.ms"):
            self.got.append((data.group_name, data.name.replace("agent_of.<locals>.", ""), data[3]))


@pytest.mark.parametrize("story", STORIES)
def test_events_and_metrics_are_those_of_torch(story, monkeypatch):
    told = {}
    for name, api, module in (("elastane", ours, _telling), ("torch", theirs, theirs)):
        events, numbers = [], Numbers()
        monkeypatch.setattr(module, "record", lambda event, to, into=events: into.append(event))
        package = f"{name}.elastic" if name == "elastane" else "torch.distributed.elastic"
        metrics = importlib.import_module(f"{package}.metrics.api")
        metrics.configure(numbers)
        try:
            played(api, *STORIES[story])
        finally:
            metrics.configure(metrics.NullMetricHandler())
        told[name] = ([_comparable(event) for event in events], numbers.got)
    assert told["elastane"][0] == told["torch"][0]
    if story != "unhealthy for good":  # which torch counts as a success
        assert told["elastane"][1] == told["torch"][1] != []


def _comparable(event):
    data = {**event.metadata}
    if data["duration_ms"] is not None:
        assert data.pop("duration_ms") >= 0
    if data["state"] == "FAILED":
        raw = json.loads(data["raw_error"])
        data["raw_error"] = raw["message"]  # torch adds what no error file holds
    return event.name, event.source.name, data


def test_success_gives_the_values_and_uses_no_restart():
    agent, _ = played(ours, ["HEALTHY", "SUCCEEDED"])
    assert agent._remaining_restarts == 2
    assert [call[0] for call in agent.calls] == ["start", "monitor", "monitor", "shutdown"]
    result = agent_of(ours, ["SUCCEEDED"]).run()
    assert result.return_values == {0: "a", 1: "b"} and not result.is_failed()


def test_failures_restart_the_workers_until_the_budget_is_used_up():
    agent = agent_of(ours, ["FAILED"] * 3)
    result = agent.run()
    assert result.is_failed() and result.failures[FAILED_RANK].exitcode == 3
    assert [call[0] for call in agent.calls].count("start") == 3
    assert [call[0] for call in agent.calls][-2:] == ["stop", "shutdown"]


def test_a_change_of_membership_restarts_without_using_the_budget():
    handler = Handler(waiting=[1, 0, 1])
    agent = agent_of(ours, ["HEALTHY", "HEALTHY", "HEALTHY", "SUCCEEDED"], handler, max_restarts=0)
    assert not agent.run().is_failed()
    assert (handler.met, agent._remaining_restarts) == (3, 0)


def test_a_group_that_is_unhealthy_for_good_has_failed():
    agent = agent_of(ours, ["UNHEALTHY"], max_restarts=0)
    result = agent.run()
    assert result.is_failed() and not result.failures
    assert agent.get_worker_group().state == ours.WorkerState.FAILED


def test_a_state_that_the_agent_does_not_know_of_is_raised_and_workers_are_shut_down():
    agent = agent_of(ours, ["HEALTHY", "UNKNOWN"])
    with pytest.raises(RuntimeError, match=r"\[trainer\] Worker group in UNKNOWN state"):
        agent.run()
    assert agent.calls[-1] == ("shutdown", "SIGUSR1", 7)


def test_a_signal_shuts_down_with_that_signal_and_is_raised_again():
    agent = agent_of(ours, ["HEALTHY", signal.SIGHUP])
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval == signal.SIGHUP
    assert [call for call in agent.calls if call[0] == "shutdown"] == [("shutdown", "SIGHUP", 7)]


@pytest.mark.parametrize(
    "error",
    [
        RendezvousConnectionError("away"),
        ConnectionRefusedError("away"),
        RendezvousTimeoutError("away"),
        dist.DistNetworkError("away"),
        RuntimeError("a handler of somebody else's"),
    ],
)
def test_a_handler_that_is_away_stops_no_healthy_worker(error, caplog):
    handler = Handler(waiting=[error, error, 0, error])
    agent = agent_of(ours, ["HEALTHY"] * 5 + ["SUCCEEDED"], handler, max_restarts=0)
    assert not agent.run().is_failed()
    assert handler.met == 1 and not handler.waiting
    away = [r for r in caplog.records if "does not answer, the workers go on" in r.getMessage()]
    assert len(away) == 2, "once for each time that it is away"


@pytest.mark.parametrize("kind", ["elastane.elastic", "torch.distributed.elastic"])
@pytest.mark.parametrize("name", ["RendezvousClosedError", "RendezvousStateError"])
def test_what_a_handler_says_for_good_ends_the_agent_at_once(kind, name):
    error = getattr(importlib.import_module(f"{kind}.rendezvous.api"), name)("over")
    agent = agent_of(ours, ["HEALTHY"] * 3, Handler(waiting=[error]))
    with pytest.raises(type(error), match="over"):
        agent.run()
    assert [call[0] for call in agent.calls] == ["start", "monitor", "shutdown"]


def test_a_handler_that_is_away_for_too_long_is_raised(monkeypatch):
    monkeypatch.setattr(ours, "HANDLER_SILENT_S", 0.05)
    handler = Handler(waiting=[RendezvousConnectionError("away")] * 10_000)
    agent = agent_of(ours, ["HEALTHY"] * 10_000, handler)
    with pytest.raises(RendezvousConnectionError, match="away"):
        agent.run()
    assert agent.calls[-1][0] == "shutdown"


@pytest.mark.parametrize("kind", ["elastane.elastic", "torch.distributed.elastic"])
def test_a_node_that_was_not_needed_gets_a_result(kind):
    error = importlib.import_module(f"{kind}.rendezvous.api").RendezvousGracefulExitError("bye")
    agent = agent_of(ours, [], Handler(infos=iter([error])))
    result = agent.run()
    assert (result.state, result.return_values) == (ours.WorkerState.SUCCEEDED, {})
    assert agent.calls == [("shutdown", "SIGUSR1", 7)]


def test_a_spare_that_is_called_off_while_its_workers_run_gets_a_result_too():
    handler = Handler(waiting=[RendezvousGracefulExitError("bye")])
    assert not agent_of(ours, ["HEALTHY"], handler).run().is_failed()


def test_a_rendezvous_that_fails_is_raised_and_nothing_was_started():
    agent = agent_of(ours, [], Handler(infos=iter([RendezvousTimeoutError("too few")])))
    with pytest.raises(RendezvousTimeoutError, match="too few"):
        agent.run()
    assert agent.calls == [("shutdown", "SIGUSR1", 7)]


class Dying:
    """A store whose host is gone."""

    def set(self, key, value):
        raise dist.DistNetworkError("connection reset")


def test_a_world_that_ends_before_its_ranks_are_known_meets_again():
    handler = Handler()
    handler.infos = iter([handler.info(Dying()), handler.info(Dying()), handler.info()])
    agent = agent_of(ours, ["SUCCEEDED"], handler, max_restarts=0)
    assert not agent.run().is_failed()
    assert handler.met == 3


def test_worlds_that_always_end_before_their_ranks_are_known_are_given_up():
    handler = Handler()
    handler.infos = iter([handler.info(Dying()) for _ in range(9)])
    with pytest.raises(dist.DistNetworkError, match="connection reset"):
        agent_of(ours, [], handler).run()
    assert handler.met == 5


class Unfinished(dist.HashStore):
    def wait(self, *args):
        raise dist.DistStoreError("nobody came")


def test_an_exit_barrier_that_fails_does_not_change_that_workers_succeeded():
    handler = Handler()
    handler.infos = iter([handler.info(Unfinished())])
    agent = agent_of(ours, ["SUCCEEDED"], handler)
    assert agent.run().return_values == {0: "a", 1: "b"}
    assert not agent._in_exit_barrier


def test_the_address_of_the_spec_wins_over_that_of_the_rendezvous():
    agent = agent_of(ours, ["SUCCEEDED"], master_addr="given", master_port=7)
    agent.run()
    assert agent.calls[0][-1] == ("given", 7)


WORLDS = {
    "alike": [("trainer", 2)] * 3,
    "sizes differ": [("trainer", 1), ("trainer", 4), ("trainer", 2)],
    "roles differ": [("trainer", 2), ("server", 1), ("trainer", 3), ("reader", 2), ("server", 2)],
    "one": [("trainer", 3)],
}


def ranks(apis, world, store):
    """Have the agents of a world, each of an api, agree; return their workers as texts."""

    def one(index):
        role, size = world[index]
        agent = agent_of(apis[index], role=role, local_world_size=size)
        spec = agent.get_worker_group().spec
        return [str(w) for w in agent._assign_worker_ranks(store, index, len(world), spec)]

    with ThreadPoolExecutor(len(world)) as pool:
        asked = [pool.submit(one, index) for index in range(len(world))]
        return [future.result(WAIT_S) for future in asked]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("identical", ["0", "1"])
def test_ranks_are_those_that_torch_gives(world, identical, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", identical)
    mine = ranks([ours] * len(world), world, dist.HashStore())
    assert mine == ranks([theirs] * len(world), world, dist.HashStore())


@pytest.mark.parametrize("seed", range(5))
def test_agents_of_torch_and_ours_agree_with_each_other(seed):
    dice = random.Random(seed)
    world = [(dice.choice("ab"), dice.randint(1, 4)) for _ in range(dice.randint(2, 6))]
    mixed = [dice.choice([ours, theirs]) for _ in world]
    expected = ranks([theirs] * len(world), world, dist.HashStore())
    assert ranks(mixed, world, dist.HashStore()) == expected


def test_identical_workers_ask_no_store(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    agent = agent_of(ours)
    workers = agent._assign_worker_ranks(None, 2, 3, agent.get_worker_group().spec)
    assert [(w.global_rank, w.world_size, w.role_rank) for w in workers] == [(4, 6, 4), (5, 6, 5)]


def test_all_agents_of_a_world_tell_one_restart_count():
    agents = [agent_of(ours), agent_of(ours), agent_of(ours)]
    for agent, used in zip(agents, (0, 2, 1), strict=True):
        agent._remaining_restarts -= used
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(a._assign_worker_ranks, store, i, 3, a.get_worker_group().spec)
            for i, a in enumerate(agents)
        ]
        assert all(future.result(WAIT_S) for future in asked)
    assert [agent._restart_count for agent in agents] == [2, 2, 2]


def test_a_spec_that_cannot_be_run_is_refused_as_in_torch():
    for api in APIS.values():
        for bad in ({"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}):
            with pytest.raises(AssertionError):
                spec_of(api, **bad)
        with pytest.warns(DeprecationWarning, match="entrypoint"):
            assert spec_of(api, entrypoint=None, fn=spec_of).entrypoint is spec_of


def test_a_refused_spec_says_the_value():
    with pytest.raises(AssertionError, match="local_world_size = 0: expected 1 or more"):
        spec_of(ours, local_world_size=0)


@pytest.mark.parametrize("entry", ["/usr/bin/train", "train", spec_of, Handler.info])
def test_a_spec_names_its_entrypoint_as_torch_does(entry):
    names = [spec_of(api, entrypoint=entry).get_entrypoint_name() for api in APIS.values()]
    assert names[0] == names[1] != ""


@pytest.mark.parametrize("name", ["WorkerSpec", "RunResult"])
def test_the_fields_of_the_values_are_those_of_torch(name):
    def shape(api):
        return [(f.name, f.default, f.default_factory) for f in fields(getattr(api, name))]

    assert shape(ours) == shape(theirs)


def test_workers_groups_and_states_are_told_as_torch_tells_them():
    texts = [(str(api.Worker(1)), repr(api.Worker(1, 2, 3, 4, 5))) for api in APIS.values()]
    assert texts[0] == texts[1]
    assert ours.WorkerState("FAILED") == theirs.WorkerState.FAILED
    for state in ours.WorkerState:
        there = theirs.WorkerState[state.name]
        assert ours.WorkerState.is_running(state) == theirs.WorkerState.is_running(there)
        assert ours.RunResult(state).is_failed() == theirs.RunResult(there).is_failed()
        assert str(state) == str(there)
    mine, reference = (api.WorkerGroup(spec_of(api)) for api in APIS.values())
    values = [
        [
            getattr(group, name)
            for name in sorted(group.__slots__)
            if name not in ("spec", "workers")
        ]
        for group in (mine, reference)
    ]
    assert values[0] == values[1] and str(mine.workers) == str(reference.workers)


def test_a_job_that_was_closed_while_workers_were_stopped_is_raised():
    error = RendezvousClosedError("failed for good on another node")
    handler = Handler()
    handler.infos = iter([handler.info(), error])
    agent = agent_of(ours, ["FAILED"], handler)
    with pytest.raises(RendezvousClosedError, match="for good"):
        agent.run()
    assert [call[0] for call in agent.calls] == ["start", "monitor", "stop", "shutdown"]
