"""A job of several nodes on this one machine, to run a training script under faults.

    with LocalCluster(["train.py"], nnodes="1:2", nproc_per_node=2, max_restarts=3) as cluster:
        cluster.start("a"), cluster.start("b")
        cluster.wait_world(nodes=2)
        cluster.node("b").kill()
        cluster.wait_world(nodes=1)

This module owns the agents (`elastane run`, one process for each node), and none of their processes
outlives the context. Its knowledge of the job comes from the event log. It fails with UsageError
for invalid options, and with ClusterError, including the job's whole story, if a condition does not
hold in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastane.errors import ElastaneError, UsageError
from elastane.functions.request import as_text
from elastane.observe.events import EventLog, EventReader, LoggedEvent
from elastane.options.table import BY_DEST
from elastane.process import environment
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.testing import processes

DEADLINE_S = 60.0
# The least pause between two looks, and the most.
_POLL_S, _POLL_MAX_S = 0.02, 0.1
# Nine parts of pause to one of looking: the job that is waited for needs the processors.
_PAUSE_PER_LOOK = 9
_GONE_S = 15.0
_STORY_CHARS_MAX = 6000
# Variables that a job must not inherit from the testing program, which may be a worker itself.
_FOREIGN = ("PET_", "ELASTANE_", "TORCHELASTIC_", "TORCH_ELASTIC_")
_WORKERS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class ClusterError(ElastaneError):
    """A condition did not hold in time; `story` has each agent's output and the event log."""

    def __init__(self, what: str, story: str) -> None:
        super().__init__(what, slug="cluster", next_step="read the story below")
        self.story = story

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.story}"


@dataclass(frozen=True)
class ClusterWorld:
    """The newest world: its fence, the ids of its nodes in the order of rank, and its workers.

    `pids`: those of each node, by local rank; a node is missing until it has started its workers.
    """

    round: int
    attempt: int
    nodes: tuple[str, ...]
    pids: Mapping[str, tuple[int, ...]]

    @property
    def fence(self) -> tuple[int, int]:
        """Round and attempt."""
        return self.round, self.attempt


def newest_world(events: Iterable[LoggedEvent]) -> ClusterWorld | None:
    """Return the newest world in an event log; None before the first."""
    settled: LoggedEvent | None = None
    pids: dict[tuple[str, int | None, int | None], tuple[int, ...]] = {}
    for event in events:
        if event.kind == EventKind.WORKERS_STARTED:
            text = str(event.data.get("pids", "")).strip("(), ")
            words = filter(None, (word.strip() for word in text.split(",")))
            pids[event.node, event.round, event.attempt] = tuple(map(int, words))
        elif event.kind == EventKind.ROUND_SETTLED:
            settled = event
    if settled is None or settled.round is None or settled.attempt is None:
        return None
    nodes = tuple(str(settled.data.get("members", "")).split())
    at = settled.round, settled.attempt
    here = {node: pids[(node, *at)] for node in nodes if (node, *at) in pids}
    return ClusterWorld(*at, nodes, here)


