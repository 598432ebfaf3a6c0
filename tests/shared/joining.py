"""Jobs whose workers join in place, and what their scripts have written after each step.

A script is started with a folder and a mode. Each worker makes PID.ready before its loop and writes
to PID.jsonl: before a step what it was dealt, after it its digest and its world. It ends at the
end of an epoch after there is a file "enough".
"""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

from growing import Growing

from elastane.testing import LocalCluster

# As the scripts have them.
SAMPLES, BATCH = 240, 24
STEPS = SAMPLES // BATCH  # of an epoch


class WorldSizes(ABC):
    """What a job's workers have written after their steps, with the size of the world of each."""

    cluster: LocalCluster

    @abstractmethod
    def step_lines(self) -> dict[int, list[dict]]:
        """What each process has written after its steps, dead ones too."""

    def wait_size(self, world: int, count: int = 3) -> set[int]:
        """Wait until `world` workers have each made `count` steps in a world of that size."""
        begun = {pid: len(lines) for pid, lines in self.step_lines().items()}

        found: set[int] = set()

        def there() -> bool:
            new = {pid: lines[begun.get(pid, 0) :] for pid, lines in self.step_lines().items()}
            found.clear()
            for pid, lines in new.items():
                if len(lines) >= count and all(line["world"] == world for line in lines[-count:]):
                    found.add(pid)
            return len(found) == world

        self.cluster.wait(there, f"steps in a world of {world}")
        return found

    def passes_size(self, world: int) -> None:
        """Wait until `world` workers have made a step in a world of that size.

        Workers that join may have made the world larger again before this looks.
        """
        begun = {pid: len(lines) for pid, lines in self.step_lines().items()}

        def there() -> bool:
            new = (lines[begun.get(pid, 0) :] for pid, lines in self.step_lines().items())
            return sum(any(line["world"] == world for line in lines) for lines in new) >= world

        self.cluster.wait(there, f"a step in a world of {world}")


