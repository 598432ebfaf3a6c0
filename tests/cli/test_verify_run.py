"""`elastane verify-run` reports the first different step of two runs, and its parts."""

import json

import pytest

from elastane.cli.main import main
from elastane.worker.digest_log import DigestLog

SETTINGS = {"shards": 8, "seed": 1, "threads": 1, "data": {"n": 10, "seed": 0}}


def run_of(path, steps, *, every=1, world=3, other=(), **settings):
    """Write a digest log in which the optimizer has other digests in the steps of `other`."""
    log = DigestLog(path, every)
    for committed in range(steps + 1):
        odd = "odd" if committed - 1 in other else ""
        digests = {"model": f"m{committed}", "optimizer": f"o{committed}{odd}"}
        log.at(committed, (0, world), lambda: {**SETTINGS, **settings}, lambda d=digests: d)
    return str(path)


def told(capsys, *words):
    code = main(["verify-run", *words])
    return code, capsys.readouterr().out


def test_equal_runs_compare_equal_over_common_steps(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", 9, world=2), run_of(tmp_path / "b", 6)
    code, out = told(capsys, a, b)
    assert code == 0
    assert "the same: all 6 steps that both have" in out and "other settings" not in out
    assert "A: " in out and "9 steps, 0 to 8, worlds of 2" in out


def test_the_first_different_step_is_reported_with_its_parts_and_worlds(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", 9, world=2), run_of(tmp_path / "b", 9, other=(4, 7))
    code, out = told(capsys, a, b)
    assert code == 1
    assert "different: step 4 is the first" in out and "the same up to step 3" in out
    assert "optimizer: o5 in A, o5odd in B" in out and "model:" not in out
    assert "world of 2 in A, of 3 in B" in out and "2 of 9 steps differ" in out


def test_different_settings_are_reported_before_steps(tmp_path, capsys):
    a = run_of(tmp_path / "a", 3)
    b = run_of(tmp_path / "b", 3, other=(0,), shards=4, data={"n": 10, "seed": 5})
    code, out = told(capsys, a, b)
    assert code == 1
    assert "other settings: shards is 8 in A and 4 in B" in out
    assert "other settings: data.seed is 0 in A and 5 in B" in out
    assert out.index("other settings") < out.index("different: step 0")
    assert "no step is the same" in out


def test_json_has_the_same_findings_as_the_text(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", 3, shards=4), run_of(tmp_path / "b", 3, other=(1, 2))
    code, out = told(capsys, "--json", a, b)
    found = json.loads(out)
    assert code == 1 and found["settings"] == {"shards": [4, 8]}
    assert (found["compared"], found["different"], found["same_until"]) == (3, 2, 0)
    assert found["first"]["step"] == 1 and found["first"]["names"] == ["optimizer"]
    assert found["runs"]["a"]["worlds"] == [3]


@pytest.mark.parametrize("content", [None, "", "no digest log\n"], ids=["missing", "empty", "text"])
def test_a_file_that_is_not_a_digest_log_is_refused(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "b").write_text(content)
    a = run_of(tmp_path / "a", 3)
    assert main(["verify-run", a, str(tmp_path / "b")]) == 78
    assert "[digest-log-unreadable]" in capsys.readouterr().err


def test_runs_without_a_step_in_common_are_refused(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", 2), run_of(tmp_path / "b", 9, every=3)
    (tmp_path / "a").write_text("".join((tmp_path / "a").open().readlines()[:2]))
    assert main(["verify-run", a, b]) == 78
    assert "no step in common" in capsys.readouterr().err
