"""Documented command lines of other launchers run to their end under our name.

The texts are from the pages of torchrun, TorchElastic's launcher and Bagua. `$` marks words that a
reader fills in. Several nodes are several agents here.
"""

import json
import shlex
import sys
from contextlib import ExitStack
from string import Template

import pytest
from command_harness import LIGHT, PLAIN, TELL, end_of, running, until, write
from etcd_server import shared_cluster
from ports import free_port

RUN = (sys.executable, "-m", "elastane.run")
# The documented program: the words that replace it.
RENAMED = {
    "torchrun": (sys.executable, "-m", "elastane", "run"),
    "python -m torch.distributed.run": RUN,
    "python -m torchelastic.distributed.launch": RUN,
    "python -m bagua.distributed.run": RUN,
    "python -m torch.distributed.launch": (sys.executable, "-m", "elastane.launch"),
}
SINGLE = "--standalone --nnodes=1 {nproc}=$NUM_TRAINERS $SCRIPT --arg1 x"
STACKED = "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 {nproc}=$NUM_TRAINERS $SCRIPT"
FIXED = """--nnodes=$NUM_NODES {nproc}=$NUM_TRAINERS --max-restarts=3 --rdzv-id=$JOB_ID
    --rdzv-backend=c10d --rdzv-endpoint=$HOST_NODE_ADDR $SCRIPT"""
ELASTIC = """--nnodes=1:4 {nproc}=$NUM_TRAINERS --max-restarts=3 --rdzv-id=$JOB_ID
    --rdzv-backend=c10d --rdzv-endpoint=$HOST_NODE_ADDR $SCRIPT"""
TORCHELASTIC_SINGLE = "--standalone --nnodes=1 --nproc_per_node=$NUM_TRAINERS $SCRIPT --arg1 x"
TORCHELASTIC_FIXED = """--nnodes=$NUM_NODES --nproc_per_node=$NUM_TRAINERS --rdzv_id=$JOB_ID
    --rdzv_backend=etcd --rdzv_endpoint=$ETCD_HOST:$ETCD_PORT $SCRIPT"""
TORCHELASTIC_ELASTIC = """--nnodes=1:4 --nproc_per_node=$NUM_TRAINERS --rdzv_id=$JOB_ID
    --rdzv_backend=etcd --rdzv_endpoint=$ETCD_HOST:$ETCD_PORT $SCRIPT"""
BAGUA_ELASTIC = """--nnodes=1:4 --nproc_per_node=$NUM_TRAINERS --rdzv_id=$JOB_ID
    --rdzv_backend=c10d --rdzv_endpoint=$HOST_NODE_ADDR $SCRIPT"""
