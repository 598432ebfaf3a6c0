"""Plays a history of faults on the hosts of a job, and reads its workers' notes.

`HistoryRun.play` ends every fault, brings every agent back, waits until all hosts train together,
ends the job and checks it by tests/shared/job_promises.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_plans import JUMPS_S, SCRIPTS, WORKER_FAULTS, ZYGOTE_FAULTS, AgentHistory, Fault
from etcd_server import need_etcd
from host_jobs import EtcdHosts, HostJob, RedisHosts, StoreHosts
from hosts import PROGRAMS, PYTHON, Host, Lan, need_hosts
from job_promises import (
    Body,
    BrokenJobError,
    DurableState,
    ExactStep,
    Promised,
    SeenJob,
    SettledWorld,
    check_job,
)
from jobs import PRELOAD_OPTIMIZER, SCRIPT, Agent, until
from redis_server import need_redis
from script_promises import ScriptBody, ScriptPromised, check_script
from timed_faults import End, carry_out

from elastane.observe.events import LoggedEvent
from elastane.protocol.limits import Timing
from elastane.protocol.log_events import EventKind
from elastane.protocol.wire import MAGIC

sys.path.append(str(SCRIPT.parent))
import script_steps
from noted_steps import undisturbed

PROGRAM = SCRIPT.with_name("noted_steps.py")
UNMODIFIED = SCRIPT.with_name("script_steps.py")
STEP_S = 0.05
# All of a host but its first process; see kill(2).
EVERY_PID = -1
# Hundreds of checkpoints.
DISK_BYTES = 4 << 20
# The last line of a file of notes is within this.
LINE_BYTES_MAX = 1024
# A coordinator that reaches no member of the last world waits, and so does a drain.
SETTLE_S = Timing().fence_wait_s + Timing().drain_timeout_s + 60.0
END_S = 90.0
# What all hosts do together, over several checkpoints.
STEPS_AFTER = 50
# More than what workers of one world are apart.
STEPS_APART = 5
# From SIGTERM to the end of a worker that waits in a collective: its agent gives it 5 s.
STRAYS_S = 15.0
START_S = 120.0
OPTIONS = ("--max-restarts", "1000", "--preload", PRELOAD_OPTIMIZER)
# No pause in a crash loop, which a history may look like.
CONF = "crash_loop=0,last_call=1,gather=0.5"
# A world that shrank grows at the next checkpoint.
SCRIPT_CONF = f"{CONF},growth_interval=0"


@dataclass
class NotedJob(HostJob):
    """A job whose workers note their steps."""

    recovery: str = "in-place"

    def __enter__(self) -> Self:
        super().__enter__()
        self.notes.mkdir()
        return self

    def start(self, node: str, *options: str, **how: Any) -> Agent:
        """Start an agent whose clock, and that of its workers, `set_clock` sets."""
        folders = [str(PROGRAMS / "jumping_clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"PYTHONPATH": os.pathsep.join(folders), "JUMPING_CLOCK": str(self._clock(node))}
        return super().start(node, *options, env=env, **how)

    def set_clock(self, node: str, shift_s: float) -> None:
        """Let the time of day of a host differ from the right one by `shift_s`."""
        new = self._clock(node).with_suffix(".new")
        new.write_text(f"{shift_s}")
        new.replace(self._clock(node))

    def _clock(self, node: str) -> Path:
        return self.folder / f"{node}.clock"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def command(self, node: str, nproc: int, options: tuple[str, ...]) -> list[str]:
        words = super().command(node, nproc, options)
        before = words[: words.index(str(SCRIPT))]
        if self.recovery in SCRIPTS:
            how = ["--in-place"] if self.recovery == "script-in-place" else []
            return [*before, *how, str(UNMODIFIED), str(self.folder), str(STEP_S)]
        return [*before, str(PROGRAM), self.recovery, str(self.folder), str(STEP_S)]

    def newest_notes(self) -> dict[str, dict[str, Any]]:
        """Return the last note of each process, by the name of its file."""
        found = {}
        for path in self.notes.iterdir():
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - LINE_BYTES_MAX))
                lines = file.read().split(b"\n")
            with suppress(ValueError, IndexError):
                found[path.stem] = json.loads(lines[-2])
        return found


@dataclass
class HistoryRun:
    """One history of one job on hosts that are up."""

    history: AgentHistory
    job: NotedJob
    store: StoreHosts | None
    disk: SharedDisk
    cuts: list[Fault] = field(default_factory=list)
    # Newest agent of each host, and since when the host is up.
    agents: dict[str, Agent] = field(default_factory=dict)
    up_s: dict[str, float] = field(default_factory=dict)
    # Agents that a fault ends.
    ending: list[Agent] = field(default_factory=list)
    harmed_workers: int = 0
    told: list[str] = field(default_factory=list)
    settled_after_s: float = 0.0

    def play(self) -> dict[str, int]:
        """Play the whole history, and check it; return the counts of `check`."""
        late = self.history.hosts[-1:] if self.history.late_s else ""
        for name in self.history.hosts:
            self.up_s[name] = time.monotonic()
            if name != late:
                self._start(name)
        until(lambda: self._has_stepped(late), "the first world steps", START_S)
        self._harm(late)
        self._settle()
        return self.check()

    def check(self) -> dict[str, int]:
        """Check the notes and events of an ended job; return how much was checked."""
        seen = self._seen()
        steps = max((body.step for body in seen.bodies), default=0) + 1
        per_host, hosts = self.history.workers_per_host, len(self.history.hosts)
        is_script = self.history.recovery in SCRIPTS
        promised = Promised(
            size_min=self.history.nodes_min * per_host,
            size_max=hosts * per_host,
            harmed_workers=self.harmed_workers,
            steps=() if is_script else exact_steps(steps),
        )
        found = (
            check_script(seen, self._of_script(promised))
            if is_script
            else check_job(seen, promised)
        )
        return found | {"settled after s": round(self.settled_after_s)}

    def _of_script(self, bounds: Promised) -> ScriptPromised:
        zero = (0.0,) * script_steps.SIZE
        return ScriptPromised(
            bounds=bounds,
            shrinks=self.history.recovery == "script-in-place",
            first=(script_steps.digest(zero, zero), (zero, zero)),
            replay=script_steps.replayed,
        )

    # Faults.

    def _harm(self, late: str) -> None:
        """Begin and end each fault in its time, and let the late host arrive."""
        arrivals = [(self.history.late_s, lambda: self._start(late))] if late else []
        carry_out(self.history.faults, self._begin, arrivals)

    def _begin(self, fault: Fault) -> End:
        self.told.append(f"{time.time():.3f} {fault}")
        if fault.kind in WORKER_FAULTS:
            return self._harm_worker(fault)
        if fault.kind in ZYGOTE_FAULTS:
            return self._harm_zygote(fault)
        acts: dict[str, Callable[[Fault], End]] = {
            "kill-agent": self._kill_agent,
            "power": self._power,
            "leave": self._leave,
            "stop-agent": self._stop_agent,
            "suspend": self._suspend,
            "store-killed": self._kill_store,
            "store-stopped": self._stop_store,
            "disk-full": self._fill_disk,
            "clock": self._set_clock,
            "garbage": self._send_garbage,
        }
        return acts.get(fault.kind, self._cut)(fault)

    def _cut(self, fault: Fault) -> End:
        def end() -> None:
            self.cuts.remove(fault)
            self._apply_cuts()

        self.cuts.append(fault)
        self._apply_cuts()
        return end

    def _apply_cuts(self) -> None:
        lan = self.job.lan
        lan.heal()
        stores = self.history.stores
        everyone = self.history.hosts + stores
        for fault in self.cuts:
            others = {"part": fault.other, "store-part": stores}.get(fault.kind, everyone)
            cut = {"mute": lan.mute, "deafen": lan.deafen}.get(fault.kind, lan.cut_off)
            cut(fault.host, *others.replace(fault.host, ""))

    def _kill_agent(self, fault: Fault) -> End:
        self._end(fault.host, signal.SIGKILL)
        return lambda: self._start(fault.host)

    def _power(self, fault: Fault) -> End:
        if fault.host not in self.job.lan.hosts:
            return lambda: None
        if fault.host in self.agents:
            self.ending.append(self.agents[fault.host])
        self.job.lan.kill(fault.host)

        def end() -> None:
            self.job.lan.add(fault.host)
            self.up_s[fault.host] = time.monotonic()
            self._apply_cuts()
            self._start(fault.host)

        return end

    def _leave(self, fault: Fault) -> End:
        self._end(fault.host, signal.SIGTERM)
        return lambda: self._start(fault.host)

    def _stop_agent(self, fault: Fault) -> End:
        agent = self.agents.get(fault.host)
        if agent is None:
            return lambda: None
        agent.send(signal.SIGSTOP)
        return lambda: agent.send(signal.SIGCONT)

    def _suspend(self, fault: Fault) -> End:
        host = self.job.lan.hosts.get(fault.host)
        if host is None:
            return lambda: None
        if self.history.agent_continues_alone(fault):
            self.harmed_workers += self.history.workers_per_host
        host.ask("signal", pid=EVERY_PID, number=int(signal.SIGSTOP))

        def end() -> None:
            if host.is_up:
                host.ask("signal", pid=EVERY_PID, number=int(signal.SIGCONT))

        return end

    def _harm_worker(self, fault: Fault) -> End:
        """Kill or stop a random living worker of the host."""
        alive = sorted(
            (note["at_s"], int(name.split(".")[1]))
            for name, note in self.job.newest_notes().items()
            if name.startswith(f"{fault.host}.") and _started_s(name) > self.up_s[fault.host]
        )[-self.history.workers_per_host :]
        if not alive or fault.host not in self.job.lan.hosts:
            return lambda: None
        self.harmed_workers += 1
        return self._harm_process(fault, [pid for _, pid in alive])

    def _harm_zygote(self, fault: Fault) -> End:
        """Kill or stop a process of the host from which workers are forked, or their rendezvous."""
        host = self.job.lan.hosts.get(fault.host)
        zygotes = [] if host is None else _zygotes(host)
        return self._harm_process(fault, zygotes) if zygotes else lambda: None

    def _harm_process(self, fault: Fault, pids: list[int]) -> End:
        host = self.job.lan[fault.host]
        pid = random.Random(fault.draw).choice(pids)
        stop = fault.kind.startswith("stop")
        number = signal.SIGSTOP if stop else signal.SIGKILL
        host.ask("signal", pid=pid, number=int(number))

        def end() -> None:
            if stop and host.is_up:
                host.ask("signal", pid=pid, number=int(signal.SIGCONT))

        return end

    def _kill_store(self, fault: Fault) -> End:
        assert self.store is not None
        self.store.processes[fault.host].kill()
        return lambda: self._start_store(fault.host)

    def _start_store(self, host: str) -> None:
        assert self.store is not None
        if self.store.processes[host].poll() is not None:
            self.store.launch(host)

    def _stop_store(self, fault: Fault) -> End:
        assert self.store is not None
        store = self.store.processes[fault.host]
        store.send_signal(signal.SIGSTOP)
        return lambda: store.send_signal(signal.SIGCONT)

    def _fill_disk(self, fault: Fault) -> End:
        self.disk.fill()
        return self.disk.free

    def _set_clock(self, fault: Fault) -> End:
        self.job.set_clock(fault.host, JUMPS_S[fault.draw % len(JUMPS_S)])
        return lambda: self.job.set_clock(fault.host, 0.0)

    def _send_garbage(self, fault: Fault) -> End:
        host = self.job.lan.hosts.get(fault.host)
        if host is None:
            return lambda: None
        words = [*PYTHON, str(PROGRAMS / "garbage.py"), str(fault.draw), MAGIC.hex()]
        sender = host.start(words, {}, self.job.folder / f"{fault.host}.garbage.log")
        return sender.kill

    # Agents.

    def _start(self, host: str) -> None:
        """Start the host's agent, unless it runs or the host is down."""
        agent = self.agents.get(host)
        is_up = host in self.job.lan.hosts
        if is_up and (agent is None or agent.process.poll() is not None):
            self.agents[host] = self.job.start(host, nproc=self.history.workers_per_host)

    def _end(self, host: str, number: signal.Signals) -> None:
        """Send a signal that ends the host's agent, if the host has one."""
        if host in self.agents:
            self.ending.append(self.agents[host])
            self.agents[host].send(number)

    def _check_agents(self) -> None:
        """Raise an error if an agent has ended by itself."""
        for agent in self.job.agents:
            if agent.process.poll() is not None and agent not in self.ending:
                raise BrokenJobError(
                    f"agent {agent.name} ended by itself with {agent.process.poll()}:\n"
                    f"{agent.words[-3000:]}"
                )

    # The end.

    def _has_stepped(self, late: str) -> bool:
        self._check_agents()
        nodes = {name.partition(".")[0] for name in self.job.newest_notes()}
        return nodes == {*self.history.hosts} - {*late}

    def _settle(self) -> None:
        """Bring all agents back, wait until all hosts train together, and end the job."""
        healed_s = time.monotonic()
        for host in self.history.hosts:
            agent = self.agents.get(host)
            if agent is not None and agent in self.ending:
                agent.wait(END_S)
            self._start(host)
        # From now on none may end.
        until(self._all_train, "all hosts train together after all faults", SETTLE_S)
        self.settled_after_s = time.monotonic() - healed_s
        until(lambda: not self._strays(), "no worker of an older world is left", STRAYS_S)
        last = self._step() + STEPS_AFTER
        until(lambda: self._step() >= last, f"step {last} with all hosts", END_S)
        (self.job.folder / "enough").touch()
        until(lambda: not any(a.is_alive for a in self.agents.values()), "all agents end", END_S)
        self.job.wait_event(EventKind.JOB_ENDED)

    def _all_train(self) -> bool:
        """Whether the newest world has all workers of all hosts, and each makes steps in it."""
        self._check_agents()
        notes = self.job.newest_notes().values()
        newest, step = max((note["fence"], note["step"]) for note in notes)
        # A script's worker that was lost from a world keeps the fence of that world.
        places = {
            (note["rank"], note["size"])
            for note in notes
            if note["fence"] == newest and note["step"] > step - STEPS_APART
        }
        most = len(self.history.hosts) * self.history.workers_per_host
        return places == {(rank, most) for rank in range(most)}

    def _step(self) -> int:
        """Return the furthest step of the newest world."""
        notes = self.job.newest_notes().values()
        return max((note["fence"], note["step"]) for note in notes)[1]

    def _strays(self) -> list[str]:
        """Return the living processes that have noted steps and are not in the newest world."""
        notes = self.job.newest_notes()
        newest = max(note["fence"] for note in notes.values())
        found = []
        for host in self.history.hosts:
            alive = set(self.job.lan[host].run("sh", "-c", "cd /proc && echo [0-9]*").split())
            found += [
                name
                for name, note in notes.items()
                if name.startswith(f"{host}.")
                and name.split(".")[1] in alive
                and _started_s(name) > self.up_s[host]
                and note["fence"] != newest
            ]
        return found

    # What was seen.

    def _seen(self) -> SeenJob:
        events = self.job.events()
        charges = [e for e in events if e.kind in (EventKind.RESTART, EventKind.REPLACEMENT)]
        ends = [e.data["ok"] for e in events if e.kind == EventKind.JOB_ENDED]
        started = {
            (e.node, int(pid))
            for e in events
            if e.kind == EventKind.WORKERS_STARTED
            for pid in re.findall(r"\d+", str(e.data["pids"]))
        }
        return SeenJob(
            bodies=[body for path in sorted(self.job.notes.iterdir()) for body in bodies_of(path)],
            worlds=[
                SettledWorld(
                    (e.round or 0, e.attempt or 0),
                    tuple(str(e.data["members"]).split()),
                    int(e.data["world_size"]),
                    e.mono_s,
                )
                for e in events
                if e.kind == EventKind.ROUND_SETTLED
            ],
            saves=[
                *(durable(e) for e in events if e.kind == EventKind.CHECKPOINT_SAVED),
                *(save for path in self.job.notes.iterdir() for save in saves_of(path)),
            ],
            started=frozenset(started),
            charged=max((int(e.data["used"]) for e in charges), default=0),
            codes=[(host, agent.process.poll() or 0) for host, agent in self.agents.items()],
            is_ok=bool(ends) and all(ends),
        )


