"""How `elastane chaos` ends where the job's log does not say whether it trains again."""

from types import SimpleNamespace

import pytest

from elastane.cli import chaos
from elastane.observe.account import NOT_HERE
from elastane.protocol.log_events import EventKind


@pytest.mark.parametrize(
    ("worlds", "words"),
    [
        ([], f"whether the job trains again is not known: {NOT_HERE}"),
        (["a world"], "the job does not train again within 0 s of the last fault"),
    ],
)
def test_a_log_without_worlds_does_not_say_whether_the_job_trains(
    worlds, words, monkeypatch, capsys
):
    monkeypatch.setattr(chaos, "_RECOVERY_S", 0.0)
    job = SimpleNamespace(events=lambda kind: worlds if kind == EventKind.ROUND_SETTLED else [])
    assert not chaos._await_training(job)
    assert capsys.readouterr().out.strip() == words
