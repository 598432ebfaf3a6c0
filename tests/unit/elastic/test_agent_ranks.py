"""The ranks of workers and the values of agents, compared with torch's."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch.distributed as dist
from scripted_agent import Handler, agent_of, spec_of, theirs

from elastane.elastic.agent.server import api as ours

WAIT_S = 20.0
APIS = {"elastane": ours, "torch": theirs}
WORLDS = {
    "alike": [("trainer", 2)] * 3,
    "sizes differ": [("trainer", 1), ("trainer", 4), ("trainer", 2)],
    "roles differ": [("trainer", 2), ("server", 1), ("trainer", 3), ("reader", 2), ("server", 2)],
    "one": [("trainer", 3)],
}


def ranks(apis, world, store):
    """Let the agents of a world, torch's or ours, agree on ranks; return their workers as texts."""

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


def test_all_agents_of_a_world_have_one_restart_count():
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
        found = [(f.name, f.default, f.default_factory) for f in fields(getattr(api, name))]
        # Here it may be left out, which means one machine.
        return [entry[:1] if entry[0] == "rdzv_handler" else entry for entry in found]

    assert shape(ours) == shape(theirs)


def test_worker_groups_and_states_have_torchs_text():
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