def durable(event: LoggedEvent) -> DurableState:
    """Return the checkpoint of a line of the event log."""
    return DurableState(
        steps=int(event.data["step"]),
        began_s=event.mono_s - float(event.data["age_s"]),
        at_s=event.mono_s,
    )


def _started_s(process: str) -> float:
    return int(process.split(".")[2]) / 1e9


def bodies_of(path: Path) -> Iterator[Body]:
    """Yield the bodies in a file of notes; a killed process may leave half a line."""
    body: ScriptBody | None = None
    for line in path.read_text().splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if note["what"] == "body":
            if body is not None:
                yield body
            body = ScriptBody(
                path.stem,
                path.stem.partition(".")[0],
                (note["fence"][0], note["fence"][1]),
                note["rank"],
                note["size"],
                note["step"],
                tuple(note.get("samples", ())),
                note["digest"],
                note["at_s"],
            )
        elif note["what"] == "committed":
            assert body is not None and body.step == note["step"], (path, line)
            body = replace(
                body,
                after=note["digest"],
                committed_s=note["at_s"],
                weights=tuple(note.get("weights", ())),
            )
    if body is not None:
        yield body


def saves_of(path: Path) -> Iterator[DurableState]:
    """Yield the checkpoints that an unmodified script notes in a file."""
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            note = json.loads(line)
            if note["what"] == "saved":
                yield DurableState(note["step"], note["began_s"], note["at_s"])


