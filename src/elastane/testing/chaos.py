"""A job that runs on this machine, as a fault plan harms it: its agents are those of the registry.

Only agents of this user are found, and only their processes are harmed. A node that was taken away
does not come back, because what started it is not known here.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from elastane.errors import UsageError
from elastane.observe.events import EventReader, LoggedEvent
from elastane.process.files import JobEntry, JobRegistry, safe_name
from elastane.protocol.log_events import EventKind
from elastane.testing import processes
from elastane.testing.cluster import FaultLog, newest_world


class RunningNode:
    """One agent of the job, and its workers."""

    def __init__(self, entry: JobEntry, job: RunningJob) -> None:
        self._entry, self._job = entry, job

    @property
    def name(self) -> str:
        """Its node id."""
        return self._entry.node

    @property
    def is_alive(self) -> bool:
        """Whether this agent runs; another process may have its pid by now."""
        return self._entry.is_alive()

    @property
    def agent_pid(self) -> int:
        """The process of its agent."""
        return self._entry.pid

    def workers(self) -> tuple[int, ...]:
        """Return the pids of its newest workers that live; empty if there are none."""
        world = newest_world(self._job.events(EventKind.ROUND_SETTLED, EventKind.WORKERS_STARTED))
        pids = world.pids.get(self.name, ()) if world is not None else ()
        here = set(processes.below(self._entry.pid)) if self.is_alive else set[int]()
        return tuple(pid for pid in pids if pid in here)

    def kill(self) -> None:
        """End the agent, its workers and their children at once, like a power cut."""
        if self.is_alive:
            processes.cut_power(self._entry.pid)

    def kill_agent(self) -> None:
        """SIGKILL the agent alone."""
        self._send(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the agent to leave, like a preemption."""
        self._send(signal.SIGTERM)

    def pause(self) -> None:
        """Stop every process of the node, like a host that hangs."""
        if self.is_alive:
            processes.pause(self._entry.pid)

    def resume(self) -> None:
        """Let the node continue after `pause`."""
        if self.is_alive:
            processes.resume(self._entry.pid)

    def _send(self, number: int) -> None:
        if self.is_alive:
            processes.send(self._entry.pid, number)


class RunningJob:
    """The agents of one job on this machine."""

    def __init__(self, job: str, registry: JobRegistry) -> None:
        """Raise UsageError if no agent of the job runs here, or its events are not logged."""
        self.job, self._registry = job, registry
        entries = registry.running(job)
        if not entries:
            running = ", ".join(sorted({entry.job for entry in registry.running()}))
            raise UsageError(
                f"no agent of job {job} runs on this machine as this user",
                slug="no-such-job",
                expected=f"one of {running}" if running else "a job that runs here",
                next_step="elastane status",
            )
        folders = [entry.log_dir for entry in entries if entry.log_dir]
        if not folders:
            raise UsageError(
                f"job {job} writes no event log",
                slug="no-event-log",
                expected="a --log-dir, in which its workers and the faults are named",
                next_step="start it without --log-dir /dev/null",
            )
        self.folder = Path(folders[-1]) / safe_name(job)
        self._reader = EventReader(self.folder)
        self._events: list[LoggedEvent] = []
        self._log = FaultLog(folders[-1], job)

    @property
    def nodes(self) -> Sequence[RunningNode]:
        """The nodes that run here now, in the order of their names."""
        entries = sorted(self._registry.running(self.job), key=lambda entry: entry.node)
        return [RunningNode(entry, self) for entry in entries]

    def events(self, *kinds: str) -> list[LoggedEvent]:
        """Return the event log of all nodes by time, restricted to `kinds` if any are given."""
        self._events += self._reader.poll()
        self._events.sort(key=lambda event: event.order)
        return [event for event in self._events if not kinds or event.kind in kinds]

    def start(self, name: str) -> RunningNode:
        """Raise UsageError: what starts nodes of this job is not known here."""
        raise UsageError(
            f"node {name} cannot be started here",
            slug="cluster",
            expected="a plan without add-node, and with back_s=None",
            next_step="start the node on its machine, or use LocalCluster, which starts nodes",
        )

    def record_fault(self, kind: str, node: str, text: str) -> None:
        """Log an injected fault in the job's event log."""
        self._log.record(kind, node, text)

    def close(self) -> None:
        """Close the event log; a node that is paused continues."""
        for node in self.nodes:
            node.resume()
        self._log.close()
