"""What all attempts of one agent have in common: values, and the hands that start workers."""

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

# Begins a task of a worker group; one that fails is the agent's end, for nobody would notice.
SpawnTask = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]


@dataclass(frozen=True)
class GroupSetup:
    """One agent's workers, whatever the round.

    `cpus` are, by local rank, the CPUs that a worker is bound to; none where it is not bound.
    `stuck_s` is how long a worker may be in uninterruptible sleep before it is given up; 0 is for
    ever. `spares` are kept beside workers that recover in place. `choose_files` is asked in place
    of `logs` where each worker's output goes. No worker is taken to hang before `hang_floor_s`.
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
    # One for all attempts: its threads serve the next one too.
    offload: Offload = field(default_factory=Offload)
