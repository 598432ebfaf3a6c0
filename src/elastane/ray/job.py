"""The program of a job on Ray: it serves the coordinator, and keeps an agent on each node.

Agents of nodes that are lost are started again, on nodes that arrive. A node that cannot start
elastane is left out while other nodes can. Fails with ConfigurationError if none can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastane.coordinator.host import CoordinatorHost
from elastane.errors import ConfigurationError, ExitCode
from elastane.observe.events import EventLog
from elastane.observe.logging import log_event, setup
from elastane.options.config import AgentConfig
from elastane.process import rpc
from elastane.process.endpoint import Endpoint, listen
from elastane.process.tls import TlsConfig
from elastane.protocol.log_events import LogEvent
from elastane.protocol.model import Outcome
from elastane.protocol.wire import derive_secret
from elastane.ray.cluster import AgentEnd, RayAgent, RayCluster, connected
from elastane.ray.rules import UNFIT_S, Placement, RayNode
from elastane.stores import new_token

_log = logging.getLogger("elastane.ray")
_LOOK_S = 1.0
# When a wait for nodes is logged, and how often again.
_SAY_AFTER_S = 10.0
_SAY_AGAIN_S = 120.0
# Beyond the limits that agents have for their own end: Ray's answer.
_END_S = 30.0


@dataclass(frozen=True)
class RayRequest:
    """The job. `config` is that of this program's coordinator, `words` are those of the agents.

    `environ` is set for each agent. `need`: the resources that Ray reserves on each node, CPU and
    GPU among them. `address` of the cluster; empty: RAY_ADDRESS, or the cluster of this machine.
    """

    config: AgentConfig
    words: tuple[str, ...]
    environ: Mapping[str, str]
    need: Mapping[str, float]
    address: str = ""


def run_job(request: RayRequest) -> int:
    """Run a job to its end; return its exit code."""
    with connected(request.address) as cluster:
        return asyncio.run(RayJob(cluster, request).run())


@dataclass(frozen=True)
class _PlacedAgent:
    """An agent on a node, from its start on."""

    node: RayNode
    agent: RayAgent
    end: asyncio.Task[AgentEnd]


class RayJob:
    """One job: its coordinator here, and its agents."""

    def __init__(self, cluster: RayCluster, request: RayRequest) -> None:
        self._cluster = cluster
        self._request = request
        self._spec = request.config.spec
        self._placement = Placement(self._spec.max_nodes, request.need)
        self._token = request.config.rendezvous.token or new_token()
        self._agents: dict[str, _PlacedAgent] = {}
        # Nodes whose agents have a notice that Ray drains them.
        self._given_notice: set[str] = set()
        # When agents ended with exit code 1, by their nodes, until it is known what that means.
        self._failed: dict[str, float] = {}
        self._asked = asyncio.Event()
        self._signal = 0
        # Why a node could not start elastane, until any node has.
        self._not_started: ConfigurationError | None = None
        self._is_silent = False
        self._short_since_s: float | None = None
        self._said_s = 0.0
        self._cwd = "" if cluster.brings_folder() else str(Path.cwd())

    async def run(self) -> int:
        """Serve and place until the job has ended, or a signal ended this program."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, int(number))
        setup("ray", self._request.config.environment.get("LOGLEVEL", ""))
        address = self._cluster.own_address()
        listener = listen(address, 0)
        assert listener is not None, "port 0 takes a free one"
        endpoint = Endpoint(address, listener.getsockname()[1])
        with contextlib.closing(listener), self._events() as tell:
            serving = asyncio.create_task(self._serve(listener, tell))
            try:
                return await self.keep_agents(endpoint, serving)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    def stop(self, number: int) -> None:
        """Ask all agents to leave, for this signal; a second one makes them hurry."""
        if self._signal:
            self._stop_agents()
        self._signal = self._signal or number
        self._asked.set()

    async def keep_agents(self, endpoint: Endpoint, serving: asyncio.Task[Outcome | None]) -> int:
        """Keep an agent on each node until the job has ended; return its exit code.

        No agent is left in any case. `serving`: the coordinator, which still serves meanwhile.
        """
        self._cluster.hold([self._request.need] * self._spec.max_nodes)
        try:
            return await self._until_over(endpoint, serving)
        finally:
            # First, since the request outlives this program if it is killed while agents leave.
            self._cluster.hold([])
            await self._end_agents()

    @contextlib.contextmanager
    def _events(self) -> Iterator[Callable[[LogEvent], None]]:
        """Log the coordinator's events where `elastane status` on this machine looks for them."""
        logs = self._request.config.logs
        log = EventLog(logs.base_dir, self._spec.job, "ray", socket.gethostname())

        def tell(event: LogEvent) -> None:
            log.log(event, "coordinator")
            log_event(event)

        try:
            yield tell
        finally:
            log.close()

    async def _serve(
        self, listener: socket.socket, tell: Callable[[LogEvent], None]
    ) -> Outcome | None:
        secret = derive_secret(self._spec.job, self._token)
        tls = self._request.config.rendezvous.tls
        proof = TlsConfig(cert=tls.cert, key=tls.key, ca=tls.ca) if tls else None
        access = rpc.Access(self._spec.job, secret, proof)
        return await CoordinatorHost(self._spec, access, tell).serve(listener)

    async def _until_over(self, endpoint: Endpoint, serving: asyncio.Task[Outcome | None]) -> int:
        asked = asyncio.create_task(self._asked.wait())
        try:
            while not (asked.done() or serving.done() or self._is_over()):
                await self._place(endpoint)
                self._judge_failed()
                waited = {one.end for one in self._agents.values()} | {asked, serving}
                await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._collect()
        finally:
            asked.cancel()
        if self._signal:
            return 128 + self._signal
        if serving.done():
            serving.result()  # Without a coordinator, agents would be waited for in vain.
        await self._wait_for_agents()
        outcome = serving.result() if serving.done() else None
        return outcome.exit_code if outcome is not None else self._placement.code or 0

    def _is_over(self) -> bool:
        """Whether the job has ended, as its agents have told."""
        return self._placement.code is not None

    async def _place(self, endpoint: Endpoint) -> None:
        """Start agents on nodes that have room for one; raise an error if no node can start one."""
        nodes = await asyncio.to_thread(self._cluster.nodes)
        if nodes is None and not self._is_silent:
            _log.warning("Ray lists no nodes; agents that run continue, and none is started")
        self._is_silent = nodes is None
        if nodes is None:
            return
        self._give_notices(nodes)
        for node in self._placement.due(nodes, time.monotonic()):
            self._start(node, endpoint)
        if self._not_started is not None and not self._agents:
            raise self._not_started
        self._say_short(nodes)

    def _give_notices(self, nodes: Sequence[RayNode]) -> None:
        """Give a notice to the agents of nodes that Ray drains, each once."""
        for node in nodes:
            one = self._agents.get(node.node_id)
            if node.drain is None or one is None or node.node_id in self._given_notice:
                continue
            self._given_notice.add(node.node_id)
            left_s = node.drain.left_s
            until = "" if left_s is None else f", which ends in {left_s:.0f} s"
            _log.warning("Ray drains the node %s%s: its agent leaves", node.address, until)
            one.agent.leave(node.drain)

    def _start(self, node: RayNode, endpoint: Endpoint) -> None:
        agent = self._cluster.agent_on(node, self._request.need)
        where = ["--rdzv-endpoint", str(endpoint), "--node-id", node.node_id[:12]]
        environ = {**self._request.environ, "ELASTANE_TOKEN": self._token}
        run = agent.run([*where, *self._request.words], environ, self._cwd)
        self._agents[node.node_id] = _PlacedAgent(node, agent, asyncio.create_task(run))

    def _collect(self) -> None:
        """Note which agents have ended, and which nodes cannot start one."""
        for node_id, one in [*self._agents.items()]:
            if one.agent.is_started:
                self._not_started = None
            if not one.end.done():
                continue
            del self._agents[node_id]
            self._given_notice.discard(node_id)
            one.agent.kill()
            try:
                end = one.end.result()
            except ConfigurationError as error:
                self._leave_out(node_id, error)
                continue
            if end.code == ExitCode.WORKER_FAILED:
                self._failed[node_id] = time.monotonic()
            else:
                self._placement.ended(node_id, end.code, time.monotonic())
            if not self._is_over():
                how = f"ended with exit code {end.code}" if end.code is not None else "is lost"
                why = f": {end.reason}" if end.reason else ""
                _log.warning("the agent on %s %s%s", one.node.address, how, why)

    def _judge_failed(self) -> None:
        """Decide what the ends with exit code 1 mean.

        It is the code of a job that failed, and of an agent that crashed. In the first case the
        coordinator and all other agents end as well; in the second the agent is replaced.
        """
        now_s = time.monotonic()
        limit_s = self._spec.timing.shutdown_timeout_s + _END_S
        for node_id, at_s in [*self._failed.items()]:
            if not self._agents:
                self._placement.ended(node_id, ExitCode.WORKER_FAILED, now_s)
            elif now_s - at_s > limit_s:
                _log.error("an agent crashed, since the job continues without it; it is replaced")
                self._placement.ended(node_id, None, now_s)
            else:
                continue
            del self._failed[node_id]

    def _leave_out(self, node_id: str, error: ConfigurationError) -> None:
        """Leave out a node that cannot start elastane, as one that is unfit."""
        self._placement.ended(node_id, ExitCode.NODE_UNFIT, time.monotonic())
        if not self._is_over():
            self._not_started = error
            _log.error("%s\n  the node is left out for %g s", error, UNFIT_S)

    async def _wait_for_agents(self) -> None:
        """Wait for the agents that still run; the coordinator has sent them the end of the job."""
        if self._agents:
            limit_s = self._spec.timing.shutdown_timeout_s + _END_S
            await asyncio.wait({one.end for one in self._agents.values()}, timeout=limit_s)
            self._collect()

    def _stop_agents(self) -> None:
        for one in self._agents.values():
            one.agent.stop()

    async def _end_agents(self) -> None:
        """Let the agents that still run leave the job in order, and end their actors."""
        if not self._agents:
            return
        self._stop_agents()
        timing = self._spec.timing
        limit_s = timing.drain_timeout_s + timing.shutdown_timeout_s + _END_S
        await asyncio.wait({one.end for one in self._agents.values()}, timeout=limit_s)
        for one in self._agents.values():
            one.end.cancel()
            one.agent.kill()
        await asyncio.gather(*(one.end for one in self._agents.values()), return_exceptions=True)

    def _say_short(self, nodes: Sequence[RayNode]) -> None:
        """Log from time to time that the job has fewer nodes than it needs."""
        now_s = time.monotonic()
        started = sum(one.agent.is_started for one in self._agents.values())
        if started >= self._spec.min_nodes:
            self._short_since_s = None
            return
        if self._short_since_s is None:
            self._short_since_s, self._said_s = now_s, now_s - _SAY_AGAIN_S + _SAY_AFTER_S
        if now_s - self._said_s < _SAY_AGAIN_S:
            return
        self._said_s = now_s
        need = ", ".join(f"{name} {count:g}" for name, count in self._request.need.items())
        large = sum(map(self._placement.is_large_enough, nodes))
        _log.warning(
            "waiting for nodes with %s: the job needs %d; agents run on %d, and Ray is starting"
            " %d; of %d nodes in the cluster, %d have that much, free or in use",
            need, self._spec.min_nodes, started, len(self._agents) - started, len(nodes), large,
        )  # fmt: skip
