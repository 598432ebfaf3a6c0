"""The messages and reports of each kind of failure, from scripts without any decorator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from supervise import Agent, agent, ask, words_agent, write_script

from elastane.observe.report import FinalReport, read_report
from elastane.process.errorfile import read_error_file
from elastane.protocol.diagnosis import STOPPED_IN_ITS_END

# A zygote that has imported torch, for the native stack is torch's to show.
TORCH = ("--preload", "torch")
LIGHT = ("--preload", "json")


def failed(folder: Path, body: str, *options: str, **env: str) -> tuple[Agent, FinalReport]:
    """Run a script of two workers that fails, to its end."""
    words = ("--nproc-per-node", "2", "--report-file", "report.json", *options)
    with agent(folder, *words, body=body, **env) as one:
        assert one.wait() == 1, one.err
    return one, read_report(str(folder / "report.json"))


def box(one: Agent) -> str:
    """Return the closing box as one line."""
    return " ".join(one.err[one.err.index("╔") :].replace("║", " ").split())


def only(kind: str) -> str:
    return f"import ctypes, os, sys\nif RANK == 1:\n    {kind}\nhang()\n"


@pytest.mark.parametrize(
    ("body", "exit_text", "said"),
    [
        (only("raise ValueError('bad data')"), "exit code 1", "ValueError: bad data"),
        (only("sys.exit('not today')"), "exit code 1", "not today"),
        (only("sys.exit(7)"), "exit code 7", ""),
        (only("os._exit(3)"), "exit code 3", ""),
        ("import no_such_module\n", "exit code 1", "No module named 'no_such_module'"),
        ("this is no python\n", "exit code 1", "SyntaxError"),
    ],
)
@pytest.mark.parametrize("options", [LIGHT, ("--no-zygote",)], ids=["forked", "executed"])
def test_the_reason_of_an_end_is_in_the_box_and_in_the_report(
    tmp_path: Path, options: tuple[str, ...], body: str, exit_text: str, said: str
) -> None:
    one, report = failed(tmp_path, body, *options)
    root = report.root_cause
    assert root is not None and root.exit in box(one) and said in box(one)
    if "RANK" not in body and root.exit == "SIGTERM":
        # Both failed; the other's process was gone sooner, though its error came later.
        assert root.evidence == STOPPED_IN_ITS_END
        exit_text = root.exit
    assert root.exit == exit_text and said in root.message
    assert (report.ok, report.exit_code, report.slug) == (False, 1, "worker-failed")
    assert one.err.count("job-ended") == 0, "the box has said it"


def test_a_segmentation_fault_shows_the_python_and_the_native_stack(tmp_path: Path) -> None:
    body = "import ctypes\ndef deep():\n    ctypes.string_at(0)\nif RANK == 1: deep()\nhang()\n"
    one, report = failed(tmp_path, body, *TORCH)
    root = report.root_cause
    assert root is not None and root.exit == "SIGSEGV" and root.rank == 1
    lines = root.message.splitlines()
    assert lines[-1] == "Fatal Python error: Segmentation fault"
    assert "in deep" in root.message and "in string_at" in root.message
    assert any("frame #" in line and "libc.so" in line for line in lines)
    assert "zygote" not in root.message, "frames of the launcher are nobody's business"
    assert "in deep" in box(one)


def test_a_kill_by_another_process_is_not_reported_as_out_of_memory(tmp_path: Path) -> None:
    one, report = failed(tmp_path, only("os.kill(os.getpid(), 9)"), *LIGHT)
    assert report.root_cause is not None
    assert "from outside" in report.root_cause.evidence
    assert "peaked at" in box(one) and "out of memory:" not in box(one)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="a memory cgroup is made by root")
def test_an_out_of_memory_kill_is_reported_with_its_limit(tmp_path: Path) -> None:
    group = _memory_group(200 << 20)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    try:
        folder, join = group
        body = "if RANK == 1:\n    kept = [bytearray(16 << 20) for _ in range(100)]\nhang()\n"
        words = ("--nproc-per-node", "2", "--report-file", "report.json", *LIGHT)
        words = ("--standalone", "--log-dir", "logs", *words, write_script(tmp_path, body))
        with words_agent(tmp_path, *words, lead=("sh", "-c", join, "sh")) as one:
            assert one.wait() == 1, one.err
        root = read_report(str(tmp_path / "report.json")).root_cause
        assert root is not None and root.exit == "SIGKILL"
        assert root.evidence.startswith("out of memory: the kernel killed a process of this cgroup")
        assert "200 MiB" in root.evidence
        assert "give the workers more memory" in box(one)
    finally:
        _remove_group(folder)


def _memory_group(limit_bytes: int) -> tuple[Path, str] | None:
    """Return a cgroup with a limit, and the shell words that run a command in it."""
    name = f"elastane-test-{uuid.uuid4().hex[:8]}"
    for root, mark, limit in (
        (Path("/sys/fs/cgroup"), "cgroup.controllers", "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ):
        if not (root / mark).exists():
            continue
        folder = root / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        return folder, f'echo $$ > {folder}/cgroup.procs && exec "$@"'
    return None


def _remove_group(folder: Path) -> None:
    for pid in (folder / "cgroup.procs").read_text().split():
        (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()


def test_peers_that_lost_a_connection_are_counted_and_not_blamed(tmp_path: Path) -> None:
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if RANK == 2:
            raise KeyError("of rank 2")
        dist.all_reduce(torch.ones(1))
    """
    words = ("--nproc-per-node", "4", "--report-file", "report.json")
    preload = ("--preload", "torch,torch.distributed")
    with agent(tmp_path, *words, *preload, body=body) as one:
        assert one.wait() == 1
    report = read_report(str(tmp_path / "report.json"))
    assert report.root_cause is not None and report.root_cause.rank == 2
    assert "of rank 2" in report.root_cause.message
    assert report.consequences == len(report.failures) - 1


