"""The program of a job on Ray, with a cluster of the test's own: signals, lost nodes, bad nodes."""

import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elastane.errors import ConfigurationError
from elastane.notices.rules import read_sources
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.process.endpoint import Endpoint
from elastane.ray import cluster as ray_cluster
from elastane.ray import host, job, rules
from elastane.ray.cluster import AgentEnd, RayAgent, RayCluster
from elastane.ray.job import RayJob, RayRequest
from elastane.ray.rules import RayDrain, RayNode

DEADLINE_S = 30.0  # below the limits for which a job waits in vain
ONE = {"CPU": 1.0}
ENDPOINT = Endpoint("10.0.0.9", 1)


class Agent:
    """An agent that ends when the test says so, or some turns of the loop after it was stopped."""

    def __init__(self, node, happened):
        self.node, self.happened = node, happened
        self.is_started = False
        self.stops_needed, self.turns = 1, 0
        self.stopped = asyncio.Event()
        self.end = asyncio.get_running_loop().create_future()

    async def run(self, words, environ, cwd):
        self.words, self.environ = words, environ
        return await self.end

    def leave(self, drain):
        self.happened.append(f"leave {self.node} {drain.left_s}")
        self._leave(0)

    def stop(self):
        self.happened.append(f"stop {self.node}")
        self.stopped.set()
        if self.happened.count(f"stop {self.node}") >= self.stops_needed:
            self._leave(self.turns)

    def _leave(self, turns):
        if turns:
            asyncio.get_running_loop().call_soon(self._leave, turns - 1)
        elif not self.end.done():
            self.happened.append(f"left {self.node}")
            self.end.set_result(AgentEnd(143))

    def kill(self):
        self.happened.append(f"kill {self.node}")


