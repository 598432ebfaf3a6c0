"""A script that fails after its first steps: one that gets no further, and one that does."""

import json
import signal

import pytest
from supervise import words_agent, write_script

# The script fails at one step of the job, or after five steps of each attempt. Each update depends
# on all earlier ones, so a step that is lost or made twice changes the final weights.
SCRIPT = """
import ctypes, os, resource, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def fail(how):
    if how == "null":
        ctypes.string_at(0)
    if how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
        bytearray((1 << 42) + os.getpid())
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    raise ValueError("a bad sample")

fails, how, path = sys.argv[1], sys.argv[2], "last.pt"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 20):
    if fails == "at a step" and step == 10 or fails == "after steps" and step == first + 5:
        fail(how)
    parallel(torch.full((2, 4), step / 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 4 == 0:
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step + 1}, path + ".new")
            os.replace(path + ".new", path)
        dist.barrier()
if dist.get_rank() == 0:
    total = sum(float(each.double().sum()) for each in model.parameters())
    print("weights", repr(total), flush=True)
"""


SOAK = pytest.mark.soak


def job(folder, fails, *options, how="error"):
    folder.mkdir()
    script = write_script(folder, SCRIPT)
    words = ("--nproc-per-node", "2", "--standalone", "--max-restarts", "12")
    words += (
        "--report-file",
        "report.json",
        "--rdzv-conf",
        "crash_loop=0",
        *options,
        script,
        fails,
        how,
    )
    with words_agent(folder, *words) as agent:
        code = agent.wait(120)
        return code, agent.out, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--in-place",), marks=SOAK)], ids=["restarts", "in place"]
)
def test_a_script_that_fails_at_one_step_again_and_again_ends_the_job(tmp_path, options):
    code, _, report = job(tmp_path / "job", "at a step", *options)
    assert code == 1
    # The first attempt makes ten steps; those that follow make two from the checkpoint.
    assert "3 attempts in a row failed after" in report["reason"], report["reason"]
    assert report["restarts_used"] == 3


@pytest.mark.parametrize(
    ("how", "options", "names"),
    [
        ("null", (), ["SIGSEGV", "ctypes/__init__.py:"]),
        pytest.param("null", ("--in-place",), ["SIGSEGV", "ctypes/__init__.py:"], marks=SOAK),
        pytest.param("SIGABRT", (), ["SIGABRT", "script.py:"], marks=SOAK),
        ("memory", ("--in-place",), ["MemoryError: out of memory", "script.py:"]),
    ],
    ids=["a null pointer", "a null pointer in place", "an abort", "no memory in place"],
)
def test_a_crash_of_the_process_at_one_step_again_and_again_ends_the_job(
    tmp_path, how, options, names
):
    code, _, report = job(tmp_path / "job", "at a step", *options, how=how)
    assert code == 1
    assert "3 attempts in a row failed after" in report["reason"], report["reason"]
    assert all(name in report["reason"] for name in names), report["reason"]
    assert report["restarts_used"] == 3


ALIKE = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(9):
    batch = {"input": torch.ones(2, 4)} if step < 3 else {}
    if step == 3 and sys.argv[1] == "exits":
        sys.exit(7)
    model(batch["input"]).sum().backward()
