"""A signal to the agent drains its workers; a second one shortens that; imports delay neither."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from process_harness import until
from supervise import agent, children, words_agent, write_script

DRAINED = 143
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Records the signal that stopped it, and exits.
POLITE = """
def leave(signum, frame):
    tell("asked", signal.Signals(signum).name)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, leave)
tell("up")
hang()
"""
STUBBORN = 'trap()\ntell("up")\nhang()\n'


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_each_signal_drains_with_143_and_workers_are_asked_once(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with agent(tmp_path, body=POLITE) as one:
        one.told("up.0.0")
        one.send(signum)
        assert one.wait() == DRAINED
        assert one.told("asked.0.0", 0) == "SIGTERM"
        assert f"{signum.name}: draining" in [e["reason"] for e in one.events("signal")]
        assert "Traceback" not in one.err
        one.gone()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(
    tmp_path: Path,
) -> None:
    with agent(tmp_path, "--shutdown-timeout", "0.5", body=STUBBORN) as one:
        one.told("up.0.0")
        begun_s = time.monotonic()
        one.send(signal.SIGTERM)
        assert one.wait() == DRAINED
        assert time.monotonic() - begun_s >= 0.5
        assert one.events("worker-exited")[-1]["data"]["exit_code"] == -signal.SIGKILL
        one.gone()


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with agent(tmp_path, "--shutdown-timeout", "600", body=STUBBORN) as one:
        one.told("up.0.0")
        one.send(signal.SIGINT)
        until(lambda: one.events("signal"), "the first signal is logged")
        one.send(signal.SIGINT)
        assert one.wait() == DRAINED
        one.gone()


def test_a_stopped_worker_does_not_outlast_the_shutdown_timeout(tmp_path: Path) -> None:
    body = 'tell("up", os.getpid())\nhang()\n'
    with agent(tmp_path, "--shutdown-timeout", "0.5", body=body) as one:
        pid = int(one.told("up.0.0"))
        os.kill(pid, signal.SIGSTOP)
        one.send(signal.SIGTERM)
        assert one.wait() == DRAINED
        one.gone()


def test_ctrl_c_while_the_zygote_imports_ends_promptly(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with agent(tmp_path, "--preload", "endless", body='tell("up")\n') as one:
        one.zygote()
        until(lambda: one.events("agent-started"), "the agent is at work")
        one.family()
        one.send(signal.SIGINT)
        assert one.wait() == DRAINED
        one.gone()
        assert not (tmp_path / "up.0.0").exists()


def test_ctrl_c_at_the_very_start_leaves_nothing_and_no_traceback(tmp_path: Path) -> None:
    with agent(tmp_path, "--preload", "json", body="hang()\n") as one:
        until(lambda: children(one.pid), "the first child")
        one.family()
        one.send(signal.SIGINT)
        assert one.wait() in (DRAINED, 128 + signal.SIGINT)
        assert "Traceback" not in one.err
        one.gone()


def test_only_the_signals_to_handle_drain(tmp_path: Path) -> None:
    with agent(tmp_path, "--signals-to-handle", "SIGUSR2", body=POLITE) as one:
        one.told("up.0.0")
        one.send(signal.SIGUSR2)
        assert one.wait() == DRAINED
    with agent(tmp_path, "--signals-to-handle", "SIGUSR2", body=POLITE) as one:
        (tmp_path / "up.0.0").unlink()
        one.told("up.0.0")
        one.family()
        one.send(signal.SIGTERM)
        assert one.wait() == -signal.SIGTERM
        one.gone()


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    """`nohup elastane run` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with agent(tmp_path, body='tell("up")\nwait_for("go")\n') as one:
            one.told("up.0.0")
            one.send(signal.SIGHUP)
            (tmp_path / "go").touch()
            assert one.wait() == 0
            assert not one.events("signal")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_script_that_fails_during_its_drain_counts_as_drained(
    tmp_path: Path,
) -> None:
    body = POLITE.replace("SystemExit(0)", "SystemExit(9)")
    with agent(tmp_path, "--max-restarts", "3", body=body) as one:
        one.told("up.0.0")
        one.send(signal.SIGTERM)
        assert one.wait() == DRAINED
        assert not one.events("restart")
        assert one.events("worker-exited")[-1]["data"]["exit_code"] == 9


def test_a_worker_that_stops_asking_does_not_outlast_the_drain_timeout(tmp_path: Path) -> None:
    body = "import elastane\nelastane.should_checkpoint()\ntell('up')\nhang()\n"
    with agent(tmp_path, "--drain-timeout", "0.5", body=body) as one:
        one.told("up.0.0")
        one.send(signal.SIGTERM)
        assert one.wait(40) == DRAINED
        (ended,) = one.events("drain-ended")
        assert "did not checkpoint" in ended["reason"]


def test_a_drain_gives_all_workers_the_same_step_to_checkpoint_at(tmp_path: Path) -> None:
    body = """
    import elastane
    step = 0
    while True:
        time.sleep(0.001 + 0.01 * RANK)
        step += 1
        if elastane.should_checkpoint():
            tell("checkpoint", step)
        if step == 10:
            tell("up")
    """
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        for rank in (0, 1):
            one.told(f"up.{rank}.0")
        one.send(signal.SIGTERM)
        assert one.wait() == DRAINED
        steps = [int(one.told(f"checkpoint.{rank}.0", 0)) for rank in (0, 1)]
        assert steps[0] == steps[1] > 10
        one.gone()


def test_an_agent_whose_parent_ignores_sigchld_sees_its_workers_end(tmp_path: Path) -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    ignoring = (sys.executable, "-c", f"{ignore}; os.execv(sys.argv[1], sys.argv[1:])")
    name = write_script(tmp_path, "import sys\nsys.exit(3)\n")
    words = ("--standalone", "--no-zygote", "--log-dir", "logs", name)
    with words_agent(tmp_path, *words, lead=ignoring) as one:
        assert one.wait() == 1
        assert one.events("worker-exited")[-1]["data"]["exit_code"] == 3
