"""The printed samples of torch.distributed.elastic, with only the import's name changed.

Each is a separate program, on gloo. What samples leave open (a model, a loader, a store) is
defined above them; the samples are not changed. They have no `if __name__ == "__main__":`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from process_harness import worker_environment

from elastane.elastic.multiprocessing._children import is_guarded

MODEL = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

epochs, dataloader = 1, [torch.ones(2, 3)] * 2


class MyModel(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)


def tell(model):
    weights = torch.cat([part.detach().flatten() for part in model.parameters()])
    told = f"{dist.get_world_size()} {weights.tolist()}"
    Path(f"told.{dist.get_rank()}.{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(told)
"""
TRAINING = """
import elastane.elastic as elastic
from torch.nn.parallel import DistributedDataParallel as DDP


def train_loop():
    # Initialize elastic process group
    elastic.init_process_group(backend="gloo")
    model = DDP(MyModel())
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(epochs):
        for batch in dataloader:
            optimizer.zero_grad()
            model(batch + dist.get_rank()).sum().backward()
            optimizer.step()
    tell(model)
"""
AGENT = """
# Launch with elastic agent
spec = elastic.agent.server.WorkerSpec(
    role="trainer",
    local_world_size=4,
    entrypoint=train_loop
)
agent = elastic.agent.server.LocalElasticAgent(spec)
agent.run()
"""
CUSTOM = """
from elastane.elastic.rendezvous import RendezvousHandler

store, rank, world_size = dist.HashStore(), 0, 1


class CustomRendezvous(RendezvousHandler):
    def next_rendezvous(self):
        # Implement custom worker discovery
        return store, rank, world_size


# Configure elastic to use custom rendezvous
elastic.rendezvous.registry.register("custom", CustomRendezvous)
"""
CUSTOM_USED = """
from elastane.elastic.launcher import LaunchConfig, elastic_launch

config = LaunchConfig(1, 1, 2, rdzv_backend="custom", run_id="named")
elastic_launch(config, train_loop)()
"""
FAILURES = """
# Configure error handling
mp = elastic.multiprocessing.Std(
    entrypoint=train_loop,
    log_dir="./logs",
    monitor_interval=5,
    max_restarts=3
)
mp.run()
"""
FAILS_FIRST = """
inner = train_loop


def train_loop():
    print("a word", flush=True)
    if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "00":
        raise RuntimeError("once")
    inner()
"""


def run(folder, text):
    program = folder / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env=worker_environment(TMPDIR=str(folder), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(folder, count, restarts=0):
    found = {path.name: path.read_text() for path in folder.glob("told.*")}
    assert sorted(found) == [f"told.{rank}.{restarts}" for rank in range(count)]
    assert len(set(found.values())) == 1, "the ranks hold the same weights"
    assert next(iter(found.values())).startswith(f"{count} [")


@pytest.mark.soak
def test_the_sample_of_an_agent_trains_on_this_machine(tmp_path):
    run(tmp_path, MODEL + TRAINING + AGENT)
    told(tmp_path, 4)


@pytest.mark.soak
def test_the_sample_of_a_rendezvous_is_registered_and_can_be_launched_by_its_name(tmp_path):
    run(tmp_path, MODEL + TRAINING + CUSTOM + CUSTOM_USED)
    told(tmp_path, 2)


@pytest.mark.soak
def test_the_sample_of_failure_handling_restarts_and_keeps_output(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = run(tmp_path, MODEL + TRAINING + FAILS_FIRST + FAILURES)
    count = len(list(tmp_path.glob("told.*")))
    told(tmp_path, count, restarts=1)
    assert "a word" in shown
    kept = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    # A worker of the first attempt may have been stopped before it printed.
    assert set(kept) <= {"a word\n", ""}
    assert kept.count("a word\n") >= count


GUARDS = """
launch()
if __name__ == "__main__":
    launch()
else:
    launch()
if x and "__main__" == __name__:
    if y:
        launch()
""".lstrip()


@pytest.mark.parametrize(("line", "guarded"), [(1, False), (3, True), (5, False), (8, True)])
def test_a_line_is_guarded_below_a_question_for_the_name(line, guarded):
    assert is_guarded(GUARDS, line) is guarded


def test_the_package_names_its_modules_without_importing_torch():
    code = (
        "import sys, elastane.elastic as e; print('torch' in sys.modules, e.events.Event, dir(e))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("False") and "'rendezvous'" in done.stdout
