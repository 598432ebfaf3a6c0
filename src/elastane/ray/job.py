"""The program of a job on Ray: it serves the coordinator, and keeps an agent on each node.

Agents of nodes that are lost are started again, on nodes that arrive. Owns the connection to Ray,
the actors, and what the program waits for. Fails with ConfigurationError if there is no cluster, or
Ray cannot start elastane on a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastane.coordinator.host import CoordinatorHost, Takeover
from elastane.errors import ConfigurationError
from elastane.observe.events import EventLog
from elastane.observe.logging import log_event, setup
from elastane.options.config import AgentConfig
from elastane.process import environment, rpc
from elastane.process.endpoint import listen
from elastane.process.tls import TlsConfig
from elastane.protocol.log_events import LogEvent
from elastane.protocol.model import Outcome
from elastane.protocol.wire import derive_secret
from elastane.ray.host import AgentHost
from elastane.ray.rules import Placement, RayNode, nodes_of
from elastane.stores import new_token

_log = logging.getLogger("elastane.ray")
_LOOK_S = 1.0
# When a wait for nodes is logged, and how often again.
_SAY_AFTER_S = 10.0
_SAY_AGAIN_S = 120.0
# Beyond --shutdown-timeout: the agents' own end, and Ray's answer.
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
    ray = _connected(request.address)
    try:
        return asyncio.run(_RayJob(ray, request).run())
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    """Return the module ray, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ConfigurationError(
            "elastane ray needs the package ray, which is not installed",
            slug="extra-missing",
            expected="Ray, in the version of the cluster",
            next_step="pip install 'elastane[ray]'",
        ) from None
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"no Ray cluster: {str(error).splitlines()[0] if str(error) else error!r}",
            slug="ray-cluster",
            where=address or environment.get("RAY_ADDRESS") or "this machine",
            expected="a cluster that runs, and this program on one of its nodes",
            next_step="ray job submit -- elastane ray ..., or ray start --head for one machine",
        ) from error
    return ray


@dataclass(frozen=True)
class _Running:
    """An agent that runs on a node; `end` gives its exit code."""

    node: RayNode
    actor: Any
    end: asyncio.Task[int | None]


