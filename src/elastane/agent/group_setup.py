"""What all attempts of one agent have in common: values, and the objects that start workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from elastane.agent.timer_watch import TimerWatch
from elastane.process.offload import Offload
from elastane.process.process import Spawner, WorkerKind
from elastane.process.streams import ChooseFiles, LogPlan
from elastane.process.worker_environment import RunFacts
from elastane.protocol.limits import Timing

# Starts a task of a worker group. A task that fails ends the agent, since its failure would go
# unnoticed.
SpawnTask = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]


@dataclass(frozen=True)
class GroupSetup:
    """The local workers of one agent, independent of the round.

    `cpus` holds, by local rank, the CPUs that a worker is bound to; empty without binding.
    `stuck_s` is how long a worker may be in uninterruptible sleep before it is given up; 0 means no
    limit. `spares` is the number of warm spares beside workers that recover in place.
    `choose_files` decides instead of `logs` where each worker's output goes. No worker counts as
    hung before `hang_floor_s`.
    """

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    leash: str
    run: RunFacts
    logs: LogPlan
    spawner: Spawner
    cpus: tuple[frozenset[int], ...] = ()
    stuck_s: float = 0.0
    spares: int = 0
    hang_floor_s: float = Timing().hang_floor_s
    timers: TimerWatch | None = None
    choose_files: ChooseFiles | None = None
    # Shared by all attempts, so that its threads are reused.
    offload: Offload = field(default_factory=Offload)