class FaultLog:
    """Logs injected faults in a job's event log, beside its agents."""

    def __init__(self, log_dir: str, job: str) -> None:
        self._log = EventLog(log_dir, job, "", socket.gethostname())

    def record(self, kind: str, node: str, text: str) -> None:
        """Log one fault; it is in the file on return, unless the disk takes no lines."""
        event = LogEvent(
            kind=EventKind.FAULT_INJECTED, reason=text, node_id=node, data={"fault": kind}
        )
        self._log.log(event, "chaos")
        self._log.flush()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class LocalNode:
    """One node: an agent of the job, and its workers."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log: Path, cluster: LocalCluster
    ) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._cluster = cluster

    @property
    def is_alive(self) -> bool:
        """Whether its agent runs."""
        return self.process.poll() is None

    @property
    def agent_pid(self) -> int:
        """The process of its agent."""
        return self.process.pid

    @property
    def output(self) -> str:
        """The output of the agent and its workers."""
        return self.log.read_text(errors="replace")

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the agent's exit code; raises ClusterError if it still runs after `deadline_s`."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            what = f"node {self.name} still runs after {deadline_s:g} s"
            raise ClusterError(what, self._cluster.story()) from None

    def workers(self) -> tuple[int, ...]:
        """Return the pids of its newest workers, by local rank; empty before it has any."""
        world = self._cluster.world()
        return world.pids.get(self.name, ()) if world is not None else ()

    def kill_worker(
        self,
        local_rank: int = 0,
        number: int = signal.SIGKILL,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> int:
        """Send a worker a signal, SIGKILL by default; return its pid.

        Waits until the agent has named its workers: a script may train a moment before. Raises
        ClusterError if it names none within `deadline_s`, UsageError if it has none of this number.
        """
        pids: tuple[int, ...] = ()

        def has_workers() -> bool:
            nonlocal pids
            pids = self.workers()
            return bool(pids)

        # A world that is settled after this look has no named workers yet.
        self._cluster.wait(has_workers, f"node {self.name} has workers", deadline_s)
        if not 0 <= local_rank < len(pids):
            raise UsageError(
                f"kill_worker({local_rank}): node {self.name} has {len(pids)} workers",
                slug="cluster",
                expected=f"a local rank from 0 to {len(pids) - 1}",
                next_step="start the cluster with a larger nproc_per_node",
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[local_rank], number)
        return pids[local_rank]

    def kill(self) -> None:
        """End the agent, its workers and their children at once, like a power cut."""
        if self.is_alive:
            processes.cut_power(self.process.pid)
        self.process.wait()

    def kill_agent(self) -> None:
        """SIGKILL the agent alone: its orphan reaper kills its workers."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask the agent to leave (SIGTERM), like a preemption; returns at once."""
        self.process.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """Stop every process of the node (SIGSTOP), like a host that hangs."""
        processes.pause(self.process.pid)

    def resume(self) -> None:
        """Let the node continue after `pause`."""
        processes.resume(self.process.pid)


