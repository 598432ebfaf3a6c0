"""`elastane doctor`: what it prints, and its exit code."""

import json

import pytest

from elastane.cli import main as cli
from elastane.doctor import facts
from elastane.errors import ExitCode


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch):
    found = facts.TorchFacts(version="2.13.0+cpu", import_s=2.0)
    monkeypatch.setattr(facts, "read_torch", lambda environ: found)


def test_a_fault_is_printed_with_its_remedy_and_is_the_exit_code(capsys):
    assert cli.main(["doctor", "--dir", "/proc/none"]) == ExitCode.NODE_UNFIT
    lines = capsys.readouterr().out.splitlines()
    [at] = [i for i, line in enumerate(lines) if line.startswith("fault")]
    assert lines[at].split()[1:3] == ["folder", "/proc/none:"]
    assert lines[at + 1].split(maxsplit=1)[0] == "why:"
    assert lines[at + 2].strip() == "next: ls -ld /proc/none; id"
    assert lines[-1].endswith("A job would not run here.")


def test_json_has_the_same_findings(capsys, tmp_path):
    assert cli.main(["doctor", "--json", "--log-dir", str(tmp_path)]) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["torch"]["level"] == "good"
    assert found["logs"]["found"].startswith(str(tmp_path))
    assert set(found["logs"]) == {"subject", "level", "found", "why", "next_step"}


def test_a_wrong_endpoint_is_a_usage_error(capsys):
    assert cli.main(["doctor", "--rdzv-endpoint", "a:b:c"]) == ExitCode.USAGE
    assert "a:b:c" in capsys.readouterr().err
