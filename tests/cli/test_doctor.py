"""`elastane doctor`: its output and its exit code."""

import json

import pytest
from ports import free_port

from elastane.cli import main as cli
from elastane.doctor import facts, network_rules
from elastane.doctor.rules import Finding, Level
from elastane.errors import ExitCode


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch):
    found = facts.TorchFacts(version="2.13.0+cpu", import_s=2.0)
    monkeypatch.setattr(facts, "read_torch", lambda environ: found)


def test_a_fault_is_printed_with_its_remedy_and_sets_the_exit_code(capsys):
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "x"], "expected: a whole number"),
        (["--timeout", "x"], "expected: a number"),
        (["--nodes", "0", "--rdzv-endpoint", "a:1"], "from 2 to 64"),
        (["--nodes", "1", "--rdzv-endpoint", "a:1"], "from 2 to 64"),
        (["--nodes", "2"], "without --rdzv-endpoint"),
        (["--nodes", "2", "--rdzv-endpoint", "a:0"], "a free port there"),
        (["--nodes", "2", "--rdzv-endpoint", "a:1", "--timeout", "0"], "at most 3600 seconds"),
    ],
)
def test_several_nodes_that_cannot_meet_are_a_usage_error(capsys, words, says):
    assert cli.main(["doctor", *words]) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_an_incomplete_set_of_nodes_is_a_fault_beside_the_findings_of_the_node(capsys):
    port = free_port()
    words = ["--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--timeout", "0.1"]
    assert cli.main(["doctor", "--json", *words]) == ExitCode.NODE_UNFIT
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["meeting"]["found"].startswith(f"1 of 2 nodes met at 127.0.0.1:{port}")
    assert found["torch"]["level"] == "good" and "rendezvous" not in found


def test_control_characters_of_node_names_are_escaped(capsys, monkeypatch):
    found = [Finding("names", Level.WARNING, "\x1b[2Jb is 10.9.9.9", "because", "next")]
    monkeypatch.setattr(network_rules, "judge_nodes", lambda facts: found)
    words = ["--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--timeout", "0.1"]
    assert cli.main(["doctor", *words]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "b is 10.9.9.9" in said
    assert said.endswith("A job runs between these nodes.\n")
