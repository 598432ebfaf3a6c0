"""How `elastane chaos` ends where the job's log does not say whether it trains again."""

from types import SimpleNamespace

import pytest

from elastane.cli import chaos
from elastane.cli.main import main
from elastane.observe.account import NOT_HERE
from elastane.protocol.log_events import EventKind
from elastane.testing import chaos as running


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


def test_faults_that_were_left_out_are_counted_with_the_reason(monkeypatch, capsys):
    """The job has ended, so that no fault of the plan is injected."""
    job = SimpleNamespace(
        job="digits",
        nodes=[],
        events=lambda kind=None: [SimpleNamespace(data={"ok": True})],
        close=lambda: None,
    )
    monkeypatch.setattr(running, "RunningJob", lambda *_: job)
    monkeypatch.setattr(chaos, "_summary", lambda _: [])
    assert (
        main(["chaos", "digits", "--keep", "2", "--duration", "30", "--every", "10", "--seed", "7"])
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    count = said[0].split()[2]
    assert said[1] == (
        f"{count} faults left out: no target was there, or fewer than 2 nodes would have been"
        " left here"
    )
