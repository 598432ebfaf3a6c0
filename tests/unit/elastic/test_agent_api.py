"""Agents with subclasses written for torch, compared with torch's own agent."""

from __future__ import annotations

import importlib
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from scripted_agent import FAILED_RANK, Handler, agent_of, theirs

from elastane.elastic.agent.server import api as ours
from elastane.elastic.multiprocessing import SignalException
from elastane.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)


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
    """A metric handler that keeps its values, except durations."""

    def __init__(self):
        self.got = []

    def emit(self, data):
        if not data.name.endswith(".duration.ms"):
            self.got.append((data.group_name, data.name.replace("agent_of.<locals>.", ""), data[3]))


@pytest.mark.parametrize("story", STORIES)
def test_events_and_metrics_are_those_of_torch(story, monkeypatch):
    told = {}
    for name, api, module in (("elastane", ours, ours), ("torch", theirs, theirs)):
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
def test_an_unreachable_handler_stops_no_healthy_worker(error, caplog):
    handler = Handler(waiting=[error, error, 0, error])
    agent = agent_of(ours, ["HEALTHY"] * 5 + ["SUCCEEDED"], handler, max_restarts=0)
    assert not agent.run().is_failed()
    assert handler.met == 1 and not handler.waiting
    away = [r for r in caplog.records if "does not answer; workers keep running" in r.getMessage()]
    assert len(away) == 2, "once for each time that it is away"


@pytest.mark.parametrize("kind", ["elastane.elastic", "torch.distributed.elastic"])
@pytest.mark.parametrize("name", ["RendezvousClosedError", "RendezvousStateError"])
def test_a_final_answer_of_a_handler_ends_the_agent_at_once(kind, name):
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
    """A store whose host has ended."""

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


def test_an_agent_waits_for_the_workers_of_an_agent_of_torchs(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    handler, store = Handler(), dist.HashStore()
    info = handler.info(store)
    info.world_size = 2
    handler.infos = iter([info])
    agent = agent_of(ours, ["SUCCEEDED"], handler)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.run)
        # HashStore.wait sleeps on where add() makes the key (torch 2.13).
        end_s = time.monotonic() + 60
        while not store.check(["torchelastic/agent/terminal_state/num_members"]):
            assert time.monotonic() < end_s, "the agent comes to its exit barrier"
            time.sleep(0.01)
        assert agent._in_exit_barrier and not running.done()
        torchs = importlib.import_module("torch.distributed.elastic.utils.store")
        torchs.barrier(store, 2, theirs._TERMINAL_STATE_SYNC_ID, barrier_timeout=60)
        assert running.result(20).return_values == {0: "a", 1: "b"}


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


def test_a_job_that_was_closed_while_workers_were_stopped_is_raised():
    error = RendezvousClosedError("failed for good on another node")
    handler = Handler()
    handler.infos = iter([handler.info(), error])
    agent = agent_of(ours, ["FAILED"], handler)
    with pytest.raises(RendezvousClosedError, match="for good"):
        agent.run()
    assert [call[0] for call in agent.calls] == ["start", "monitor", "stop", "shutdown"]
