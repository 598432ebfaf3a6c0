"""Runs commands as users type them, and returns the environment of their workers."""

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager

TELL = """\
import json, os, sys
from pathlib import Path

def tell(**more):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT",
             "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
    said = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:]} | more
    path = Path(f"rank{os.environ['RANK']}.{os.getpid()}.json")
    path.with_suffix(".part").write_text(json.dumps(said))
    path.with_suffix(".part").rename(path)
"""
PLAIN = "from tell import tell\ntell()\n"
# A zygote without torch, for workers that do not need it.
LIGHT = {"ELASTANE_PRELOAD": "json"}


@contextmanager
def running(folder, argv, name, **environ):
    """Run one agent in the background; all its processes end with the block."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    with (folder / f"{name}.log").open("wb") as log:
        agent = subprocess.Popen(
            argv,
            cwd=folder,
            env={**clean, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)  # its orphan reaper ends the workers
                agent.wait(90)


def end_of(folder, argv, nodes=1, **environ):
    """Run one command on each node; return the reports of its workers, by rank."""
    with ExitStack() as stack:
        agents = [
            stack.enter_context(running(folder, argv, f"node{node}", **environ))
            for node in range(nodes)
        ]
        codes = [agent.wait(90) for agent in agents]
    logs = "".join(path.read_text() for path in sorted(folder.glob("node*.log")))
    assert codes == [0] * nodes, logs
    found = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return {int(worker["RANK"]): worker for worker in found}


def until(condition, what, deadline_s=90):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def write(folder, body, name="train.py"):
    (folder / name).write_text(body)
    return name
