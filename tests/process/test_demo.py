"""The whole demo, with real agents, kills and a real classifier; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 240.0


def left_over(marker: str) -> list[str]:
    """Return the command lines of processes that carry the marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def nothing_left_of(marker: str) -> bool:
    deadline = time.monotonic() + 60.0
    while left_over(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def demo(*options: str, **env: str):
    """Start the demo; yield its process and the marker that all its processes inherit."""
    marker = f"demo-test-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "elastane", "demo", *options],
        env={**os.environ, **env, "DEMO_TEST_MARKER": marker},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, marker
    finally:
        process.kill()
        process.communicate()


def wait_for_training(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not (folder / "progress.jsonl").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the training did not begin"
        time.sleep(0.05)


def played(folder: Path, *options: str) -> dict:
    """Return the result of a whole demo, in which every act came and had a cost."""
    with demo("--fast", "--json", "--keep", str(folder), *options) as (process, marker):
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert nothing_left_of(marker), left_over(marker)
    result = json.loads(out)
    assert result["accuracy"] >= 0.97
    assert [act["act"] for act in result["acts"]] == ["kill-worker", "kill-node", "add-node"]
    assert all(act["recovery_s"] > 0 for act in result["acts"])
    for told in ("SIGKILL to the worker", "workers ended with it", "round-settled", "incident"):
        assert told in err
    # Some world completed every step of the training, in order.
    lines = (folder / "progress.jsonl").read_text().splitlines()
    steps = {json.loads(line)["step"] for line in lines}
    assert steps == set(range(1, result["steps"] + 1))
    return result


def test_the_demo_recovers_in_place_from_every_fault_and_learns_the_digits(tmp_path):
    acts = played(tmp_path / "kept")["acts"]
    # The two arriving workers are accepted at once, or one after the other if one is late.
    assert [act["world_size"] for act in acts] in ([3, 2, 4], [3, 2, 3])
    assert [act["redone_steps"] for act in acts] == [0, 0, 0]
    lines = (tmp_path / "kept" / "progress.jsonl").read_text().splitlines()
    assert len({json.loads(line)["pid"] for line in lines}) == 1, "rank 0 was never another process"
    assert json.loads(lines[-1])["world_size"] == 4


@pytest.mark.soak
@pytest.mark.parametrize("example", ["digits", "gpt"])
def test_chaos_ends_with_the_weights_of_an_undisturbed_run(tmp_path, example):
    chosen = ("--chaos", "--example", example, "--json", "--timeout", "200")
    with demo(*chosen, "--seed", "5", "--keep", str(tmp_path / "kept")) as (process, marker):
        out, err = process.communicate(timeout=400.0)
        assert process.returncode == 0, err
        assert nothing_left_of(marker), left_over(marker)
    result = json.loads(out)
    assert len(result["acts"]) == 6 and result["seed"] == 5
    # All but the killed worker completed these steps; otherwise the job started again.
    assert max(act["redone_steps"] for act in result["acts"]) <= 1
    assert result["weights"] == result["undisturbed"] and len(result["weights"]) == 1


@pytest.mark.parametrize(
    "options", [("--restart", "--chaos"), ("--restart", "--example", "gpt"), ("--seed", "1")]
)
def test_options_that_exclude_each_other_are_refused(options):
    with demo(*options) as (process, _):
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2 and "[usage]" in err


@pytest.mark.soak
def test_the_demo_restarts_a_script_that_knows_nothing_of_it(tmp_path):
    acts = played(tmp_path / "kept", "--restart")["acts"]
    assert [act["world_size"] for act in acts] == [4, 2, 4]
    # At most the steps between two checkpoints are repeated; a planned change repeats none.
    assert max(act["redone_steps"] for act in acts[:2]) <= 20
    assert acts[2]["redone_steps"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(tmp_path, number):
    """It starts although the environment has settings that are meant for another job."""
    folder = tmp_path / "kept"
    wrong = {"PET_RDZV_BACKEND": "static", "PET_NPROC_PER_NODE": "7", "ELASTANE_NODE_ID": "mine"}
    with demo("--keep", str(folder), **wrong) as (process, marker):
        wait_for_training(process, folder)
        assert len(left_over(marker)) >= 7  # the demo, two agents, four workers
        process.send_signal(number)
        process.communicate(timeout=90.0)
        assert process.returncode in (-number, 128 + number)
        assert nothing_left_of(marker), left_over(marker)


def test_an_agent_that_cannot_train_ends_the_demo_with_its_own_message(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    with demo(TMPDIR=str(tmp_path), PYTHONPATH=str(tmp_path)) as (process, marker):
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "the agent of node-" in err
        assert "this torch is broken" in err
        assert nothing_left_of(marker)


def test_a_demo_that_takes_too_long_reports_its_step_and_ends(tmp_path):
    with demo("--timeout", "0.5", TMPDIR=str(tmp_path)) as (process, marker):
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "not done within 0.5 s, at step 0" in err
        assert nothing_left_of(marker)


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    with demo("--keep", str(tmp_path)) as (process, _):
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 78
        assert "[demo-folder]" in err