FAILS_ONCE = """\
import os, sys
from tell import tell
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3 if os.environ["RANK"] == "1" else __import__("time").sleep(600))
tell()
"""
GLOO = """\
import torch, torch.distributed as dist
from tell import tell
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
tell(total=int(total))
dist.destroy_process_group()
"""
LEGACY = """\
import argparse, os
from tell import tell
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)
parser.add_argument("--arg1")
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"])
tell()
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def words(program, text, **filled):
    """Return the words of a command, with the program replaced and the blanks filled in."""
    return [*RENAMED[program], *shlex.split(Template(text).substitute(filled))]


@pytest.mark.parametrize(
    ("program", "nproc"),
    [("torchrun", "--nproc-per-node"), ("python -m torch.distributed.run", "--nproc_per_node")],
)
def test_torchrun_single_node_multi_worker(here, program, nproc):
    argv = words(program, SINGLE.format(nproc=nproc), NUM_TRAINERS=2, SCRIPT=write(here, PLAIN))
    told = end_of(here, argv, **LIGHT)
    assert [told[rank]["LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"]
    assert told[1]["argv"] == ["--arg1", "x"]
    assert told[1]["WORLD_SIZE"] == "2"


def test_torchrun_stacked_jobs_of_one_host_do_not_meet(here):
    text = STACKED.format(nproc="--nproc-per-node")
    argv = words("torchrun", text, NUM_TRAINERS=1, SCRIPT=write(here, PLAIN))
    with ExitStack() as stack:
        jobs = [stack.enter_context(running(here, argv, name, **LIGHT)) for name in ("a", "b")]
        assert [job.wait(60) for job in jobs] == [0, 0]
    told = [json.loads(path.read_text()) for path in here.glob("rank*.json")]
    assert [worker["WORLD_SIZE"] for worker in told] == ["1", "1"]
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in told}) == 2


def test_torchrun_fault_tolerant(here):
    text = FIXED.format(nproc="--nproc-per-node")
    address = f"localhost:{free_port()}"
    script = write(here, FAILS_ONCE)
    argv = words(
        "torchrun",
        text,
        NUM_NODES=2,
        NUM_TRAINERS=1,
        JOB_ID=77,
        HOST_NODE_ADDR=address,
        SCRIPT=script,
    )
    told = end_of(here, argv, nodes=2, **LIGHT)
    assert set(told) == {0, 1}
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in told.values()} == {"1"}
    assert {worker["TORCHELASTIC_MAX_RESTARTS"] for worker in told.values()} == {"3"}
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in told.values()} == {"77"}


# Bagua's command and torchrun's differ in spelling only.
@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("python -m bagua.distributed.run", BAGUA_ELASTIC),
        pytest.param("torchrun", ELASTIC.format(nproc="--nproc-per-node"), marks=pytest.mark.soak),
    ],
    ids=["bagua", "torchrun"],
)
def test_elastic_with_two_of_four_nodes(here, program, text):
    address = f"localhost:{free_port()}"
    script = write(here, PLAIN)
    argv = words(program, text, NUM_TRAINERS=2, JOB_ID=1, HOST_NODE_ADDR=address, SCRIPT=script)
    told = end_of(here, argv, nodes=2, **LIGHT)
    assert set(told) == {0, 1, 2, 3}
    assert {worker["WORLD_SIZE"] for worker in told.values()} == {"4"}
    assert {worker["GROUP_RANK"] for worker in told.values()} == {"0", "1"}


@pytest.mark.torch
def test_torchrun_with_a_process_group_over_two_nodes(here):
    text = FIXED.format(nproc="--nproc-per-node")
    address = f"localhost:{free_port()}"
    script = write(here, GLOO)
    argv = words(
        "torchrun",
        text,
        NUM_NODES=2,
        NUM_TRAINERS=1,
        JOB_ID=5,
        HOST_NODE_ADDR=address,
        SCRIPT=script,
    )
    told = end_of(here, argv, nodes=2, ELASTANE_PRELOAD="torch,torch.distributed")
    assert [worker["total"] for worker in told.values()] == [2, 2]


def test_torchrun_with_a_module(here):
    text = "--standalone --nnodes=1 --nproc-per-node=2 -m train --arg1 x"
    write(here, PLAIN)
    told = end_of(here, words("torchrun", text), **LIGHT)
    assert [told[rank]["argv"] for rank in (0, 1)] == [["--arg1", "x"]] * 2


def test_the_older_launcher_gives_the_script_its_local_rank(here):
    text = "--nproc_per_node=$NUM_TRAINERS $SCRIPT --arg1 x"
    script = write(here, LEGACY)
    argv = words("python -m torch.distributed.launch", text, NUM_TRAINERS=2, SCRIPT=script)
    told = end_of(here, argv, **LIGHT)
    assert told[1]["argv"] == ["--local-rank=1", "--arg1", "x"]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("python -m torch.distributed.launch", "--use-env $SCRIPT --arg1"),
        ("torchrun", "$SCRIPT --arg1"),
    ],
)
def test_the_older_launcher_with_use_env_is_run(here, program, text):
    argv = words(program, text, SCRIPT=write(here, PLAIN))
    assert end_of(here, argv, **LIGHT)[0]["argv"] == ["--arg1"]


def test_the_older_launcher_over_two_nodes_with_master_address(here):
    text = """--nproc_per_node=1 --nnodes=2 --node_rank=$RANK --master_addr=127.0.0.1
        --master_port=$PORT $SCRIPT"""
    port, script = free_port(), write(here, LEGACY)
    with ExitStack() as stack:
        agents = []
        for rank in (0, 1):
            filled = {"RANK": rank, "PORT": port, "SCRIPT": script}
            argv = words("python -m torch.distributed.launch", text, **filled)
            agents.append(stack.enter_context(running(here, argv, f"node{rank}", **LIGHT)))
        assert [agent.wait(60) for agent in agents] == [0, 0]
    assert sorted(int(path.name[4]) for path in here.glob("rank*.json")) == [0, 1]


def test_the_console_of_a_plain_run_has_no_warning(here):
    """torchrun warns of an unset master_addr whenever no endpoint is given."""
    argv = words("torchrun", "--rdzv-backend=c10d --nnodes=1 $SCRIPT", SCRIPT=write(here, PLAIN))
    end_of(here, argv, **LIGHT)
    assert (here / "node0.log").read_text() == ""


@pytest.mark.parametrize("environ", [{"ELASTANE_NO_ZYGOTE": "1"}, LIGHT], ids=["exec", "fork"])
def test_what_a_script_prints_is_shown_at_once(here, environ):
    """torchrun runs scripts by python -u. A line in a buffer is lost with its worker."""
    body = (
        "import os, time\nprint('I am here')\nwhile not os.path.exists('seen'): time.sleep(0.01)\n"
    )
    environ = {**environ, "PYTHONUNBUFFERED": ""}
    with running(here, words("torchrun", write(here, body)), "node0", **environ) as agent:
        until(lambda: "I am here" in (here / "node0.log").read_text(), "the line is shown")
        (here / "seen").touch()
        assert agent.wait(60) == 0


# TorchElastic's launcher page


@pytest.fixture
def etcd():
    """Return the host and port of a real server with the v2 API."""
    server = shared_cluster(1, ("--enable-v2",)).members[0]
    return {"ETCD_HOST": "127.0.0.1", "ETCD_PORT": server.port}


def test_torchelastic_single_node_with_a_sidecar(here):
    program = "python -m torchelastic.distributed.launch"
    argv = words(program, TORCHELASTIC_SINGLE, NUM_TRAINERS=2, SCRIPT=write(here, PLAIN))
    told = end_of(here, argv, **LIGHT)
    assert set(told) == {0, 1}
    assert told[0]["argv"] == ["--arg1", "x"], (
        "unlike torch.distributed.launch, it adds no --local-rank"
    )


@pytest.mark.parametrize(
    "text",
    [TORCHELASTIC_ELASTIC, pytest.param(TORCHELASTIC_FIXED, marks=pytest.mark.soak)],
    ids=["1:4", "fixed"],
)
def test_torchelastic_over_etcd(here, etcd, text):
    program = "python -m torchelastic.distributed.launch"
    filled = {"NUM_NODES": 2, "NUM_TRAINERS": 1, "JOB_ID": here.name, "SCRIPT": write(here, PLAIN)}
    told = end_of(here, words(program, text, **filled, **etcd), nodes=2, **LIGHT)
    assert set(told) == {0, 1}
    assert {worker["WORLD_SIZE"] for worker in told.values()} == {"2"}
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in told.values()} == {here.name}