class _RayJob:
    """One job: its coordinator here, and its agents."""

    def __init__(self, ray: Any, request: RayRequest) -> None:
        self._ray = ray
        self._request = request
        self._spec = request.config.spec
        self._placement = Placement(self._spec.max_nodes, request.need)
        self._token = request.config.rendezvous.token or new_token()
        self._agents: dict[str, _Running] = {}
        self._asked = asyncio.Event()
        self._signal = 0
        self._short_since_s: float | None = None
        self._said_s = 0.0
        # Ray copies the working folder of a job to each node, and starts actors in it.
        brought = ray.get_runtime_context().runtime_env.get("working_dir")
        self._cwd = "" if brought else str(Path.cwd())

    async def run(self) -> int:
        """Serve and place until the job has ended, or a signal ended this program."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask, int(number))
        setup("ray", self._request.config.environment.get("LOGLEVEL", ""))
        address = self._ray.util.get_node_ip_address()
        listener = listen(address, 0)
        assert listener is not None, "port 0 takes a free one"
        endpoint = f"{address}:{listener.getsockname()[1]}"
        with contextlib.closing(listener), self._events() as tell:
            serving = asyncio.create_task(self._serve(listener, tell))
            try:
                return await self._run(endpoint, serving)
            finally:
                await self._end_agents()
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                self._ask_for_nodes([])

    @contextlib.contextmanager
    def _events(self) -> Any:
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
        return await CoordinatorHost(self._spec, access, tell).serve(listener, Takeover())

    async def _run(self, endpoint: str, serving: asyncio.Task[Outcome | None]) -> int:
        self._ask_for_nodes([dict(self._request.need)] * self._spec.max_nodes)
        asked = asyncio.create_task(self._asked.wait())
        try:
            while not (asked.done() or serving.done() or self._is_over()):
                await self._place(endpoint)
                waited = {one.end for one in self._agents.values()} | {asked, serving}
                await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._collect()
        finally:
            asked.cancel()
        if asked.done() and not asked.cancelled():
            return 128 + self._signal
        await self._wait_for_agents()
        if serving.done():
            outcome = serving.result()
            if outcome is not None:
                return outcome.exit_code
        return self._placement.code or 0

    def _is_over(self) -> bool:
        """Whether the job has ended, as its agents have told."""
        return self._placement.code is not None

    def _ask(self, number: int) -> None:
        self._signal = self._signal or number
        self._asked.set()

    def _ask_for_nodes(self, bundles: list[dict[str, float]]) -> None:
        """Let the autoscaler hold nodes for all agents, also while none is placed."""
        with contextlib.suppress(Exception):  # A cluster without an autoscaler needs no request.
            from ray.autoscaler.sdk import request_resources

            request_resources(bundles=bundles)

    async def _place(self, endpoint: str) -> None:
        """Start agents on nodes that are free for one."""
        nodes = nodes_of(await asyncio.to_thread(self._ray.nodes))
        for node in self._placement.due(nodes, time.monotonic()):
            self._start(node, endpoint)
        self._say_short(nodes)

    def _start(self, node: RayNode, endpoint: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        need = dict(self._request.need)
        cpus, gpus = need.pop("CPU", 0.0), need.pop("GPU", 0.0)
        actor = (
            self._ray.remote(AgentHost)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=need,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote()
        )
        words = ["--rdzv-endpoint", endpoint, "--node-id", node.node_id[:12], *self._request.words]
        environ = {**self._request.environ, "ELASTANE_TOKEN": self._token}
        end = asyncio.create_task(self._end_of(actor, node, words, environ))
        self._agents[node.node_id] = _Running(node, actor, end)

    async def _end_of(
        self, actor: Any, node: RayNode, words: Sequence[str], environ: Mapping[str, str]
    ) -> int | None:
        """Return the exit code of a node's agent; None if it was lost with its node or actor."""
        try:
            return int(await actor.run.remote(words, environ, self._cwd))
        except self._ray.exceptions.RayTaskError as error:
            raise _cannot_start(node, error) from error
        except self._ray.exceptions.ActorDiedError as error:
            if "creation task" in str(error):
                raise _cannot_start(node, error) from error
            return None
        except self._ray.exceptions.RayError as error:
            _log.debug("the agent of %s is lost: %s", node.address, error)
            return None

    def _collect(self) -> None:
        """Note which agents have ended; raises ConfigurationError if one cannot start."""
        for node_id, one in [*self._agents.items()]:
            if not one.end.done():
                continue
            del self._agents[node_id]
            code = one.end.result()
            self._ray.kill(one.actor)
            self._placement.ended(node_id, code, time.monotonic())
            if not self._is_over():
                how = "is lost" if code is None else f"has ended with exit code {code}"
                _log.warning("the agent on %s %s", one.node.address, how)

    async def _wait_for_agents(self) -> None:
        """Wait for the agents that still run, which the coordinator has told of the end."""
        if self._agents:
            limit_s = self._spec.timing.shutdown_timeout_s + _END_S
            await asyncio.wait({one.end for one in self._agents.values()}, timeout=limit_s)
            self._collect()

    async def _end_agents(self) -> None:
        """Let the agents that still run leave the job in order, and end their actors."""
        for one in self._agents.values():
            with contextlib.suppress(self._ray.exceptions.RayError):
                one.actor.stop.remote(int(signal.SIGTERM))
        if self._agents:
            limit_s = self._spec.timing.shutdown_timeout_s + _END_S
            await asyncio.wait({one.end for one in self._agents.values()}, timeout=limit_s)
        for one in self._agents.values():
            one.end.cancel()
            self._ray.kill(one.actor)
        await asyncio.gather(*(one.end for one in self._agents.values()), return_exceptions=True)

    def _say_short(self, nodes: Sequence[RayNode]) -> None:
        """Log from time to time that the job has fewer nodes than it needs."""
        now_s = time.monotonic()
        if self._placement.running >= self._spec.min_nodes:
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
            "waiting for nodes with %s: agents run on %d, the job needs %d; of %d nodes in the"
            " cluster, %d have that much",
            need, self._placement.running, self._spec.min_nodes, len(nodes), large,
        )  # fmt: skip


def _cannot_start(node: RayNode, error: Exception) -> ConfigurationError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return ConfigurationError(
        f"Ray cannot start an agent on {node.address}: {lines[-1].strip() if lines else error!r}",
        slug="ray-agent",
        expected="elastane on each node, in the version of this program",
        next_step="install it there, or add it to the job's runtime environment:"
        ' --runtime-env-json \'{"pip": ["elastane"]}\'',
    )
