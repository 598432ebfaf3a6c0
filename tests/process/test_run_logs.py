"""The output of workers: files that stay, and a console that names the writer of each line."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervise import Agent, agent, ask, write_script

TALK = """
import sys
sys.stdout.write(f"out {RANK} {RESTARTS}\\n")
sys.stderr.write(f"err {RANK} {RESTARTS}\\n")
"""


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.glob("round_*/attempt_*/rank_*/*.log"))
    }


def test_redirected_streams_go_to_files_per_rank_and_attempt_and_not_to_the_console(
    tmp_path: Path,
) -> None:
    body = f"""{TALK}
tell("talked")
wait_for(f"talked.{{1 - RANK}}.{{RESTARTS}}")
raise SystemExit(RESTARTS == 0 and RANK == 0)
"""
    options = ("--nproc-per-node", "2", "--redirects", "3", "--max-restarts", "1")
    with agent(tmp_path, *options, body=body) as one:
        assert one.wait() == 0
        assert files(one.job_dir()) == {
            f"round_1/attempt_{a}/rank_{r}/std{s}.log": f"{s} {r} {a}\n"
            for a in (0, 1)
            for r in (0, 1)
            for s in ("err", "out")
        }
        assert one.out == ""
        assert "err 0" not in one.err
        logs = ask(one, "logs", str(one.job_dir()))
        assert logs.returncode == 0, logs.stderr
        assert all(
            f"{s} {r} {a}" in logs.stdout for s in ("out", "err") for r in (0, 1) for a in (0, 1)
        )


def test_teed_streams_go_to_files_and_the_console_with_a_prefix(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--tee", "0:1,1:3", "--role", "trainer")
    with agent(tmp_path, *options, body=TALK) as one:
        assert one.wait() == 0
        assert sorted(re.sub(r" \S+ r1\.0\]", " NODE r1.0]", one.out).splitlines()) == [
            "[trainer0 NODE r1.0]: out 0 0",
            "[trainer1 NODE r1.0]: out 1 0",
        ]
        assert "r1.0]: err 1 0\n" in one.err
        assert "err 0 0\n" in one.err, "a stream that is not asked for stays on the console"
        assert "]: err 0 0" not in one.err
        assert set(files(one.job_dir())) == {
            "round_1/attempt_0/rank_0/stdout.log",
            "round_1/attempt_0/rank_0/stderr.log",
            "round_1/attempt_0/rank_1/stdout.log",
            "round_1/attempt_0/rank_1/stderr.log",
        }


def test_the_ranks_filter_bounds_the_console_and_not_the_files(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--tee", "3", "--local-ranks-filter", "1")
    with agent(tmp_path, *options, body=TALK) as one:
        assert one.wait() == 0
        assert "out 1 0" in one.out
        assert "out 0 0" not in one.out
        assert len(files(one.job_dir())) == 4


def test_a_flood_without_newlines_does_not_delay_a_failure_report(tmp_path: Path) -> None:
    """The console does not delay the next attempt either."""
    body = """
    if RANK == 0 and RESTARTS == 0:
        block, end_s, blocks = b"x" * (1 << 20), time.monotonic() + 60, 0
        while time.monotonic() < end_s:
            os.write(1, block)
            blocks += 1
            if blocks == 50:
                tell("flooding")
            time.sleep(0.01)
    if RESTARTS == 0:
        wait_for("flooding.0.0")
        tell("failed", time.monotonic())
        raise SystemExit(1)
    """
    options = ("--nproc-per-node", "2", "--tee", "3", "--max-restarts", "1")
    with agent(tmp_path, *options, body=body) as one:
        assert one.wait() == 0
        failed_s = float(one.told("failed.1.0", 0))
        (noticed,) = [e for e in one.events("worker-exited") if e["data"].get("exit_code") == 1]
        again = one.events("workers-starting")[1]
        assert noticed["mono_s"] - failed_s < 20.0
        assert again["mono_s"] - failed_s < 40.0
        (log,) = one.logs.glob("*/round_1/attempt_0/rank_0/stdout.log")
        assert log.stat().st_size > 20 << 20
        assert (tmp_path / "out").stat().st_size < log.stat().st_size


@contextlib.contextmanager
def mount(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory, or skip the test if that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(words, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a full file system of 64 KiB."""
    folder = tmp_path / "logs"
    folder.mkdir()
    with mount(folder, "size=64k"):
        with pytest.raises(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        yield folder


@pytest.mark.root
def test_a_job_runs_on_a_machine_without_a_writable_folder(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    body = 'tell("ran")\nraise SystemExit(RESTARTS == 0)\n'
    options = ("--log-dir", str(closed / "logs"), "--redirects", "3", "--max-restarts", "1")
    with mount(closed, "ro"), agent(tmp_path, *options, body=body, TMPDIR=str(closed)) as one:
        assert one.wait() == 0
        assert one.told("ran.0.1", 0) == ""
        assert "Traceback" not in one.err
        assert "[runtime-folder]" in one.err


@pytest.mark.root
def test_a_full_disk_loses_logs_and_the_job_runs(tmp_path: Path, small_disk: Path) -> None:
    body = 'tell("ran")\nraise SystemExit(RESTARTS == 0)\n'
    with agent(tmp_path, "--redirects", "3", "--max-restarts", "1", body=body) as one:
        assert one.wait() == 0
        assert one.told("ran.0.1", 0) == ""
        assert "Traceback" not in one.err
    assert small_disk.is_mount()


@pytest.mark.root
def test_a_disk_that_fills_under_the_log_files_of_workers_ends_none_of_them(
    tmp_path: Path, small_disk: Path
) -> None:
    body = f"""
    import sys
    from pathlib import Path
    filler = Path({str(small_disk / "filler")!r})
    print("before", flush=True)
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass
    print("x" * 10_000, flush=True)
    sys.stderr.write("y" * 10_000 + chr(10))
    filler.unlink()
    print("after", flush=True)
    sys.stderr.write("after" + chr(10))
    """
    (small_disk / "filler").unlink()
    with agent(tmp_path, "--tee", "3", "--preload", "json", body=body) as one:
        assert one.wait() == 0
        logs = files(one.job_dir())
        for number, log in enumerate(logs.values()):
            assert "the disk was full" in log and log.endswith(" bytes are missing]\nafter\n"), log
            assert log.startswith("before\n") == (number == 1)
        assert len(logs) == 2
        assert one.out.count("the disk was full") == 1, "the console shows what the file has"


def test_a_closed_console_does_not_change_how_the_job_ends(tmp_path: Path) -> None:
    write_script(tmp_path, f'{TALK}\ntell("up")\nwait_for("go")\nraise SystemExit(1)\n')
    one = Agent(tmp_path)
    read, write = os.pipe()
    words = ("--standalone", "--no-zygote", "--log-dir", "logs", "--tee", "3", "script.py")
    try:
        one.start(*words, stdio=(subprocess.DEVNULL, write, write))
        os.close(write)
        (tmp_path / "err").touch()
        one.told("up.0.0")
        os.close(read)
        (tmp_path / "go").touch()
        assert one.wait() == 1
        one.gone()
    finally:
        one.kill_all()


def test_a_blocked_console_does_not_delay_restarts(tmp_path: Path) -> None:
    body = """
    print("x" * (1 << 20), flush=True)
    tell("up")
    raise SystemExit(RESTARTS < 2)
    """
    write_script(tmp_path, body)
    one = Agent(tmp_path)
    read, write = os.pipe()
    words = ("--standalone", "--no-zygote", "--max-restarts", "2", "--tee", "1")
    try:
        one.start(
            *words, "--log-dir", "logs", "script.py", stdio=(subprocess.DEVNULL, write, write)
        )
        os.close(write)
        (tmp_path / "err").touch()
        one.told("up.0.2")
        assert one.wait() == 0
    finally:
        one.kill_all()
        os.close(read)


def test_log_dir_dev_null_writes_no_files(tmp_path: Path) -> None:
    with agent(tmp_path, "--log-dir", "/dev/null", "--redirects", "3", body=TALK) as one:
        assert one.wait() == 0
        assert one.out == "out 0 0\n"
        assert "err 0 0" in one.err
        assert not (tmp_path / "logs").exists()
