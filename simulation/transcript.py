"""Transcripts: commands to a simulated cluster and all that happens, as text.

A docs page holds them in blocks fenced as `transcript`. A line that begins with "> " is a command;
the other lines are its result. Each block is a cluster of its own, checked like every history. An
unknown command raises ValueError.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from elastane.protocol.model import JobSpec
from simulation.cluster import SimulatedCluster
from simulation.crash_points import EffectGap
from simulation.script import Script
from simulation.setup import TIMING

_FENCE = "```transcript"


def replayed(page: str) -> str:
    """Return the page with the output of its transcripts as it is now."""
    lines: list[str] = []
    play: Play | None = None
    for line in page.splitlines():
        if play is None:
            lines.append(line)
            play = Play() if line == _FENCE else None
        elif line == "```":
            lines.append(line)
            play = None
        elif line.startswith("> "):
            lines.append(line)
            lines += play.do(line[2:])
    return "\n".join(lines) + "\n"


class Play:
    """One cluster and the commands to it."""

    def __init__(self) -> None:
        self._cluster: SimulatedCluster | None = None
        self._acts: dict[str, Callable[..., None]] = {
            "boot": self._boot,
            "run": self._run,
            "kill-worker": self._kill_worker,
            "crash": self._crash,
            "pause": self._pause,
            "suspend": self._suspend,
            "drain": self._drain,
            "break": self._break,
            "deaden": self._deaden,
            "cut": self._cut,
            "partition": self._partition,
            "heal": self._heal,
            "store": self._store,
            "die": self._die,
            "status": self._status,
        }

    @property
    def cluster(self) -> SimulatedCluster:
        """The cluster; the command `job` makes it."""
        if self._cluster is None:
            raise ValueError("the first command is: job [nodes=MIN:MAX] [restarts=N] ...")
        return self._cluster

    def do(self, command: str) -> list[str]:
        """Perform one command; return the lines that it led to."""
        verb, *words = command.split()
        if verb == "job":
            self._job(dict(word.split("=") for word in words))
        elif verb in self._acts:
            self._acts[verb](*words)
        else:
            raise ValueError(f"{command!r}: expected job, {', '.join(self._acts)}")
        return self.cluster.story.take()

    def _job(self, given: dict[str, str]) -> None:
        low, _, high = given.get("nodes", "2").partition(":")
        spec = JobSpec(
            job="letters",
            min_nodes=int(low),
            max_nodes=int(high or low),
            max_restarts=int(given.get("restarts", "3")),
            min_workers=int(given.get("min-workers", "0")),
            timing=TIMING,
        )
        script = Script(
            steps=int(given.get("steps", "1000")),
            step_s=1.0,
            checkpoint_every=5,
            asks=given.get("asks", "yes") == "yes",
            leaves_on_sigterm=False,
            trap_s=0.0,
            in_place=given.get("recovers", "") == "in-place",
            span=int(given.get("span", "0")),
        )
        mode = given.get("mode", "store")
        seed = random.Random(given.get("seed", "1"))
        self._cluster = SimulatedCluster(spec, script, seed, store_backed=mode == "store")

    def _boot(self, *names: str) -> None:
        """Start agents on these hosts, a moment apart."""
        for number, name in enumerate(names):
            while name not in self.cluster.nodes:
                self.cluster.add(2)
            node = self.cluster.nodes[name]
            self.cluster.clock.after(
                number * 0.1,
                lambda n=node: self.cluster.boot(n),  # type: ignore[misc]
            )

    def _run(self, for_s: str, how: str = "") -> None:
        self.cluster.clock.run_until(self.cluster.clock.now_s + float(for_s))
        if how == "quietly":
            self.cluster.story.take()

    def _kill_worker(self, name: str, local_rank: str = "0") -> None:
        if not self.cluster.kill_worker(name, int(local_rank)):
            raise ValueError(f"kill-worker {name}: it has no workers")

    def _crash(self, name: str, how: str = "") -> None:
        self.cluster.crash(name, "its power fails" if how else "killed", silent=how == "silent")

    def _pause(self, name: str, for_s: str) -> None:
        self.cluster.pause(name, float(for_s))

    def _suspend(self, name: str, for_s: str) -> None:
        self.cluster.pause(name, float(for_s), suspended=True)

    def _drain(self, name: str) -> None:
        self.cluster.drain(name)

    def _break(self, name: str) -> None:
        self.cluster.break_session(name, "connection reset")

    def _deaden(self, name: str) -> None:
        self.cluster.deaden_session(name)

    def _cut(self, source: str, target: str) -> None:
        self.cluster.story.tell(f"FAULT nothing passes from {source} to {target}")
        self.cluster.network.cut(source, target)

    def _partition(self, *side: str) -> None:
        self.cluster.story.tell(f"FAULT partition: {', '.join(side)} against the rest")
        for one in side:
            for other in {*self.cluster.nodes} - {*side}:
                self.cluster.network.cut(one, other)
                self.cluster.network.cut(other, one)
        self.cluster.store.cut_off |= {*side}

    def _heal(self) -> None:
        self.cluster.story.tell("the network is whole again")
        self.cluster.network.heal()
        self.cluster.store.cut_off.clear()

    def _store(self, what: str, count: str = "1") -> None:
        store = self.cluster.store
        self.cluster.story.tell(f"FAULT the store: {what}")
        match what:
            case "away":
                store.away = True
            case "back":
                store.away = False
            case "loses-answers":
                store.replies_lost = int(count)
            case "loses-lease":
                store.revoke()
            case _:
                raise ValueError(f"store {what}: expected away, back, loses-answers, loses-lease")

    def _die(self, name: str, *step: str) -> None:
        """Let what runs on a host die when it next comes to a place of core.steps."""
        place, cluster = EffectGap(" ".join(step)), self.cluster

        def on_step(host: str, passed: EffectGap) -> bool:
            if (host, passed) != (name, place):
                return False
            cluster.on_step = lambda host, step: False
            cluster.crash(host, f"dies where it is {place.value!r}")
            return True

        cluster.on_step = on_step

    def _status(self) -> None:
        """Tell what the coordinator would show, and what is on record."""
        cluster, tell = self.cluster, self.cluster.story.tell
        for coordinator in cluster.coordinators.values():
            report = coordinator.machine.report()
            states = ", ".join(
                f"{n.node_id} {n.state}" + ("" if n.node_rank is None else f" rank {n.node_rank}")
                for n in report.nodes
            )
            tell(f"coordinator on {coordinator.host}: {report.phase}; {states or 'no nodes'}")
        record = cluster.store.filed.record
        if record is not None:
            world = record.world
            members = " ".join(m.node_id for m in world.members) if world else "no node"
            at = f"{world.fence}: {members}" if world else "no world yet"
            end = f"; ended: {record.outcome.reason}" if record.outcome else ""
            tell(f"on record: {at}; {record.restarts_used} restarts used{end}")