"""


@pytest.mark.parametrize(("fails", "code"), [("raises", 1), pytest.param("exits", 7, marks=SOAK)])
def test_workers_that_fail_alike_in_place_end_by_their_error_alone(tmp_path, fails, code):
    """A worker that has ended closes the connections of others, which are still ending."""
    script = write_script(tmp_path, ALIKE)
    words = ("--nproc-per-node", "4", "--standalone", "--max-restarts", "4", "--in-place")
    words += ("--report-file", "report.json", "--rdzv-conf", "crash_loop=0", script, fails)
    with words_agent(tmp_path, *words) as agent:
        assert agent.wait(120) == 1
        out = agent.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert "SIGABRT" not in out and "terminate called" not in out, out
    # One that shows its error may be stopped while it ends.
    assert report["root_cause"]["exit_code"] in (code, -signal.SIGTERM), report
    if fails == "raises":
        assert report["restarts_used"] == 2, report["reason"]
        first = report["root_cause"]["message"].splitlines()[1]
        assert first.strip().startswith(f'File "{tmp_path}') and ", line 14, in <module>" in first


@SOAK
def test_a_kill_at_one_step_again_and_again_uses_the_budget(tmp_path):
    code, _, report = job(tmp_path / "job", "at a step", "--max-restarts", "5", how="SIGKILL")
    assert (code, report["restarts_used"]) == (1, 5)
    assert "all 5 restarts of the job are used" in report["reason"], report["reason"]


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--in-place",), marks=SOAK)], ids=["restarts", "in place"]
)
def test_a_script_that_gets_further_between_equal_failures_completes(tmp_path, options):
    code, out, report = job(tmp_path / "job", "after steps", *options)
    assert (code, report["restarts_used"]) == (0, 4), report["reason"]
    undisturbed = job(tmp_path / "undisturbed", "never", *options)[1]
    assert out.count("weights") == undisturbed.count("weights") == 1
    assert out.split("weights")[1] == undisturbed.split("weights")[1]


# No worker can use one sample; or all workers fail at one step, once.
STEPS = """
import atexit, ctypes, os, sys, time
import elastane
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((4,), index / 96)

def is_bad(step, batch):
    if sys.argv[1] == "a sample":
        return bool((batch == 50 / 96).any())
    return step == 6 and os.getpid() in first

with elastane.init() as job:
    first = {os.getpid()} if not os.path.exists("began") else set()
    net = torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=job.process_group)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    batches = elastane.ElasticBatchSampler(96, global_batch_size=12, seed=0)
    loader = torch.utils.data.DataLoader(Samples(), batch_sampler=batches)
    job.track(model=net, optimizer=optimizer)
    for step, batch in job.steps(loader, until_epoch=2):
        with step:
            if step.number == 2:
                open("began", "w").close()
            if is_bad(step.number, batch):
                if sys.argv[2:] == ["crash"]:
                    ctypes.string_at(0)
                if sys.argv[2:]:
                    atexit.register(time.sleep, float(sys.argv[2]))
                raise ValueError("a bad sample")
            step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if job.rank == 0:
        print("steps", step.number, flush=True)
"""


def steps_job(folder, *fails):
    script = folder / "steps.py"
    script.write_text(STEPS)
    words = ("--nproc-per-node", "3", "--standalone", "--max-restarts", "12", "--min-workers", "1")
    words += ("--report-file", "report.json", "--rdzv-conf", "crash_loop=0", str(script), *fails)
    with words_agent(folder, *words) as agent:
        code = agent.wait(120)
        return code, agent.out, json.loads((folder / "report.json").read_text())


def test_a_sample_that_no_worker_can_use_ends_a_job_whose_lost_workers_are_replaced(tmp_path):
    code, _, report = steps_job(tmp_path, "a sample")
    assert code == 1
    assert "3 attempts in a row failed after" in report["reason"], report["reason"]
    assert "a bad sample" in report["reason"] and report["restarts_used"] <= 4


@SOAK
def test_a_sample_that_crashes_each_worker_ends_a_job_whose_lost_workers_are_replaced(tmp_path):
    code, _, report = steps_job(tmp_path, "a sample", "crash")
    assert code == 1
    assert "3 attempts in a row failed after" in report["reason"], report["reason"]
    assert "SIGSEGV" in report["reason"] and report["restarts_used"] <= 4


def test_workers_that_end_long_after_their_error_count_in_their_worlds(tmp_path):
    """The others have formed two further worlds before the first of these processes ends."""
    code, _, report = steps_job(tmp_path, "a sample", "2")
    assert code == 1
    assert "3 attempts in a row failed after" in report["reason"], report["reason"]
    assert "a bad sample" in report["reason"] and report["restarts_used"] <= 4


def test_workers_that_fail_at_one_step_at_once_made_one_attempt(tmp_path):
    code, out, report = steps_job(tmp_path, "all at once")
    assert code == 0, report["reason"]
    assert out.count("steps") == 1
