"""`elastane run --serve` and `--metrics-port`: what a run serves of its job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from process_harness import until

from elastane.errors import ExitCode

DEADLINE_S = 90.0
# It ends once the test says so.
SCRIPT = """
import pathlib, time
while not pathlib.Path("end").exists():
    time.sleep(0.02)
"""


class Run:
    """A run of one worker with its page, in its own folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "wait.py").write_text(SCRIPT)
        self.folder, self.said = folder, folder / "said"
        run = [sys.executable, "-m", "elastane", "run", "--log-dir", "logs", "--rdzv-id", "shown"]
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*run, *options, "--no-zygote", "wait.py"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            )

    def address(self) -> str:
        """Return the address that the run prints, once it serves the job."""
        pattern = re.compile(r"the page of this job is (http://127\.0\.0\.1:\d+)/\n")
        until(lambda: pattern.search(self.said.read_text()), "an address")
        address = pattern.findall(self.said.read_text())
        assert len(address) == 1
        until(lambda: self.state(address[0]) == "training", "a job that trains on the page")
        return address[0]

    def state(self, address: str) -> str:
        found = httpx.get(f"{address}/api/jobs/shown", timeout=DEADLINE_S).json()
        return found["job"]["state"]

    def page(self) -> int:
        """Return the pid of the page; it is no child of the agent."""
        wanted = b"elastane\0dashboard\0" + bytes(self.folder / "logs" / "shown")
        found = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if _read(path).startswith(wanted)
        ]
        [pid] = found
        return pid

    def end(self) -> int:
        (self.folder / "end").touch()
        return self.process.wait(DEADLINE_S)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=DEADLINE_S).is_success
    except httpx.TransportError:
        return False


def test_page_and_metrics_end_with_the_run_and_no_other_site_reads_the_page(tmp_path):
    run = Run(tmp_path, "--serve", "0", "--metrics-port", "127.0.0.1:0")
    try:
        address = run.address()
        other = httpx.get(address, headers={"Host": "elsewhere.example"}, timeout=DEADLINE_S)
        assert other.status_code == 421
        [scraped] = re.findall(
            r"the metrics of this job are (http://127.+)\n", run.said.read_text()
        )
        state = 'elastane_training_state{job_name="shown",state="training"} 1.0'
        until(
            lambda: state in httpx.get(scraped, timeout=DEADLINE_S).text,
            "the job's state in its metrics",
        )
        assert run.end() == 0
        until(lambda: not answers(address), "the end of the page")
        until(lambda: not answers(scraped), "the end of the metrics")
    finally:
        run.process.kill()


@pytest.mark.soak
def test_the_page_ends_with_an_agent_that_is_killed(tmp_path):
    run = Run(tmp_path, "--serve", "0")
    address = run.address()
    run.process.kill()
    until(lambda: not answers(address), "the end of the page")


@pytest.mark.soak
def test_the_job_continues_after_the_death_of_the_page(tmp_path):
    run = Run(tmp_path, "--serve", "0")
    try:
        address = run.address()
        os.kill(run.page(), signal.SIGKILL)
        until(lambda: not answers(address), "the end of the page")
        assert run.process.poll() is None
        assert run.end() == 0
    finally:
        run.process.kill()


def test_a_port_that_is_taken_is_an_error_before_the_job_begins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = Run(tmp_path, "--serve", str(port))
        assert run.process.wait(DEADLINE_S) == ExitCode.CONFIGURATION
    said = run.said.read_text()
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in said
    assert "next: --serve 0, which takes a free port" in said
    assert not (tmp_path / "logs").exists()
