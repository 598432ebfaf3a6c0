"""The connection of a job's program to Ray: the nodes of the cluster, and actors that run agents.

Thin: `job` decides what is started where. Fails with ConfigurationError if there is no cluster, or
Ray cannot start elastane on a node. A node or an actor that is lost is an end without an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elastane.errors import ConfigurationError, missing_extra
from elastane.process import environment
from elastane.ray.host import AgentHost
from elastane.ray.rules import RayDrain, RayNode, drains_of, nodes_of

_log = logging.getLogger("elastane.ray")
# Ray itself gives up the runtime environment of an actor after 600 s.
START_LIMIT_S = 900.0


class AgentEnd(NamedTuple):
    """The exit code of an agent; None if it was lost, with Ray's reason."""

    code: int | None
    reason: str = ""


@contextlib.contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """Connect to the cluster at this address; empty: RAY_ADDRESS, or that of this machine."""
    try:
        import ray
    except ImportError:
        raise missing_extra(
            "elastane ray needs the package ray, which is not installed",
            "ray",
            "Ray, in the version of the cluster",
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
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


class RayCluster:
    """The cluster that this program is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def own_address(self) -> str:
        """Return the address of this program's node for the others."""
        return str(self._ray.util.get_node_ip_address())

    def brings_folder(self) -> bool:
        """Whether Ray copies the job's working folder to each node, and starts actors in it."""
        return bool(self._ray.get_runtime_context().runtime_env.get("working_dir"))

    def nodes(self) -> list[RayNode] | None:
        """Return the living nodes; None if Ray does not answer. Blocks."""
        state: Any = importlib.import_module("ray._private.state")
        try:
            free = state.available_resources_per_node()
            return nodes_of(self._ray.nodes(), free, _drains(state))
        except (self._ray.exceptions.RayError, OSError, RuntimeError) as error:
            _log.debug("Ray lists no nodes: %s", error)
            return None

    def hold(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask the autoscaler for room for these, also while none of them is used."""
        from ray.autoscaler.sdk import request_resources

        try:
            request_resources(bundles=[dict(one) for one in bundles])
        except (self._ray.exceptions.RayError, OSError, RuntimeError) as error:
            # Agents start on the nodes that are there.
            _log.warning("the autoscaler of Ray was not asked for nodes: %s", error)

    def agent_on(self, node: RayNode, need: Mapping[str, float]) -> RayAgent:
        """Reserve `need` on a node for an actor, which runs an agent there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        further = dict(need)
        cpus, gpus = further.pop("CPU", 0.0), further.pop("GPU", 0.0)
        actor = (
            self._ray.remote(AgentHost)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=further,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote()
        )
        return RayAgent(self._ray, actor, node)


class RayAgent:
    """The actor of one agent. `is_started`: Ray had room for it and has started its process."""

    def __init__(self, ray: Any, actor: Any, node: RayNode) -> None:
        self._ray, self._actor, self._node = ray, actor, node
        self.is_started = False

    async def run(self, words: Sequence[str], environ: Mapping[str, str], cwd: str) -> AgentEnd:
        """Run the agent; raises ConfigurationError if Ray cannot start elastane there."""
        errors = self._ray.exceptions
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._actor.__ray_ready__.remote()
            self.is_started = True
            return AgentEnd(int(await self._actor.run.remote(words, environ, cwd)))
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:
            raise self._cannot_start(error) from error
        except errors.ActorDiedError as error:
            if "creation task" in str(error):
                raise self._cannot_start(error) from error
            return AgentEnd(None, _last_line(error))
        except errors.RayError as error:
            return AgentEnd(None, _last_line(error))
        except TimeoutError:
            return AgentEnd(None, f"Ray did not start it within {START_LIMIT_S:g} s")

    def leave(self, drain: RayDrain) -> None:
        """Give the agent a notice that Ray removes its node, with the deadline of the drain."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._actor.leave.remote(drain.left_s)

    def stop(self) -> None:
        """Ask the agent to leave its job; asked again, it does not wait for its workers."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._actor.stop.remote()

    def kill(self) -> None:
        """End the actor, and the agent with it."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

    def _cannot_start(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"Ray cannot start an agent on {self._node.address}: {_last_line(error)}",
            slug="ray-agent",
            expected="elastane on each node, in the version of this program",
            next_step="install it there, or add it to the job's runtime environment:"
            ' --runtime-env-json \'{"pip": ["elastane"]}\'',
        )


def _drains(state: Any) -> dict[str, RayDrain]:
    """Return the nodes that Ray drains; versions without such a list have none."""
    listed = getattr(getattr(state, "state", None), "get_draining_nodes", None)
    return drains_of(listed(), time.time()) if listed is not None else {}


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
