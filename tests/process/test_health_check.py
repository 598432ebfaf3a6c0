"""`--health-check`: an unfit node does not join, and leaves after a fault; recovery never waits."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import pytest
from supervise import agent
from test_recovery_in_place import InPlace

from elastane.observe.story import story_of

UNFIT = 69
NEVER = "raise AssertionError('the node is not fit')"


def check(folder: Path, text: str) -> str:
    """Return the words of a health check that runs this shell script."""
    path = folder / "check.sh"
    path.write_text(text)
    return shlex.join(["sh", str(path)])


def test_a_node_that_fails_its_health_check_does_not_join(tmp_path):
    words = check(tmp_path, "echo looking; echo GPU 3 fell off the bus >&2; exit 4\n")
    with agent(tmp_path, "--health-check", words, body=NEVER) as one:
        assert one.wait() == UNFIT
        assert "[node-unhealthy]" in one.err
        assert "health check: looking" in one.err
        (event,) = one.events("health-check")
        assert event["data"]["ok"] is False and event["data"]["when"] == "join"
        reason = "the health check failed: exit code 4: GPU 3 fell off the bus"
        assert event["reason"] == reason
        assert not one.events("coordinator-found")


def test_a_health_check_that_cannot_be_run_is_named_with_what_is_expected(tmp_path):
    program = tmp_path / "check"
    program.write_text("#!/no/such/shell\n")
    program.chmod(0o755)
    with agent(tmp_path, "--health-check", str(program), body=NEVER) as one:
        assert one.wait() == UNFIT
        (event,) = one.events("health-check")
        assert event["reason"] == (
            f"the health check failed: cannot run '{program}': No such file or directory;"
            " expected a program that exists and may be executed, and a folder that exists"
        )
        assert "[node-unhealthy]" in one.err and "Errno" not in one.err


@pytest.mark.parametrize("text", ["exec sleep 1000", "trap '' TERM INT; sleep 1000 & wait"])
def test_a_hanging_health_check_has_failed_and_leaves_no_process(tmp_path, text):
    words = check(tmp_path, text)
    options = ("--health-check", words, "--health-check-timeout", "0.5")
    with agent(tmp_path, *options, body=NEVER) as one:
        assert one.wait() == UNFIT
        assert "no end within 0.5 s" in one.err
        one.gone()


def test_a_node_that_is_unfit_after_a_fault_leaves_and_the_recovery_does_not_wait(tmp_path):
    job, told = InPlace(tmp_path), tmp_path / "told"
    # It is as slow as it likes: the survivors, and the replacement here, train meanwhile.
    slow = f"until test -e {told}; do sleep 0.05; done; echo ECC errors; exit 1"
    words = check(tmp_path, f'test "$ELASTANE_HEALTH_CHECK" = join && exit 0\n{slow}\n')
    with job.cluster as cluster:
        cluster.start("a", health_check="true")
        node = cluster.start("b", health_check=words)
        job.wait_steps(3, 2)
        cluster.wait(node.workers, "its agent names its worker")
        node.kill_worker()
        cluster.wait(lambda: cluster.events("replacement"), "the worker is replaced")
        job.wait_steps(3, 2)
        assert node.is_alive and not cluster.events("notice")
        told.touch()
        assert node.wait() == UNFIT
        job.wait_steps(3, 1)
        job.ends_exact()
        (line,) = story_of("job", "", cluster.events()).notices
        assert "b (health-check): the health check failed: exit code 1: ECC errors" in line
        (end,) = [one for one in cluster.events("agent-stopped") if one.node == "b"]
        assert end.data["exit_code"] == UNFIT


def test_a_node_that_is_fit_after_a_fault_stays(tmp_path):
    job = InPlace(tmp_path)
    with job.cluster as cluster:
        cluster.start("a", health_check="true")
        node = cluster.start("b", health_check="true")
        job.wait_steps(3, 2)
        cluster.wait(node.workers, "its agent names its worker")
        node.kill_worker()
        cluster.wait(lambda: len(_checks(cluster, "b")) == 2, "it is checked")
        assert [one.data["ok"] for one in _checks(cluster, "b")] == [True, True]
        assert [one.data["when"] for one in _checks(cluster, "a")] == ["join"]
        job.wait_steps(3, 2)
        job.ends_exact()
        assert not cluster.events("notice")


def test_a_signal_ends_an_agent_whose_health_check_still_runs(tmp_path):
    words = check(tmp_path, f"touch {tmp_path}/runs; exec sleep 1000")
    with agent(tmp_path, "--health-check", words, body=NEVER) as one:
        one.told("runs")
        begun_s = time.monotonic()
        one.send(signal.SIGTERM)
        one.wait()
        assert time.monotonic() - begun_s < 60
        one.gone()


def _checks(cluster, node: str) -> list:
    return [one for one in cluster.events("health-check") if one.node == node]
