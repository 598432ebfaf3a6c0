"""The same script under torchrun and under elastane: the same variables, and torch's parts work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from process_harness import worker_environment
from supervise import agent

pytest.importorskip("torch")

SHOW = """
import json, os, sys
from pathlib import Path
folder = Path(os.environ["SHOW_FOLDER"])
(folder / f"env.{os.environ['RANK']}").write_text(json.dumps(dict(os.environ)))
"""
# Different in each job, or in each process of one.
MAY_DIFFER = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "SHOW_FOLDER", "SUPERVISE_FOLDER", "SUPERVISE_MARK", "TMPDIR", "PWD", "OLDPWD", "_", "SHLVL",
    "PYTHONUNBUFFERED", "LC_CTYPE",
    "GLOO_SOCKET_IFNAME",  # ours: a job on one machine listens on the loopback
    "PYTHONFAULTHANDLER",  # ours: a fatal signal shows the Python stacks
}  # fmt: skip
GIVEN = {
    "CUDA_VISIBLE_DEVICES": "1,0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_WORKER_SERVER_SOCKET": "/tmp/of-the-user",
    "TORCHELASTIC_TIMER_FILE": "/tmp/of-the-user-too",
}
OPTIONS = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--role=trainer")


def variables(folder: Path) -> list[dict[str, str]]:
    return [
        {
            name: value
            for name, value in json.loads((folder / f"env.{rank}").read_text()).items()
            if name not in MAY_DIFFER and not name.startswith("ELASTANE_")
        }
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ((), {}),
        ((), GIVEN),
        pytest.param(
            ("--virtual-local-rank", "--signals-to-handle=SIGTERM,SIGUSR2"),
            {"OMP_NUM_THREADS": "2"},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["plain", "given", "virtual"],
)
def test_workers_have_the_variables_that_torchrun_gives_with_the_same_values(
    tmp_path: Path, options: tuple[str, ...], given: dict[str, str]
) -> None:
    theirs, ours = tmp_path / "torchrun", tmp_path / "elastane"
    for folder in (theirs, ours):
        folder.mkdir()
    (theirs / "show.py").write_text(SHOW)
    env = worker_environment(**given)
    if "OMP_NUM_THREADS" not in given:
        del env["OMP_NUM_THREADS"]
    if "--signals-to-handle=SIGTERM,SIGUSR2" not in options:
        options = (*options, "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    # Variables that torch's import sets in the zygote reach no worker.
    preload = "json" if given else "torch,torch.distributed"
    for module, folder in (("torch.distributed.run", theirs), ("elastane.run", ours)):
        more = ("--preload", preload) if folder == ours else ()
        done = subprocess.run(
            [sys.executable, "-m", module, *OPTIONS, *options, *more, str(theirs / "show.py")],
            env={**env, "SHOW_FOLDER": str(folder), "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for mine, torchs in zip(variables(ours), variables(theirs), strict=True):
        differ = {
            n: (mine.get(n), torchs.get(n))
            for n in {*mine, *torchs}
            if mine.get(n) != torchs.get(n)
        }
        assert not differ, "name: (elastane, torchrun)"
    for rank in (0, 1):
        extra = json.loads((ours / f"env.{rank}").read_text())
        assert extra["TORCHELASTIC_RUN_ID"] and Path(extra["TORCHELASTIC_ERROR_FILE"]).is_absolute()


def test_torch_knows_its_launcher_and_its_record_writes_the_error_file(tmp_path: Path) -> None:
    body = """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record
    tell("launched", dist.is_torchelastic_launched())
    tell("file", os.environ["TORCHELASTIC_ERROR_FILE"])

    @record
    def main():
        raise ValueError("told by record")

    main()
    """
    with agent(tmp_path, "--preload", "torch,torch.distributed", body=body) as one:
        assert one.wait(60) == 1
        assert one.told("launched.0.0") == "True"
        told = json.loads(Path(one.told("file.0.0")).read_text())
        assert "told by record" in told["message"]["message"]
        assert "told by record" in one.err


def test_torchs_local_timers_and_its_debug_server_work_in_a_worker(tmp_path: Path) -> None:
    body = """
    import multiprocessing, os, time, urllib.request
    import torch.distributed as dist
    import torch.distributed.elastic.timer as timer

    spawn = multiprocessing.get_context("fork")
    queue = spawn.Queue()
    server = timer.LocalTimerServer(queue, max_interval=0.05)
    server.start()

    def slow():
        timer.configure(timer.LocalTimerClient(queue))
        with timer.expires(after=0.2):
            hang()

    child = spawn.Process(target=slow)
    child.start()
    child.join(90)
    server.stop()
    tell("timer", child.exitcode)

    from torch.distributed.debug import start_debug_server, stop_debug_server
    port = int(os.environ["DEBUG_PORT"])
    dist.init_process_group("gloo")
    start_debug_server(port=port)
    end_s = time.monotonic() + 90
    while True:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).status
            break
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.05)
    tell("page", page)
    stop_debug_server()
    dist.destroy_process_group()
    """
    for needed in ("jinja2", "aiohttp", "tabulate"):
        pytest.importorskip(needed, reason=f"torch's debug server needs {needed}")
    # Not one of the kernel's choice, which a connection of the process group may take.
    env = {"DEBUG_PORT": str(free_port())}
    with agent(tmp_path, "--preload", "torch,torch.distributed", body=body, **env) as one:
        assert one.wait() == 0, one.err
        assert one.told("timer.0.0") == "-9"
        assert one.told("page.0.0") == "200"
        one.gone()


def test_torchs_worker_server_answers_at_the_socket_that_the_user_names(tmp_path: Path) -> None:
    body = """
    import http.client, socket
    from torch.distributed.elastic.control_plane import worker_main

    class Unix(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(os.environ["TORCH_WORKER_SERVER_SOCKET"])

    with worker_main():
        asked = Unix("localhost")
        asked.request("POST", "/handler/ping")
        tell("ping", asked.getresponse().status)
    """
    path = f"/tmp/elastane-test-{os.getpid()}.sock"
    options = ("--preload", "torch,torch.distributed")
    try:
        with agent(tmp_path, *options, body=body, TORCH_WORKER_SERVER_SOCKET=path) as one:
            assert one.wait(60) == 0, one.err
            assert one.told("ping.0.0") == "200"
    finally:
        Path(path).unlink(missing_ok=True)
