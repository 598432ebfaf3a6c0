"""The installed torch's torchrun with elastane's rendezvous, with real processes and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

import pytest
from etcd_server import need_etcd
from jobs import MARK, left_over, until
from ports import free_port

from elastane.elastic.rendezvous.etcd_server import EtcdServer

SCRIPT = Path(__file__).parent / "scripts" / "torchrun_steps.py"
DEADLINE_S = 90.0
FOR_EVER = 100_000
# Time enough for a spare to come.
STEPS = 150


@dataclass(frozen=True)
class Step:
    rank: int
    step: int
    world: int
    restarts: int
    node: str
    pid: int
    time_s: float


@dataclass
class Torchruns:
    """Some torchruns of one job on this machine; leaves no process behind."""

    folder: Path
    nnodes: str = "2"
    steps: int = FOR_EVER
    backend: str = "elastane"
    endpoint: str = ""
    conf: str = ""
    restarts: int = 3
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.endpoint = self.endpoint or f"127.0.0.1:{free_port()}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        for name in self.agents:
            self.kill_node(name)
        until(lambda: not left_over(self.mark), "no process of the job is left")
        if isinstance(error, Exception):
            error.add_note("\n".join(f"--- {name}\n{self.words(name)}" for name in self.agents))

    def start(self, name: str) -> None:
        kept = ("PATH", "HOME", "VIRTUAL_ENV", "TMPDIR", "LD_LIBRARY_PATH")
        base = {key: os.environ[key] for key in kept if key in os.environ}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--rdzv-backend", self.backend, "--rdzv-endpoint", self.endpoint),
                    *("--rdzv-id", f"job-{self.mark[:8]}", "--nnodes", self.nnodes),
                    *("--nproc-per-node", "1", "--max-restarts", str(self.restarts)),
                    *(("--rdzv-conf", self.conf) if self.conf else ()),
                    *(str(SCRIPT), str(self.folder / "steps"), str(self.steps)),
                ],
                env={**base, "OMP_NUM_THREADS": "1", MARK: self.mark, "NODE": name, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill_node(self, name: str) -> None:
        """SIGKILL all processes of a node at once, like a power cut."""
        agent = self.agents[name]
        if agent.poll() is None:
            agent.send_signal(signal.SIGSTOP)
            agent.kill()
        wanted = f"NODE={name}\0".encode()
        for pid, _ in left_over(self.mark):
            try:
                if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        agent.wait()

    def code(self, name: str) -> int:
        try:
            return self.agents[name].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun {name} still runs") from None

    def words(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def seen(self) -> list[Step]:
        try:
            lines = (self.folder / "steps").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines if line.endswith("\n")]
        return [Step(*map(int, w[:4]), w[4], int(w[5]), float(w[6])) for w in words]

    def wait_steps(self, world: int, but: frozenset[int] = frozenset()) -> list[Step]:
        """Wait for steps of all ranks of a world without processes of `but`; return them."""

        def now() -> list[Step]:
            return [s for s in self.seen() if s.world == world and s.pid not in but]

        until(lambda: len({s.rank for s in now()}) == world, f"steps of a world of {world}")
        return now()


def pids(steps: list[Step]) -> frozenset[int]:
    return frozenset(s.pid for s in steps)


def last_of(steps: list[Step], node: str) -> Step:
    return [s for s in steps if s.node == node][-1]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Torchruns]:
    return lambda **more: Torchruns(tmp_path, **more)


def test_the_entry_point_is_where_torchrun_looks() -> None:
    (entry,) = entry_points(group="torchrun.handlers", name="elastane")
    assert callable(entry.load()())


@pytest.mark.soak
def test_two_torchruns_meet_and_train_and_a_spare_ends_with_success_as_they_do(
    job: Callable[..., Torchruns],
) -> None:
    with job(steps=STEPS) as runs:
        for name in "abc":
            runs.start(name)
        assert [runs.code(name) for name in "abc"] == [0, 0, 0]
        assert len({s.node for s in runs.seen()}) == 2
        assert {(s.rank, s.step) for s in runs.seen()} == {
            (rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)
        }
        assert {s.world for s in runs.seen()} == {2}


@pytest.mark.soak
def test_a_killed_worker_restarts_on_both_nodes(job: Callable[..., Torchruns]) -> None:
    with job() as runs:
        runs.start("a")
        runs.start("b")
        before = runs.wait_steps(2)
        os.kill(last_of(before, "b").pid, signal.SIGKILL)
        after = runs.wait_steps(2, pids(before))
        assert {s.node for s in after} == {"a", "b"}
        assert [agent.poll() for agent in runs.agents.values()] == [None, None]


def status(env: dict[str, str]) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("elastane")), "status", "--json"]
    said = subprocess.run(
        command, capture_output=True, env=os.environ | env, check=False, timeout=90
    )
    return json.loads(said.stdout)


def test_an_elastic_job_survives_a_killed_node_an_arrival_and_a_departure(
    job: Callable[..., Torchruns], tmp_path: Path
) -> None:
    """`elastane status` shows the job while it runs, and not afterwards."""
    (tmp_path / "run").mkdir(mode=0o700)
    here = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    with job(nnodes="1:2", conf="last_call=1", env=here) as runs:
        runs.start("a")
        alone = runs.wait_steps(1)
        runs.start("b")
        both = runs.wait_steps(2, pids(alone))
        (shown,) = status(here)["jobs"]
        assert shown["job"] == f"job-{runs.mark[:8]}"
        assert len(shown["report"]["nodes"]) == 2
        killed_s = last_of(both, "b").time_s
        runs.kill_node("b")
        after = runs.wait_steps(1, pids(alone) | pids(both))
        # torchrun's own c10d backend takes 47 s for this; its workers get an error after 45 s.
        assert after[0].time_s - killed_s < 40.0
        assert runs.agents["a"].poll() is None
        runs.start("c")
        again = runs.wait_steps(2, pids(both))
        assert {s.node for s in again} == {"a", "c"}
        runs.agents["c"].send_signal(signal.SIGTERM)
        left = runs.wait_steps(1, pids(alone) | pids(both) | pids(after) | pids(again))
        assert left[0].node == "a"
        assert runs.code("c") != 0
        runs.agents["a"].send_signal(signal.SIGTERM)
        runs.code("a")
        # An agent that could not say goodbye in time leaves its entry to the next reader.
        assert status(here)["jobs"] == []


@pytest.mark.soak
def test_a_node_whose_restarts_are_used_up_ends_the_job_for_all(
    job: Callable[..., Torchruns],
) -> None:
    with job(restarts=0, env={"FAIL_AFTER": "5"}) as runs:
        runs.start("a")
        runs.start("b")
        assert runs.code("a") == 1
        assert runs.code("b") == 1
        # 3 is the failure; 1, or torch's abort at its exit, that of a worker which lost its peer:
        # either agent may be the first to notice its own, and closes the job before the other
        # has looked.
        assert re.search(r"exitcode *: ([13]|-6) ", runs.words("a") + runs.words("b"))


def test_a_torchrun_that_waits_for_others_ends_by_a_signal_at_once(
    job: Callable[..., Torchruns],
) -> None:
    with job() as runs:
        runs.start("a")
        until(lambda: "1 of at least 2 nodes are here" in runs.words("a"), "it waits")
        runs.agents["a"].send_signal(signal.SIGTERM)
        assert runs.code("a") != 0, "it ends before its join timeout, 600 s"


@pytest.mark.soak
def test_torchruns_meet_in_etcd(job: Callable[..., Torchruns]) -> None:
    need_etcd()
    server = EtcdServer()
    server.start(stderr=subprocess.DEVNULL)
    conf = "store=etcd,etcd_prefix=some/jobs"
    with job(steps=5, endpoint=server.get_endpoint(), conf=conf) as runs:
        runs.start("a")
        runs.start("b")
        assert [runs.code(name) for name in "ab"] == [0, 0]
        assert {s.world for s in runs.seen()} == {2}
    server.stop()


def test_too_few_nodes_end_with_torchs_timeout_that_counts_them(
    job: Callable[..., Torchruns],
) -> None:
    with job(conf="join_timeout=1") as runs:
        runs.start("a")
        assert runs.code("a") == 1
        assert "RendezvousTimeoutError" in runs.words("a")
        assert re.search(r"^elastane\[.+\] waiting: 1 of at least 2 nodes", runs.words("a"), re.M)
        assert "1 of at least 2 nodes joined within 1 s" in runs.words("a")


@pytest.mark.soak
def test_a_job_in_a_shared_folder_survives_the_host_of_its_coordinator(
    job: Callable[..., Torchruns], tmp_path: Path
) -> None:
    with job(nnodes="1:2", conf="store=file", endpoint=str(tmp_path / "shared")) as runs:
        runs.start("a")
        runs.start("b")
        both = runs.wait_steps(2)
        host = re.search(r"\"node_id\":\"[^\"]*?\.(\d+)\.\d+-", _coordinator(tmp_path / "shared"))
        assert host is not None
        (dying,) = [name for name, agent in runs.agents.items() if agent.pid == int(host[1])]
        runs.kill_node(dying)
        after = runs.wait_steps(1, pids(both))
        assert after[0].node != dying


def _coordinator(folder: Path) -> str:
    """Return the store's entry of the current coordinator."""
    (entry,) = folder.glob("*/coordinator/@entry")
    return max(entry.glob("[0-9]*")).read_bytes().decode(errors="replace")