class JoiningJob(WorldSizes):
    """A cluster that runs a script, and what its workers have written after each step."""

    def __init__(self, script: Path, folder: Path, mode: str = "plain", **options: object) -> None:
        self.folder = folder / "said"
        self.folder.mkdir()
        self._growing = Growing(self.folder)
        self.killed: set[int] = set()
        options = {
            "nnodes": "1:2",
            "nproc_per_node": 3,
            "min_workers": 1,
            "max_restarts": 10,
            "ranks_may_change": True,
            "rdzv_conf": "last_call=0.1",
            **options,
        }
        self.cluster = LocalCluster(
            [str(script), str(self.folder), mode],
            folder=folder / "c",
            in_place=True,
            **options,
        )

    def said(self) -> dict[int, list[dict]]:
        """What each process has written after its steps."""
        return {
            pid: [line for line in lines if "digest" in line] for pid, lines in self.all().items()
        }

    def all(self) -> dict[int, list[dict]]:
        """All that each process has written."""
        return {int(pid): lines for pid, lines in self._growing.lines().items()}

    def step_lines(self) -> dict[int, list[dict]]:
        """What each process has written after its steps, dead ones too."""
        return self.said()

    def ready(self) -> set[int]:
        """All workers that have come to their loops, dead ones too."""
        return {int(path.stem) for path in self.folder.glob("*.ready")}

    def kill_the_next_that_is_ready(self) -> None:
        """Kill each worker that comes to its loop, as soon as it does, until there was one."""
        known = self.ready()
        self.cluster.wait(lambda: self.ready() - known, "a new worker")
        kill(self.ready() - known)

    def kill_at(self, pid: int, place: str) -> None:
        """Kill a worker at a place of its program, where it waits for that."""
        (self.folder / f"{pid}.hold-{place}").touch()
        self.cluster.wait((self.folder / f"{pid}.held-{place}").exists, f"{pid} comes to {place}")
        kill({pid})
        self.killed.add(pid)

    def rank_0(self) -> int:
        """The living worker that had rank 0 after its last step."""
        said = {pid: lines for pid, lines in self.said().items() if pid not in self.killed}
        return next(pid for pid, lines in said.items() if lines and lines[-1]["rank"] == 0)

    def kill_at_random(self, count: int, seed: int) -> None:
        """Kill workers one after another, those that wait to join first; one of each world stays.

        Some steps are made between two of them, so that each has another instant of a step.
        """
        draw = Random(seed)
        while count:
            steps = self.steps() + draw.randrange(40)
            self.cluster.wait(lambda steps=steps: self.steps() >= steps, "some steps")
            members = {pid for pid, lines in self.said().items() if lines} - self.killed
            waiting = self.ready() - self.killed - members
            if len(members) < 2 and not waiting:
                continue  # A replacement is on its way.
            victim = draw.choice(sorted(waiting or members))
            kill({victim})
            self.killed.add(victim)
            count -= 1

    def survives_random_kills(self, count: int, seed: int) -> None:
        """Train on two nodes of two workers, of which `count` are killed; no sample is wrong."""
        with self.cluster as cluster:
            cluster.start("a")
            cluster.start("b")
            self.wait_size(4)
            self.kill_at_random(count, seed)
            self.wait_size(4)
            self.ends_well()
            assert self.missing() == 0

    def survives_the_loss_of_rank_0(self) -> None:
        """Train with three workers, of which rank 0 is killed: it is replaced, none restarts."""
        with self.cluster as cluster:
            cluster.start("a")
            first = self.wait_size(3)
            lost = self.rank_0()
            self.kill_at(lost, "train")
            self.passes_size(2)
            assert first - {lost} < self.wait_size(3), "the survivors kept their processes"
            self.ends_well()
            assert self.missing() == 0
            assert len(cluster.events("replacement")) == 1

    def survives_losses_of_rank_0(self, *places: str) -> None:
        """Train with three workers; rank 0 is killed at each of these places of the program."""
        with self.cluster as cluster:
            cluster.start("a")
            left = self.wait_size(3)
            for place in places:
                lost = self.rank_0()
                self.kill_at(lost, place)
                left -= {lost}
                assert left <= self.wait_size(3), place
                left = self.wait_size(3)
            self.ends_well()
            assert self.missing() == 0
            assert len(cluster.events("replacement")) == len(places)

    def steps(self) -> int:
        """The number of the last step that the worker which is furthest has made."""
        return max((lines[-1]["step"] for lines in self.said().values() if lines), default=0)

    def ends_well(self) -> None:
        """Let the job end; all workers had one state after each step, and nobody restarted."""
        (self.folder / "enough").touch()
        self.cluster.wait(
            lambda: not any(node.is_alive for node in self.cluster.nodes),
            "the agents end",
        )
        assert self.cluster.events("job-ended")[-1].data["ok"] is True, self.cluster.story()
        assert not self.cluster.events("restart") and not self.cluster.events("growth")
        by_step = defaultdict(set)
        for pid, lines in self.said().items():
            for before, line in pairwise(lines):
                is_further = before["step"] == line["step"] and line["step"] % STEPS == STEPS - 1
                assert is_further or before["step"] + 1 == line["step"], (pid, before, line)
            for line in lines:
                by_step[line["step"], line["optimizer_steps"]].add((line["digest"], line["world"]))
        differing = {step: states for step, states in by_step.items() if len(states) > 1}
        assert by_step and not differing, differing

    def missing(self) -> int:
        """Return how many samples were not seen in their epoch; none was seen twice.

        A worker that is lost in a step has contributed if as many have as it was dealt to.
        """
        seen, contributed = defaultdict(Counter), {}
        for lines in self.said().values():
            contributed |= {line["optimizer_steps"]: line["contributed"] for line in lines}
        for pid, lines in self.all().items():
            made = {line["optimizer_steps"] for line in self.said()[pid]}
            for line in (line for line in lines if "dealt" in line):
                number = line["optimizer_steps"]
                if number in made or contributed[number] == line["of"]:
                    seen[line["epoch"]].update(line["dealt"])
        doubled = {epoch: [i for i, n in c.items() if n > 1] for epoch, c in seen.items()}
        assert not any(doubled.values()), doubled
        return sum(SAMPLES - len(counts) for counts in seen.values())


def kill(pids: set[int]) -> None:
    """End processes at once, without a word."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