def _zygotes(host: Host) -> list[int]:
    """Return the processes of a host that fork workers or serve their process group."""
    of_each = "for p in [0-9]*; do grep -q elastane.process.zygote $p/cmdline && echo $p; done"
    found = host.run("sh", "-c", f"cd /proc && {of_each}; true")
    return sorted(map(int, found.split()))


def exact_steps(steps: int) -> list[ExactStep]:
    """Return the expected first steps."""
    before, made = undisturbed(steps)
    found = []
    for samples, after in made:
        found.append(ExactStep(tuple(samples), before, after))
        before = after
    return found


class SharedDisk:
    """A small file system that all hosts share, for checkpoints; a context.

    It is mounted before the hosts start, since they inherit the mount.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        self._fills = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        options = f"size={DISK_BYTES},mode=0777"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(self.folder)], check=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        self._fills += 1
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            for block in (b"\0" * 4096, b"\0"):
                with suppress(OSError):
                    while file.write(block):
                        pass

    def free(self) -> None:
        """Free the space again, unless a later fault has filled it."""
        self._fills -= 1
        if not self._fills:
            self._filler.unlink(missing_ok=True)


@contextmanager
def history_on(history: AgentHistory, folder: Path) -> Iterator[HistoryRun]:
    """Yield a job on hosts for a history; end all of its processes."""
    need_hosts()
    {"etcd": need_etcd, "redis": need_redis}.get(history.backend, lambda: None)()
    folder.mkdir(parents=True)
    least = history.nodes_min * history.workers_per_host
    more = ("--min-workers", str(least)) if "in-place" in history.recovery else ()
    with SharedDisk(folder / "disk") as disk, Lan(history.hosts + history.stores) as lan:
        job = NotedJob(
            folder,
            f"{history.nodes_min}:{len(history.hosts)}",
            (*OPTIONS, *more),
            SCRIPT_CONF if history.recovery in SCRIPTS else CONF,
            backend=history.backend,
            lan=lan,
            recovery=history.recovery,
        )
        store = _store_of(history, lan, folder)
        if store is not None:
            job.endpoint = store.endpoint
        elif history.backend == "file":
            job.endpoint = str(folder / "store")
        else:
            job.at(history.hosts[0])
        with job:
            yield HistoryRun(history, job, store, disk)


def _store_of(history: AgentHistory, lan: Lan, folder: Path) -> StoreHosts | None:
    """Start the store of a history, if it has hosts for one."""
    kinds = {"etcd": EtcdHosts, "redis": RedisHosts}
    if not history.stores:
        return None
    return kinds[history.backend](lan, history.stores, folder / history.backend).start()
