"""The tables of stages and states at the top of the agent's rules are true."""

import pytest

from elastane.agent import rules
from elastane.agent.rules import AgentCore, Group, LocalWorkers
from simulation import run_seed


def rows(number):
    """Return the pairs (state, next state) of the table of this number in the docstring."""
    lines = (rules.__doc__ or "").splitlines()
    ruler = [n for n, line in enumerate(lines) if line.startswith("    ---")][number]
    starts = [n for n, char in enumerate(lines[ruler]) if lines[ruler][n - 1 : n + 1] == " -"]
    pairs, state = set(), ""
    for line in lines[ruler + 1 :]:
        if not line:
            return pairs
        state = line[starts[0] : starts[1]].strip() or state
        pairs.add((state, line[starts[2] :].strip()))
    return pairs


@pytest.fixture
def changes(monkeypatch):
    """Return the changes of the agents' stages and of their groups' states, as they happen."""
    stages, states = set(), set()
    enter, become, hold = AgentCore._enter, Group.become, LocalWorkers._hold

    def entered(self, stage):
        stages.add(tuple(each.name.lower().replace("_", " ") for each in (self._stage, stage)))
        enter(self, stage)

    def became(self, phase):
        states.add((self.phase, phase))
        become(self, phase)

    def held(self, group):
        states.add(tuple(each.phase if each else "none" for each in (self.group, group)))
        hold(self, group)

    monkeypatch.setattr(AgentCore, "_enter", entered)
    monkeypatch.setattr(Group, "become", became)
    monkeypatch.setattr(LocalWorkers, "_hold", held)
    return stages, states


def test_histories_make_every_change_in_the_tables_and_no_other(changes):
    stages, states = changes
    for kind in ({}, {"in_place": True}, {"in_place": True, "span": 2}):
        for seed in range(20):
            run_seed(seed, store_backed=bool(seed % 2), **kind)
    states -= {(state, state) for state, _ in states}
    assert stages == rows(0)
    # Of a node whose workers succeeded, these histories start no other worker: tests/unit/agent.
    assert states == rows(1) - {("succeeded", "running")}