class LocalCluster:
    """A local cluster, as in the module's example.

    `script`: the words for `elastane run` after its options.

    `options`: its flags by name, as for `elastane.launch`. Nodes meet on this machine unless the
    options say where (`rdzv_backend`, `rdzv_endpoint`). `folder`: for logs and the agents' output;
    by default a temporary folder, removed at the end. `env`: variables for agents and workers.
    Start nodes in a thread that lives as long as the cluster: the kernel kills them with it.
    """

    def __init__(
        self,
        script: Sequence[str],
        *,
        folder: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._given = as_text(options)
        self._script = [os.fspath(word) for word in script]
        self._env = dict(env or {})
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else os.fspath(folder or ""))
        self.job = self._given.get("rdzv_id", f"cluster-{uuid.uuid4().hex[:8]}")
        self.nodes: list[LocalNode] = []
        self._mark = uuid.uuid4().hex
        self._endpoint = ""
        self._reader: EventReader | None = None
        self._events: list[LoggedEvent] = []
        self._fault_log = FaultLog(str(self.log_dir), self.job)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._endpoint = f"127.0.0.1:{processes.free_port()}"
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            processes.end_all([node.process for node in self.nodes], self._mark, _GONE_S)
        finally:
            self._fault_log.close()
            if isinstance(error, Exception) and not isinstance(error, ClusterError):
                error.add_note(self.story())
            if self._temporary is not None:
                self._temporary.cleanup()

    def start(
        self, name: str, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> LocalNode:
        """Start a node; `options` override the cluster's."""
        given = {**self._defaults(), **self._given, **as_text({"node_id": name, **options})}
        log = self.folder / f"{name}.{len(self.nodes)}.log"
        words = [word for flag, value in given.items() if (word := _word(flag, value))]
        with log.open("wb") as output:
            process = processes.start(
                [sys.executable, "-m", "elastane", "run", *words, *self._script],
                self._environment(env or {}),
                output.fileno(),
            )
        self.nodes.append(LocalNode(name, process, log, self))
        return self.nodes[-1]

    def node(self, name: str) -> LocalNode:
        """Return the newest node of that name; raises KeyError if there is none."""
        for node in reversed(self.nodes):
            if node.name == name:
                return node
        raise KeyError(name)

    def events(self, *kinds: str) -> list[LoggedEvent]:
        """Return the event log of all nodes by time, restricted to `kinds` if any are given."""
        if self._reader is None:
            self._reader = EventReader(self.log_dir / self.job)
        self._events += self._reader.poll()
        # events of one host may arrive after another's
        self._events.sort(key=lambda event: event.order)
        return [event for event in self._events if not kinds or event.kind in kinds]

    @property
    def log_dir(self) -> Path:
        """The folder of the job's logs and event logs."""
        return Path(self._given.get("log_dir", self.folder / "logs"))

    def world(self) -> ClusterWorld | None:
        """Return the newest world; None before the first."""
        return newest_world(self.events(EventKind.ROUND_SETTLED, EventKind.WORKERS_STARTED))

    def record_fault(self, kind: str, node: str, text: str) -> None:
        """Log an injected fault in the job's event log."""
        self._fault_log.record(kind, node, text)

    def wait(
        self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait until `condition` holds; else raises ClusterError with `what` after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        begun_s = time.thread_time()
        while not condition():
            if time.monotonic() >= end_s:
                raise ClusterError(f"not within {deadline_s:g} s: {what}", self.story())
            spent_s = time.thread_time() - begun_s
            time.sleep(min(max(_POLL_S, _PAUSE_PER_LOOK * spent_s), _POLL_MAX_S))
            begun_s = time.thread_time()

    def wait_world(
        self, nodes: int, *, after: ClusterWorld | None = None, deadline_s: float = DEADLINE_S
    ) -> ClusterWorld:
        """Return the newest world once it has this number of nodes, all with workers.

        `after`: the world must be newer than this one.
        """
        found: list[ClusterWorld] = []

        def there() -> bool:
            world = self.world()
            is_new = world is not None and (after is None or world.fence > after.fence)
            if world is None or not is_new or not len(world.nodes) == len(world.pids) == nodes:
                return False
            found.append(world)
            return True

        newer = f", newer than round {after.round} attempt {after.attempt}" if after else ""
        self.wait(there, f"a world of {nodes} nodes with workers{newer}", deadline_s)
        return found[-1]

    def wait_event(
        self, kind: str, words: str = "", count: int = 1, deadline_s: float = DEADLINE_S
    ) -> LoggedEvent:
        """Return the `count`-th logged event of a kind whose reason contains `words`."""

        def found() -> list[LoggedEvent]:
            return [event for event in self.events(kind) if words in event.reason]

        self.wait(
            lambda: len(found()) >= count, f"{count} events {kind} with {words!r}", deadline_s
        )
        return found()[count - 1]

    def wait_done(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until every agent that was not killed has ended with exit code 0.

        Raises ClusterError for another exit code, or after `deadline_s` seconds.
        """
        end_s = time.monotonic() + deadline_s
        for node in self.nodes:
            code = node.wait(max(0.0, end_s - time.monotonic()))
            if code not in (0, -signal.SIGKILL):
                raise ClusterError(f"node {node.name} ended with exit code {code}", self.story())

    def story(self) -> str:
        """Return each agent's output, and the event log."""
        said = [
            f"--- {node.name} ({node.process.poll()})\n{node.output[-_STORY_CHARS_MAX:]}"
            for node in self.nodes
        ]
        told = [f"{e.time} {e.source} {e.node} {e.kind}: {e.reason}" for e in self.events()]
        return "\n".join([*said, "--- events", *told])

    def _defaults(self) -> dict[str, str]:
        """Return the defaults for a test: the meeting point, and the log folder."""
        found = {"rdzv_id": self.job, "log_dir": str(self.log_dir)}
        if not {"rdzv_backend", "rdzv_endpoint", "standalone", "master_addr"} & set(self._given):
            found |= {"rdzv_backend": "elastane", "rdzv_endpoint": self._endpoint}
        return found

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {
            name: value
            for name, value in environment.snapshot().items()
            if not name.startswith(_FOREIGN) and name not in _WORKERS_OWN
        }
        return {**own, "OMP_NUM_THREADS": "1", processes.MARK: self._mark, **self._env, **more}


def _word(dest: str, value: str) -> str:
    option = BY_DEST[dest]
    if option.kind == "flag":
        return f"--{option.name}" if value == "1" else ""
    return f"--{option.name}={value}"
