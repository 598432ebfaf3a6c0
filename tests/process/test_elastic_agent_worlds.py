"""LocalElasticAgents of one world, each in its own process, and how signals end them."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest
from launch_support import SUPPORT, gone, kill, program, told, worker
from ports import free_port
from process_harness import until

NODE = """
    from elastane.elastic.agent.server import LocalElasticAgent, WorkerSpec
    from elastane.elastic.multiprocessing import DefaultLogsSpecs
    from elastane.elastic.rendezvous import RendezvousParameters
    from elastane.elastic.rendezvous.registry import get_rendezvous_handler

    low, high = map(int, os.environ["NODES"].split(":"))
    parameters = RendezvousParameters(
        "c10d", os.environ["ENDPOINT"], "world", low, high, last_call="0.3", gather="0.2"
    )
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="r", local_world_size=int(os.environ["SIZE"]), rdzv_handler=handler,
        entrypoint=sys.executable, args=(os.environ["WORKER"],), max_restarts=1,
        monitor_interval=0.02,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(), shutdown_timeout=1)
    try:
        tell(os.environ["NODE"] + ".end", sorted(agent.run().return_values))
    finally:
        handler.shutdown()
"""
WORK = """
    while not (here / "finish").exists():
        time.sleep(0.01)
"""


class Nodes:
    """Programs that run an agent each, all of one world."""

    def __init__(self, folder, nodes, stack):
        self.folder, self.nodes, self.stack = folder, nodes, stack
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.worker = worker(folder, WORK)

    def start(self, name, size=1):
        env = {"ENDPOINT": self.endpoint, "WORKER": self.worker, "NODES": self.nodes}
        one = program(self.folder, NODE, NODE=name, SIZE=str(size), **env)
        return self.stack.enter_context(one)

    def finish(self):
        (self.folder / "finish").touch()


@pytest.fixture
def nodes(tmp_path):
    with ExitStack() as stack:
        yield lambda count: Nodes(tmp_path, count, stack)


@pytest.mark.soak
def test_agents_of_two_nodes_share_a_world_and_its_restarts(tmp_path, nodes):
    world = nodes("2:2")
    a, b = world.start("a", 1), world.start("b", 2)
    first = told(tmp_path, 3)
    assert [env["RANK"] for env in first] == ["0", "1", "2"]
    assert {env["WORLD_SIZE"] for env in first} == {"3"}
    kill(next(env for env in first if env["NODE"] == "a"))
    second = told(tmp_path, 3, TORCHELASTIC_RESTART_COUNT="1")
    assert len({env["NODE"] for env in second}) == 2, "one count for both"
    assert len({env["MASTER_PORT"] for env in second}) == 1
    world.finish()
    assert sorted(a.told("a.end") + b.told("b.end")) == [0, 1, 2]
    assert [a.wait(), b.wait()] == [0, 0]


def test_agents_continue_without_a_killed_one_and_admit_a_new_one(tmp_path, nodes):
    world = nodes("1:2")
    a = world.start("a")
    told(tmp_path, 1, WORLD_SIZE="1", NODE="a")
    b = world.start("b")
    both = told(tmp_path, 2, WORLD_SIZE="2")
    b.process.kill()
    told(tmp_path, 2, WORLD_SIZE="1", NODE="a")
    b.gone()
    assert gone(both)
    c = world.start("c")
    told(tmp_path, 1, WORLD_SIZE="2", NODE="c")
    world.finish()
    assert sorted(a.told("a.end") + c.told("c.end")) == [0, 1]
    assert {env["TORCHELASTIC_RESTART_COUNT"] for env in told(tmp_path, 6)} == {"0"}


ALONE = """
    import launch_support
    from elastane.elastic.agent.server import LocalElasticAgent, WorkerSpec
    from elastane.elastic.multiprocessing import DefaultLogsSpecs

    spec = WorkerSpec(
        role="r", local_world_size=2, rdzv_handler=launch_support.LocalHandler(),
        entrypoint=sys.executable, args=(os.environ["WORKER"],), max_restarts=1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(), shutdown_timeout=1)
    try:
        agent.run()
    except SignalException as error:
        tell("end", error.sigval.name)
"""
FAMILY = """
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"])
    (here / ("stubborn-" + env["RANK"])).touch()
    time.sleep(600)
"""


def test_a_signal_ends_workers_that_ignore_it_and_their_children(tmp_path):
    script = worker(tmp_path, FAMILY)
    with program(tmp_path, ALONE, WORKER=script, **SUPPORT) as one:
        until(lambda: len(list(tmp_path.glob("stubborn-*"))) == 2, "both workers run")
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.told("end") == "SIGTERM"
        assert one.wait() == 0
        one.gone()
