"""elastane.launch and signals: after the end of any process, none is left."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
from function_harness import program
from process_harness import until
from supervise import alive

from elastane.functions.agent import CalledAgent

# A worker that takes its time to end, and says that it did.
CHECKPOINTS = """
    def train():
        def save(*_):
            tell(f"saved.{os.environ['RANK']}")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        tell(f"up.{os.environ['RANK']}", os.getpid())
        hang()
"""
# One that asks whether it should, as a training loop does.
ASKS = """
    def train():
        elastane.should_checkpoint()
        tell(f"up.{os.environ['RANK']}", os.getpid())
        while True:
            time.sleep(0.01)
            if elastane.should_checkpoint():
                tell(f"saved.{os.environ['RANK']}")
"""
# One that does not end for being asked to.
STUBBORN = """
    def train():
        signal.signal(signal.SIGTERM, lambda *_: tell(f"asked.{os.environ['RANK']}"))
        tell(f"up.{os.environ['RANK']}", os.getpid())
        hang()
"""
CALLS = """
    def handlers():
        return [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    if __name__ == "__main__":
        before = handlers()
        try:
            elastane.launch(train, nproc=2, shutdown_timeout=300)
        except KeyboardInterrupt:
            assert handlers() == before, handlers()
            tell("interrupted")
"""


REPORTS = {"ELASTANE_REPORT_FILE": "report.json"}


def up(one):
    """Wait for both workers; returns their pids."""
    return {int(one.told(f"up.{rank}")) for rank in (0, 1)}


@pytest.mark.parametrize("train", [CHECKPOINTS, ASKS], ids=["by signal", "by asking"])
def test_one_ctrl_c_has_workers_checkpoint_and_is_then_raised(tmp_path, train):
    with program(tmp_path, train, CALLS, **REPORTS) as one:
        up(one)
        os.killpg(one.process.pid, signal.SIGINT)  # as a terminal does
        assert one.wait() == 0, one.err
        one.told("interrupted")
        assert "SIGINT" in (tmp_path / "report.json").read_text()
        assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}
        assert not one.folders()
        one.gone()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_program_ends_workers_well_before(tmp_path, signum):
    with program(tmp_path, CHECKPOINTS, CALLS) as one:
        up(one)
        one.send(signum)
        assert one.wait() == -signum, one.err
        assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}
        assert not one.folders()
        one.gone()


def test_a_second_ctrl_c_does_not_wait_for_workers_that_do_not_end(tmp_path):
    with program(tmp_path, STUBBORN, CALLS, **REPORTS) as one:
        pids = up(one)
        one.send(signal.SIGINT)
        one.told("asked.0")
        assert all(map(alive, pids))
        one.send(signal.SIGINT)
        assert one.wait() == 0, one.err
        one.told("interrupted")
        assert not one.folders()
        one.gone()


def test_a_second_sigterm_does_not_wait_for_workers_that_do_not_end(tmp_path):
    with program(tmp_path, STUBBORN, CALLS, **REPORTS) as one:
        pids = up(one)
        one.send(signal.SIGTERM)
        one.told("asked.0")
        assert all(map(alive, pids))
        one.send(signal.SIGTERM)
        assert one.wait() == -signal.SIGTERM, one.err
        assert "SIGTERM" in (tmp_path / "report.json").read_text(), "the agent ended in its own way"
        assert not one.folders()
        one.gone()


def test_a_killed_program_leaves_no_process_and_the_next_call_sweeps_its_folder(tmp_path):
    with program(tmp_path, CHECKPOINTS, CALLS) as one:
        up(one)
        one.send(signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
        one.gone()
        (left,) = one.folders()
        # Folders of others: of a process that lives, of another host that has the same folder.
        living = left.with_name(left.name.replace(f"-{one.process.pid}-", f"-{os.getpid()}-"))
        kind, uid, _, rest = left.name.removeprefix("elastane-").split("-", 3)
        foreign = left.with_name(f"elastane-{kind}-{uid}-00000000-{rest}")
        for other in (living, foreign):
            shutil.copytree(left, other)
        with program(tmp_path, "print(elastane.launch(min, ((1, 2),), nproc=1))") as again:
            assert again.wait() == 0, again.err
            assert again.out == "{0: 1}\n"
            assert set(again.folders()) == {living, foreign}


def test_ctrl_c_reaches_a_program_that_calls_within_its_event_loop(tmp_path):
    body = """
        import asyncio
        async def main():
            before = signal.getsignal(signal.SIGINT)
            try:
                elastane.launch(train, nproc=2)
            finally:
                assert signal.getsignal(signal.SIGINT) is before
                tell("handled")
        if __name__ == "__main__":
            asyncio.run(main())
    """
    with program(tmp_path, CHECKPOINTS, body) as one:
        up(one)
        one.send(signal.SIGINT)
        assert one.wait() == -signal.SIGINT, one.err
        one.told("handled")
        one.told("saved.0")
        one.gone()


def test_a_program_that_is_ended_while_a_thread_calls_leaves_no_process(tmp_path):
    body = """
        import threading
        if __name__ == "__main__":
            threading.Thread(target=elastane.launch, args=(train,), kwargs={"nproc": 2}).start()
    """
    with program(tmp_path, STUBBORN, body) as one:
        up(one)
        one.send(signal.SIGTERM)
        assert one.wait() == -signal.SIGTERM, one.err
        one.gone()


def test_a_signal_handler_of_the_program_is_called(tmp_path):
    body = """
        def mine(*_):
            tell("mine")
            raise SystemExit(7)
        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, mine)
            elastane.launch(train, nproc=2)
    """
    with program(tmp_path, CHECKPOINTS, body) as one:
        up(one)
        one.send(signal.SIGTERM)
        assert one.wait() == 7, one.err
        one.told("mine")
        one.told("saved.0")
        assert not one.folders()
        one.gone()


@pytest.mark.parametrize(
    ("signum", "said"), [(signal.SIGKILL, "by SIGKILL"), (signal.SIGTERM, "drained: SIGTERM")]
)
def test_an_agent_ended_from_outside_is_an_error_and_ends_its_workers(tmp_path, signum, said):
    body = """
        if __name__ == "__main__":
            try:
                elastane.launch(train, nproc=2)
            except elastane.errors.ElastaneError as error:
                print(error)
                tell("caught")
                wait_for("seen")
    """
    with program(tmp_path, CHECKPOINTS, body) as one:
        pids = up(one)
        os.kill(one.agent(), signum)
        one.told("caught")
        assert not one.folders()
        until(lambda: not any(map(alive, pids)), "the workers are gone")
        (tmp_path / "seen").touch()
        assert one.wait() == 0, one.err
        assert "[agent-lost]" in one.out
        assert said in one.out


def test_ctrl_c_while_the_agent_starts_leaves_no_agent(tmp_path, monkeypatch):
    def interrupted(pid):
        raise KeyboardInterrupt

    agent = CalledAgent(tmp_path, os.environ)
    monkeypatch.setattr(os, "pidfd_open", interrupted)
    with pytest.raises(KeyboardInterrupt), agent:
        sys.exit("it started")
    assert not alive(agent.pid)