class Cluster:
    def __init__(self, *names):
        self.listed = [RayNode(name, f"10.0.0.{name}", ONE, ONE) for name in names]
        self.happened = []
        self.agents = asyncio.Queue()
        self.silent = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def brings_folder(self):
        return True

    def nodes(self):
        if self.listed is None:
            self.loop.call_soon_threadsafe(self.silent.set)
        return self.listed

    def hold(self, bundles):
        self.happened.append(f"hold {len(bundles)}")

    def agent_on(self, node, need):
        agent = Agent(node.node_id, self.happened)
        self.agents.put_nowait(agent)
        return agent


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Play a job of some nodes: `story(cluster, job, ended)` is awaited with its task."""
    monkeypatch.setattr(job, "_LOOK_S", 0.01)
    (tmp_path / "train.py").touch()

    def played(nodes, story, *words, serving=None):
        words = ["--rdzv-endpoint", "localhost:1", "--rdzv-backend", "elastane", *words]
        config = build(parse([*words, str(tmp_path / "train.py")], {}), {})

        async def main():
            cluster = Cluster(*nodes)
            one = RayJob(cluster, RayRequest(config, ("train.py",), {}, ONE))
            serves = asyncio.create_task(serving() if serving else asyncio.Event().wait())
            ended = asyncio.create_task(one.keep_agents(ENDPOINT, serves))
            try:
                await asyncio.wait_for(story(cluster, one, ended), DEADLINE_S)
            finally:
                ended.cancel()
                serves.cancel()

        asyncio.run(main())

    return played


def test_agents_meet_at_the_program_and_the_job_ends_with_their_code(play):
    async def story(cluster, job, ended):
        first, second = await cluster.agents.get(), await cluster.agents.get()
        await asyncio.sleep(0)  # their tasks begin
        assert first.words[:4] == ["--rdzv-endpoint", "10.0.0.9:1", "--node-id", "a"]
        assert first.environ["ELASTANE_TOKEN"] == second.environ["ELASTANE_TOKEN"]
        first.end.set_result(AgentEnd(1))
        second.end.set_result(AgentEnd(1))
        assert await ended == 1

    play("ab", story, "--nnodes", "2")


def test_an_agent_that_crashes_with_the_code_of_a_failed_job_is_replaced(play, monkeypatch):
    """The job goes on, as its coordinator and the other agent show."""
    monkeypatch.setattr(job, "_END_S", 0.05)
    monkeypatch.setattr(rules, "RETRY_S", 0.01)

    async def story(cluster, job, ended):
        first, second = await cluster.agents.get(), await cluster.agents.get()
        first.end.set_result(AgentEnd(1))
        again = await cluster.agents.get()
        assert again.node == first.node and not ended.done()
        for one in (second, again):
            one.end.set_result(AgentEnd(0))
        assert await ended == 0

    play("ab", story, "--nnodes", "2", "--shutdown-timeout", "0.05")


def test_a_program_that_is_stopped_holds_no_nodes_while_its_agents_leave(play):
    async def story(cluster, job, ended):
        await cluster.agents.get()
        job.stop(signal.SIGTERM)
        assert await ended == 128 + signal.SIGTERM
        assert cluster.happened == ["hold 2", "hold 0", "stop a", "left a", "kill a"]

    play("a", story, "--nnodes", "1:2")


def test_agents_may_drain_for_as_long_as_drain_timeout(play, monkeypatch):
    monkeypatch.setattr(job, "_END_S", 0.0)

    async def story(cluster, job, ended):
        agent = await cluster.agents.get()
        agent.turns = 20
        job.stop(signal.SIGTERM)
        await ended
        assert cluster.happened[-2:] == ["left a", "kill a"]

    play("a", story, "--drain-timeout", "300", "--shutdown-timeout", "0")


def test_a_second_signal_makes_agents_hurry(play):
    async def story(cluster, job, ended):
        agent = await cluster.agents.get()
        agent.stops_needed = 2
        job.stop(signal.SIGINT)
        await agent.stopped.wait()
        job.stop(signal.SIGTERM)
        assert await ended == 128 + signal.SIGINT

    play("a", story)


def test_a_fault_of_the_coordinator_ends_the_agents_at_once(play):
    fault = asyncio.Event()

    async def serving():
        await fault.wait()
        raise ConfigurationError("it cannot serve", slug="x")

    async def story(cluster, job, ended):
        await cluster.agents.get()
        fault.set()
        with pytest.raises(ConfigurationError, match="cannot serve"):
            await ended
        assert "left a" in cluster.happened

    play("a", story, serving=serving)


def test_a_lost_agent_is_replaced_although_ray_does_not_answer_for_a_while(play):
    async def story(cluster, job, ended):
        first = await cluster.agents.get()
        nodes, cluster.listed = cluster.listed, None
        first.end.set_result(AgentEnd(None, "node died"))
        await cluster.silent.wait()
        cluster.listed = [RayNode("b", "10.0.0.2", ONE, ONE), *nodes]
        second = await cluster.agents.get()
        assert second.node == "b"
        second.end.set_result(AgentEnd(0))
        assert await ended == 0

    play("a", story)


def test_the_agent_of_a_drained_node_leaves_once_and_another_node_gets_one(play):
    async def story(cluster, job, ended):
        first = await cluster.agents.get()
        [node] = cluster.listed
        other = RayNode("b", "10.0.0.2", ONE, ONE)
        cluster.listed = [dataclasses.replace(node, drain=RayDrain(30.0)), other]
        second = await cluster.agents.get()
        assert (first.node, second.node) == ("a", "b")
        assert cluster.happened.count("leave a 30.0") == 1
        second.end.set_result(AgentEnd(0))
        assert await ended == 0

    play("a", story, "--nnodes", "1")


@pytest.mark.parametrize(
    ("left_s", "first"), [(30.0, "30.0 Ray drains this node"), (None, "Ray drains this node")]
)
def test_an_agent_reads_from_a_file_that_its_node_is_drained(monkeypatch, left_s, first):
    started = []

    class Process:
        def __init__(self, words, env, **options):
            started.append(env["ELASTANE_NOTICES"])

        def wait(self):
            return 143

    monkeypatch.setattr(host.subprocess, "Popen", Process)
    one = host.AgentHost()
    one.leave(left_s)  # Also before its process starts.
    assert one.run([], {"ELASTANE_NOTICES": "aws"}, "") == 143
    [aws, file] = read_sources(started[0])
    assert str(aws) == "aws" and Path(file.where).read_text() == f"{first}\n"


def cannot_start():
    return ConfigurationError("no elastane there", slug="ray-agent")


def test_a_node_that_cannot_start_an_agent_is_left_out_while_others_run(play):
    async def story(cluster, job, ended):
        bad, good = await cluster.agents.get(), await cluster.agents.get()
        good.is_started = True
        bad.end.set_exception(cannot_start())
        third = await cluster.agents.get()
        assert third.node == "c"
        good.end.set_result(AgentEnd(0))
        third.end.set_exception(cannot_start())  # no reason to call the job failed
        assert await ended == 0

    play("abc", story, "--nnodes", "1:2")


def test_the_job_ends_if_no_node_can_start_an_agent(play):
    async def story(cluster, job, ended):
        for _ in "ab":
            agent = await cluster.agents.get()
            agent.end.set_exception(cannot_start())
        with pytest.raises(ConfigurationError, match="no elastane there"):
            await ended

    play("ab", story)


def test_an_agent_that_is_stopped_while_its_process_starts_leaves(monkeypatch):
    class Process:
        def __init__(self, *words, **options):
            self.signals = []
            one.stop()  # beside `run`, before this process is known

        def poll(self):
            return None

        def send_signal(self, number):
            self.signals.append(number)

        def wait(self):
            return 128 + self.signals[0] if self.signals else 0

    monkeypatch.setattr(host.subprocess, "Popen", Process)
    one = host.AgentHost()
    assert one.run([], {}, "") == 128 + signal.SIGTERM


class RayError(Exception):
    pass


ERRORS = {
    name: type(name, (RayError,), {})
    for name in ("RayTaskError", "RuntimeEnvSetupError", "ActorDiedError")
}


class Actor:
    """An actor whose start, or its agent, has this result; None: it never comes."""

    def __init__(self, *, start="ready", run=None):
        for name, result in (("__ray_ready__", start), ("run", run)):
            setattr(self, name, SimpleNamespace(remote=lambda *_, it=result: self._awaited(it)))

    async def _awaited(self, result):
        if result is None:
            await asyncio.Event().wait()
        if isinstance(result, Exception):
            raise result
        return result


def end_of(actor):
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, **ERRORS))
    agent = RayAgent(ray, actor, RayNode("a", "10.0.0.1", {}, {}))
    return asyncio.run(agent.run([], {}, "")), agent.is_started


def test_each_error_of_ray_about_an_actor_gives_the_end_of_its_agent(monkeypatch):
    assert end_of(Actor(run=75)) == (AgentEnd(75), True)
    died = ERRORS["ActorDiedError"]("the actor died\nits node was lost")
    assert end_of(Actor(run=died)) == (AgentEnd(None, "its node was lost"), True)
    for error in (
        ERRORS["RuntimeEnvSetupError"]("pip failed"),
        ERRORS["ActorDiedError"]("creation task failed"),
    ):
        with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1: .* failed"):
            end_of(Actor(start=error))
    monkeypatch.setattr(ray_cluster, "START_LIMIT_S", 0.0)
    end, is_started = end_of(Actor(start=None))
    assert end.code is None and "did not start" in end.reason and not is_started


def test_no_nodes_are_listed_while_ray_does_not_answer(monkeypatch):
    state = ModuleType("ray._private.state")
    state.available_resources_per_node = lambda: {"a": ONE}
    for name in ("ray", "ray._private"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    answers = [[{"NodeID": "a", "NodeManagerAddress": "h", "Resources": ONE, "Alive": True}]]

    def nodes():
        if not answers:
            raise RayError("GCS is away")
        return answers.pop()

    state.state = SimpleNamespace(get_draining_nodes=lambda: {"a": 0})
    ray = SimpleNamespace(nodes=nodes, exceptions=SimpleNamespace(RayError=RayError))
    assert RayCluster(ray).nodes() == [RayNode("a", "h", ONE, ONE, RayDrain(None))]
    assert RayCluster(ray).nodes() is None