def test_a_record_of_torchs_own_is_kept_and_not_replaced(tmp_path: Path) -> None:
    body = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("told by torch")
        main()
    """
    _, report = failed(tmp_path, body, *TORCH)
    assert report.root_cause is not None
    error = read_error_file(report.root_cause.error_file)
    assert error is not None and error.monotonic_ns == 0, "torch wrote it"
    assert "told by torch" in report.root_cause.message


def test_a_launcher_inside_a_worker_passes_the_root_cause_on(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    failed(tmp_path, only("raise ValueError('inner')"), *LIGHT, TORCHELASTIC_ERROR_FILE=str(own))
    error = read_error_file(str(own))
    assert error is not None
    assert (error.message, error.error_code) == ("ValueError: inner", 1)
    own.unlink()
    failed(tmp_path, only("os._exit(9)"), *LIGHT, TORCHELASTIC_ERROR_FILE=str(own))
    error = read_error_file(str(own))
    assert error is not None and error.error_code == 9 and "exit code 9" in error.message


def test_a_job_that_ends_well_is_reported_too(tmp_path: Path) -> None:
    with agent(tmp_path, "--report-file", "report.json", body="pass") as one:
        assert one.wait() == 0
    report = read_report(str(tmp_path / "report.json"))
    assert (report.ok, report.exit_code, report.failures) == (True, 0, [])


def test_an_unwritable_report_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with agent(tmp_path, "--report-file", "file/report.json", body="pass") as one:
        assert one.wait() == 0
    assert "the report of how the job ended was not written" in one.err


FLAKY = """
    import os
    if RANK == 1 and RESTARTS == 0: raise ValueError("the first attempt is bad")
    if RANK == 0 and RESTARTS == 1: os._exit(5)
    wait_for("end") if RESTARTS == 2 else hang()
"""


def test_explain_shows_every_attempt_and_its_failures_after_the_job(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "2", *LIGHT)
    with agent(tmp_path, *options, body=FLAKY) as one:
        (tmp_path / "end").touch()
        assert one.wait() == 0, one.err
        told = ask(one, "explain", "logs")
        story = json.loads(ask(one, "explain", "logs", "--json").stdout)
        second = json.loads(ask(one, "explain", "logs", "--json", "--attempt", "1").stdout)
    assert told.returncode == 0 and told.stderr == ""
    assert "the first attempt is bad" in told.stdout and "exit code 5" in told.stdout
    assert (story["ok"], story["restarts_used"]) == (True, 2)
    assert [(a["round"], a["attempt"], a["root_rank"]) for a in story["attempts"]] == [
        (1, 0, 1),
        (1, 1, 0),
        (1, 2, None),
    ]
    assert story["attempts"][2]["succeeded"] == 2
    assert [a["attempt"] for a in second["attempts"]] == [1]
    stopped = [f for a in story["attempts"] for f in a["failures"] if f["stopped"]]
    assert {f["exit"] for f in stopped} == {"SIGTERM"}


def test_explain_works_for_a_job_whose_agents_were_all_killed(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "2", *LIGHT)
    with agent(tmp_path, *options, body=FLAKY + "\n    tell('on')\n    hang()\n") as one:
        (tmp_path / "end").touch()
        one.told("on.0.2")
        one.process.kill()
        one.process.wait(90)
        told = ask(one, "explain", "logs")
    assert told.returncode == 0
    assert "no end is on file" in told.stdout and "the first attempt is bad" in told.stdout


def test_explain_without_a_job_names_the_existing_jobs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastane", "explain", "nothing", "--log-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2 and "[no-such-job]" in done.stderr
