"""The kinds of events in a job's log, and the form in which rules report them.

docs/events.md has a section for each kind; a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from elastane.protocol.model import Fence


class EventKind(StrEnum):
    """The kind of an event; its value is the text in the event log."""

    # Logged by the coordinator.
    COORDINATOR_STARTED = "coordinator-started"
    COORDINATOR_STOPPED = "coordinator-stopped"
    AUTHORITY_LOST = "authority-lost"
    AUTHORITY_REGAINED = "authority-regained"
    NODE_JOINED = "node-joined"
    NODE_READY = "node-ready"
    NODE_REFUSED = "node-refused"
    NODE_DEPARTED = "node-departed"
    NODE_LEAVING = "node-leaving"
    NODE_RELEASED = "node-released"
    NODE_LEFT_OUT = "node-left-out"
    NODE_READMITTED = "node-readmitted"
    NODE_REGISTERED_AGAIN = "node-registered-again"
    ROUND_SETTLED = "round-settled"
    ROUND_RESUMED = "round-resumed"
    IN_PLACE = "in-place"
    INCIDENT = "incident"
    DRAIN_STARTED = "drain-started"
    DRAIN_ENDED = "drain-ended"
    GROWTH = "growth"
    NOT_RESUMED = "not-resumed"
    RESTART = "restart"
    REPLACEMENT = "replacement"
    WAITING = "waiting"
    STALL = "stall"
    CULPRIT_ENDED = "culprit-ended"
    STRAGGLER = "straggler"
    STRAGGLER_ENDED = "straggler-ended"
    PROGRESS = "progress"
    PACE = "pace"
    STEP_TIMES = "step-times"
    RESIZED = "resized"
    JOB_ENDED = "job-ended"
    # Logged by an agent.
    AGENT_STARTED = "agent-started"
    AGENT_STOPPED = "agent-stopped"
    COORDINATOR_FOUND = "coordinator-found"
    COORDINATOR_AWAY = "coordinator-away"
    WORKERS_STARTING = "workers-starting"
    WORKERS_STARTED = "workers-started"
    WORKERS_INTERRUPTED = "workers-interrupted"
    WORKERS_REGROUPED = "workers-regrouped"
    WORKERS_TRAINING = "workers-training"
    PAUSED = "paused"
    WORKER_EXITED = "worker-exited"
    REPLICA_DIFFERED = "replica-differed"
    CULPRIT = "culprit"
    STACKS = "stacks"
    CHECKPOINT_SAVED = "checkpoint-saved"
    CHECKPOINT_FAILED = "checkpoint-failed"
    RESTORED = "restored"
    SNAPSHOT_SERVER_LOST = "snapshot-server-lost"
    WORKERS_STOPPING = "workers-stopping"
    WORKERS_STOPPED = "workers-stopped"
    WORKERS_DRAINING = "workers-draining"
    SIGNAL = "signal"
    NOTICE = "notice"
    HEALTH_CHECK = "health-check"
    ZYGOTE_WARM = "zygote-warm"
    ZYGOTE_DIED = "zygote-died"
    ZYGOTE_PROBLEM = "zygote-problem"
    ZYGOTE_FALLBACK = "zygote-fallback"
    # Logged by elastane chaos and elastane.testing.
    FAULT_INJECTED = "fault-injected"
    # Logged by the log itself.
    EVENTS_LOST = "events-lost"


# Events that repeat a measurement at intervals: charts show them, lists of events leave them out.
MEASURED = frozenset({EventKind.PROGRESS, EventKind.PACE, EventKind.STEP_TIMES})


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event as rules report it: its kind, the reason in words, and the world and node.

    The shell that writes it adds time, host, pid and a sequence number.
    """

    kind: EventKind
    reason: str
    node_id: str = ""
    fence: Fence | None = None
    data: dict[str, str | int | float | bool] = {}
