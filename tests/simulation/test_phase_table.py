"""The table of phases at the top of the coordinator's machine is true."""

import re

import pytest

from elastane.coordinator.rules import MembershipPhase, machine
from elastane.coordinator.rules.state import State
from simulation import run_seed


def changes_in_table():
    """Return the pairs (phase, next phase) that the table of the docstring names."""
    _, _, table = (machine.__doc__ or "").partition("----------  -")
    pairs, phase = set(), ""
    for line in table.splitlines()[1:]:
        if not line.startswith("    "):
            if pairs and line.strip():
                break
            continue
        phase = line[4:14].strip() or phase
        pairs |= {(phase, after) for after in re.findall(r"[A-Z]{5,}", line[71:])}
    return pairs


@pytest.mark.parametrize("kind", [{}, {"in_place": True}, {"in_place": True, "span": 2}])
def test_every_change_of_phase_in_the_histories_is_in_the_table(monkeypatch, kind):
    changes = set()
    enter = State.enter

    def records(state, phase, reason):
        changes.add((state.phase.name, phase.name))
        enter(state, phase, reason)

    monkeypatch.setattr(State, "enter", records)
    for seed in range(20):
        run_seed(seed, store_backed=bool(seed % 2), **kind)
    table = changes_in_table()
    assert {phase for phase, _ in table} == {
        p.name for p in MembershipPhase if p.name != "CLOSED"
    } | {
        "(start)",
        "(any)",
    }
    stayed = {(phase.name, phase.name) for phase in MembershipPhase}
    closing = {(phase.name, "CLOSING") for phase in MembershipPhase}
    assert len(changes) > 5 and changes <= table | stayed | closing
