"""Snapshot servers for tests, with a fake agent, or with a single worker."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from process_harness import DEADLINE_S, SCRIPTS, until, worker_environment
from supervise import alive, children, command_line

from elastane.protocol.checkpoints import Key
from elastane.protocol.messages import NodeCopies
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.limits import ANSWER_S
from elastane.snapshots.messages import PersistRequest, Snapshot
from elastane.storage.places import open_storage
from elastane.storage.repository import Repository

SLOT_BYTES = 1 << 16


class Node:
    """A fake agent, and the snapshot server that it owns."""

    def __init__(self, folder: Path, **environment: str) -> None:
        run = folder / "run"
        run.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.environment = worker_environment(XDG_RUNTIME_DIR=str(run), **environment)
        self.path = Path()

    def __enter__(self) -> Node:
        with (self.folder / "words").open("ab") as words:
            self.agent = subprocess.Popen(
                [sys.executable, SCRIPTS / "snapshot_server_agent.py"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                start_new_session=True,
            )
        assert self.agent.stdout is not None
        self.path = Path(self.agent.stdout.readline().decode().strip())
        os.environ["ELASTANE_SNAPSHOT_SERVER"] = str(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop("ELASTANE_SNAPSHOT_SERVER", None)
        left = snapshot_servers(self.agent.pid)
        for pipe in (self.agent.stdin, self.agent.stdout):
            assert pipe is not None
            pipe.close()
        self.agent.kill()
        self.agent.wait()
        for pid in left:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    @property
    def words(self) -> str:
        """The output of agent and snapshot server."""
        return (self.folder / "words").read_text()

    @property
    def server_pid(self) -> int:
        """The pid of the snapshot server."""
        until(lambda: len(snapshot_servers(self.agent.pid)) == 1, "one snapshot server")
        return next(iter(snapshot_servers(self.agent.pid)))

    def copies(self) -> NodeCopies:
        """Return the newest copies of its workers' state, as its heartbeats report them."""
        assert self.agent.stdin is not None and self.agent.stdout is not None
        self.agent.stdin.write(b"copies\n")
        self.agent.stdin.flush()
        return (
            msgspec.json.decode(self.agent.stdout.readline(), type=NodeCopies | None)
            or NodeCopies()
        )

    def leave(self) -> None:
        """Let the agent end in an orderly way, and wait for its end."""
        assert self.agent.stdin is not None
        self.agent.stdin.write(b"leave\n")
        self.agent.stdin.flush()
        assert self.agent.wait(DEADLINE_S) == 0

    def kill(self) -> None:
        """Kill only the agent."""
        self.agent.kill()
        self.agent.wait()


def snapshot_servers(parent: int) -> set[int]:
    """Return the pids of the snapshot servers of a process."""
    return {pid for pid in children(parent) if "elastane-snapshots" in command_line(pid)}


class Worker:
    """A worker's connection to the server, and its slots."""

    def __init__(
        self,
        slots: int = 3,
        slot_bytes: int = SLOT_BYTES,
        group: str = "",
        timeout_s: float = ANSWER_S,
    ) -> None:
        self.client = SnapshotClient.connect(group, timeout_s=timeout_s)
        self.size = slot_bytes
        self.take(slots, slot_bytes)

    def take(self, slots: int, slot_bytes: int) -> None:
        self.size = slot_bytes
        self.slots = []
        for fd in self.client.slots(slots, slot_bytes):
            self.slots.append(mmap.mmap(fd, slot_bytes))
            os.close(fd)

    def save(self, step: int, persist: PersistRequest | None = None, **more: object) -> Key:
        """Save a snapshot that consists of its step's number."""
        slot = self.client.grant(DEADLINE_S)
        self.slots[slot][:] = bytes([step % 251]) * self.size
        wish = snapshot(step, self.size, persist, **more)
        self.client.keep(slot, wish)
        return wish.key

    def steps(self) -> list[int]:
        """Return the steps of the held snapshots, after comparing their bytes."""
        steps = []
        for held in self.client.held():
            step = held.key.step
            for first, end, fd in held.pieces:
                assert os.pread(fd, end - first, 0) == bytes([step % 251]) * (end - first)
            steps.append(step)
            self.client.release(held)
        return steps


def successor(slots: int = 3) -> Worker:
    """Return a new worker that has inherited the slots of a dead one.

    A worker that asks before the server has seen the death gets slots of its own, and keeps those.
    """
    asked: list[Worker] = []

    def has_inherited() -> bool:
        asked.append(Worker(slots=1))
        if len(asked[-1].slots) == slots:
            return True
        asked[-1].client.close()
        return False

    until(has_inherited, "the slots of the dead")
    return asked[-1]


def snapshot(step: int, size: int, persist: PersistRequest | None, **more: object) -> Snapshot:
    given = {"key": Key(0, 1, 0, step), "nonce": f"{step:08x}", "first": 0, "end": size}
    given |= {"image_bytes": size, "files": {"state.msgpack": b"%d" % step}, "persist": persist}
    return Snapshot(**{**given, **more})


def persist_to(where: Path, size: int = SLOT_BYTES, **more: object) -> PersistRequest:
    given = {"where": str(where), "job": "job", "world": 1, "versions": {}, "reason": "step"}
    given |= {"ranges": (("__0_0.distcp", 0, size),), "keep": 2, "wait_s": 20.0}
    return PersistRequest(**{**given, **more})


def published(where: Path) -> list[tuple[int, str]]:
    """Return step and reason of the checkpoints in a folder, newest first; each is read whole."""
    repository = Repository(open_storage(str(where)))
    found = repository.published()
    assert [repository.verify(one) for one in found] == [""] * len(found)
    return [(one.key.step, one.manifest.about.reason) for one in found]
