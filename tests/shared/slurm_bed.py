"""A real Slurm on this machine: one slurmctld, and a slurmd for each of four nodes.

The nodes are called 127.0.0.1 to 127.0.0.4, so that their names resolve to this machine, as node
names do on a cluster. Authentication is none: everything is of one user. Slurm finds the processes
of a task by their process group. A notice then reaches the agent alone, as with cgroups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import _die_with_parent
from ports import free_ports

NODES = tuple(f"127.0.0.{number}" for number in range(1, 5))
START_S = 60.0
DEADLINE_S = 150.0
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
# cred_expire: for so long, and a second, a requeued job waits. KillWait: SIGTERM to SIGKILL.
# SlurmdTimeout: after so much silence a node is down.
_CONF = """\
ClusterName=bed
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser={user}
SlurmdUser={user}
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=40
SlurmdTimeout=10
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


class SlurmBed:
    """One cluster; `call` runs Slurm's commands on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        user = pwd.getpwuid(os.geteuid()).pw_name
        # The port of a job's rendezvous follows from its number, and other beds have jobs too.
        first_job = random.randint(1, 1_000_000)
        conf = _CONF.format(
            ports=ports, folder=self.folder, user=user, nodes=nodes, first_job=first_job
        )
        (self.folder / "slurm.conf").write_text(conf)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self.join(node)
        self.wait(lambda: self.nodes_in("idle") == set(NODES), "all nodes are idle", START_S)

    def join(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._slurmd[node] = self._daemon("slurmd", "-D", "-N", node)

    def lose(self, node: str, job: str) -> None:
        """Kill a node with all that is Slurm's on it and its agent, as a power cut would."""
        agent = self.tasks(job)[node]
        slurmstepd = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        self._slurmd[node].kill()
        self._slurmd[node].wait()
        for pid in (slurmstepd, agent):
            os.kill(pid, signal.SIGKILL)

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        self._daemons.append(daemon)
        return daemon

    def call(self, *words: str, text: str | None = None, check: bool = True) -> str:
        """Run a command of Slurm, and return what it said."""
        done = subprocess.run(
            words,
            env=self.env,
            cwd=self.folder,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0 or not check, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a script, and return the number of its job."""
        return self.call("sbatch", "--parsable", *options, text=script)

    def state(self, job: str) -> str:
        """Return the state of a job; empty once Slurm has forgotten it."""
        shown = self.call("scontrol", "show", "--oneliner", "job", job, check=False)
        return next((w.partition("=")[2] for w in shown.split() if w.startswith("JobState=")), "")

    def nodes_in(self, state: str) -> set[str]:
        """Return the nodes that `sinfo` shows in a state."""
        lines = self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T", check=False)
        return {line.split()[0] for line in lines.splitlines() if line.split()[1:] == [state]}

    def tasks(self, job: str) -> dict[str, int]:
        """Return the pid of the agent of each node of a job."""
        return {
            environ["SLURMD_NODENAME"]: pid
            for pid, environ in _processes()
            if environ.get("SLURM_CONF") == self._conf
            and environ.get("SLURM_JOB_ID") == job
            and "SLURM_STEP_ID" in environ
            and environ.get("SLURM_TASK_PID") == str(pid)
        }

    @property
    def _conf(self) -> str:
        return self.env["SLURM_CONF"]

    def wait(self, holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until something holds; AssertionError with what the daemons said."""
        deadline = time.monotonic() + deadline_s
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self._story()}")
            time.sleep(0.05)

    def _story(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        jobs = self.call("squeue", check=False) + "\n" + self.call("sinfo", check=False)
        return jobs + "".join(f"\n== {p.name}\n{p.read_text()[-3000:]}" for p in logs)

    def close(self) -> None:
        """End all jobs and daemons; fail if a process of a job is left."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--signal=KILL", "--full", "--user", self._user, check=False)
            self.call("scancel", "--user", self._user, check=False)
            self.wait(lambda: not self._left(), "no process of a job is left", 20.0)
        left = {pid: _command(pid) for pid in self._left()}
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes of jobs were left: {left}"

    @property
    def _user(self) -> str:
        return pwd.getpwuid(os.geteuid()).pw_name

    def _left(self) -> list[int]:
        daemons = {daemon.pid for daemon in self._daemons}
        return [
            pid
            for pid, environ in _processes()
            if environ.get("SLURM_CONF") == self._conf
            and pid not in daemons
            and "slurmscriptd" not in _command(pid)
        ]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each process of this machine with its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                pairs = (word.partition("=") for word in words)
                yield int(entry.name), {name: value for name, _, value in pairs}


# linux/prctl.h
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def need_slurm() -> None:
    """Skip without Slurm."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: apt-get install slurmctld slurmd slurm-client")


@contextlib.contextmanager
def slurm_bed(folder: Path) -> Iterator[SlurmBed]:
    """Start a cluster, and end it with everything that it runs."""
    need_slurm()
    bed = SlurmBed(folder)
    with _adopting_no_orphans():
        try:
            try:
                bed.start()
            except AssertionError as error:
                pytest.skip(f"Slurm's daemons do not come up on this host: {error}"[:2000])
            yield bed
        finally:
            bed.close()


@contextlib.contextmanager
def _adopting_no_orphans() -> Iterator[None]:
    """Leave orphans to init, which reaps them.

    A test before may have made this process a subreaper, and Slurm waits for the end of a process
    group in which an orphan is a zombie.
    """
    prctl, was = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)
