"""Faults that an outside process does to the workers of a drawn script, at times of its own.

A script that kills itself at drawn places dies between two of its own lines. A signal from outside
lands anywhere: in C++, in a thread of ours, in the instant before a stopped worker is killed. The
step after which a fault comes is drawn, and so is the time until it; the rest is chance.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastane.protocol.hangs import HANG_STOPPED_S
from elastane.testing import LocalCluster

# How long a worker is stopped: below the limit after which it is killed, about it, and above it.
STOPS_S = ((0.0, 0.5), (0.9 * HANG_STOPPED_S, 1.5 * HANG_STOPPED_S), (2.0, 3.0))
# The same of a node, which is declared departed after three seconds of silence.
NODE_STOPS_S = ((0.2, 1.5), (2.7, 3.6), (4.0, 6.0))


@dataclass(frozen=True)
class Fault:
    """`delay_s` after a worker has recorded `step`, something happens to a worker or node.

    `victim`: the place of the worker among the living ones, by rank; of a node, by name.
    `stopped_s`: how long it is stopped; 0: it is killed. `returns`: a killed node is started again.
    """

    step: int
    delay_s: float
    victim: int
    stopped_s: float
    of_node: bool
    returns: bool


def faults_of(seed: int, steps: int, *, nodes: bool = False) -> tuple[Fault, ...]:
    """Draw faults over a run of this many steps; with `nodes` half of them are of a whole node."""
    draw = random.Random(f"faults {seed}")
    faults = []
    for _ in range(draw.choice((2, 3, 4))):
        of_node = nodes and draw.random() < 0.5
        stops = NODE_STOPS_S if of_node else STOPS_S
        stopped_s = draw.uniform(*draw.choice(stops)) if draw.random() < 0.5 else 0.0
        faults.append(
            Fault(
                step=draw.randrange(2, steps),
                delay_s=draw.uniform(0, 0.06),
                victim=draw.choice((0, 1, 1, 2, 3)),
                stopped_s=stopped_s,
                of_node=of_node,
                returns=draw.random() < 0.6,
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.step))


class Outside:
    """Does the faults of a job, one after the other, until it has ended."""

    def __init__(self, cluster: LocalCluster, records: Path, has_ended: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._records = records
        self._has_ended = has_ended
        self.done: list[str] = []

    def play(self, faults: tuple[Fault, ...]) -> None:
        """Do all faults whose step is reached before the job has ended."""
        for fault in faults:
            while self._newest_step() < fault.step:
                if self._has_ended():
                    return
                time.sleep(0.003)
            time.sleep(fault.delay_s)
            (self._strike_node if fault.of_node else self._strike_worker)(fault)

    def _newest_step(self) -> int:
        names = (
            name for own in self._records.iterdir() if own.is_dir() for name in os.listdir(own)
        )
        steps = [int(name.removesuffix(".pt")) for name in names if name.endswith(".pt")]
        return max(steps, default=-1)

    def _living(self) -> list[int]:
        """Return the workers that live, by rank; those of the newest world if several do."""
        world = self._cluster.world()
        pids = [] if world is None else [pid for own in world.pids.values() for pid in own]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def _strike_worker(self, fault: Fault) -> None:
        living = self._living()
        if not living:
            return
        pid = living[fault.victim % len(living)]
        self._signal(pid, signal.SIGSTOP if fault.stopped_s else signal.SIGKILL)
        if fault.stopped_s:
            time.sleep(fault.stopped_s)
            self._signal(pid, signal.SIGCONT)
        self.done.append(
            f"worker stopped for {fault.stopped_s:.1f} s" if fault.stopped_s else "kill"
        )

    def _strike_node(self, fault: Fault) -> None:
        place = fault.victim % 2
        node, other = self._cluster.node("ab"[place]), self._cluster.node("ba"[place])
        if not (node.is_alive and other.is_alive):
            return  # The job would end with its last node.
        if fault.stopped_s:
            node.pause()
            time.sleep(fault.stopped_s)
            node.resume()
            self.done.append(f"node stopped for {fault.stopped_s:.1f} s")
            return
        node.kill()
        self.done.append("node kill")
        if fault.returns and not self._has_ended():
            self._cluster.start(node.name)

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
