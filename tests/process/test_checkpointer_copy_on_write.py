"""Restored tensors lie in the snapshot's memory for a while, and no save overwrites them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from unittest import mock

import pytest
import torch
from process_harness import until
from snapshot_server_support import Node, snapshot_servers
from supervise import alive

from elastane.checkpoint import copy_on_write
from elastane.checkpoint.checkpointer import Checkpointer
from elastane.process import kernel
from elastane.snapshots.client import SnapshotClient


class Trained:
    """A model of some pages, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1000, 1100)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def objects(self) -> dict:
        return {"net": self.net, "optimizer": self.optimizer}

    def step(self) -> None:
        self.net(torch.ones(1, 1000)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moments(self) -> list[torch.Tensor]:
        return [v for held in self.optimizer.state.values() for v in held.values()]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.net.parameters(), *self.moments()]

    def equals(self, other: Trained) -> bool:
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


@pytest.fixture
def node(tmp_path):
    if not copy_on_write.is_supported():
        pytest.skip("the kernel has no MADV_POPULATE_WRITE, or gives huge pages to all")
    with Node(tmp_path) as node:
        yield node


@pytest.fixture
def known(node, tmp_path):
    """The state of step 3, saved by a process that has ended for the snapshot server."""
    one = Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        ck.restore(one.objects())
        for _ in range(3):
            one.step()
        ck.save(3)
    return one


def save_others(where, times: int = 6) -> None:
    """Fill all free slots; a process that restores copies its tensors at once."""
    other = Trained()
    with mock.patch.object(copy_on_write, "is_supported", lambda: False), Checkpointer(where) as ck:
        ck.restore(other.objects())
        for number in range(times):
            other.step()
            ck.save(100 + number)


def test_training_continues_from_the_snapshot_as_if_it_had_never_stopped(known, tmp_path):
    two = Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(two.objects()).where == "memory"
        assert ck._borrowed is not None, "it was lent"
        assert two.equals(known)
        for step in range(4, 10):
            known.step()
            two.step()
            ck.save(step)
            assert two.equals(known), step


@pytest.fixture
def held_up(monkeypatch):
    """No tensor gets memory of its own before this is set."""
    go, take = threading.Event(), kernel.take_pages

    def wait(address: int, size: int) -> None:
        assert go.wait(60)
        take(address, size)

    monkeypatch.setattr(kernel, "take_pages", wait)
    yield go
    go.set()


def test_shared_memory_is_not_used_for_other_saves(known, tmp_path, held_up):
    two = Trained()
    ck = Checkpointer(tmp_path / "ck")
    assert ck.restore(two.objects()).where == "memory"
    save_others(tmp_path / "ck")
    assert two.equals(known)
    held_up.set()
    ck.close()
    save_others(tmp_path / "ck")
    assert two.equals(known)


def test_a_broken_connection_does_not_release_shared_memory(known, tmp_path, held_up):
    two = Trained()
    ck = Checkpointer(tmp_path / "ck")
    assert ck.restore(two.objects()).where == "memory"
    ck._saver.server.close()
    save_others(tmp_path / "ck")
    assert two.equals(known)
    held_up.set()
    ck.close()
    save_others(tmp_path / "ck")
    assert two.equals(known)


def test_without_memory_for_copies_tensors_stay_in_the_snapshot_with_their_values(
    known, tmp_path, monkeypatch, caplog
):
    def refuse(address: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    two = Trained()
    monkeypatch.setattr(kernel, "take_pages", refuse)
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(two.objects()).where == "memory"
        ck._borrowed.wait()
        assert "stay in the memory of their snapshot: [Errno 12]" in caplog.text
        for step in range(4, 10):
            known.step()
            two.step()
            ck.save(step)
            assert two.equals(known), step


def test_a_partly_loaded_state_gets_its_own_memory_too(known, tmp_path):
    class Unwilling(torch.nn.Linear):
        def load_state_dict(self, *_: object, **__: object) -> None:
            raise RuntimeError("it does not fit")

    two = Trained()
    unwilling = Unwilling(1000, 1100)
    # In this order: the optimizer has been loaded when the model refuses.
    objects = {"optimizer": two.optimizer, "net": unwilling}
    ck = Checkpointer(tmp_path / "ck")
    with pytest.raises(RuntimeError, match="does not fit"):
        ck.restore(objects)
    ck.close()
    save_others(tmp_path / "ck")
    for own, right in zip(two.moments(), known.moments(), strict=True):
        assert torch.equal(own, right)


@pytest.mark.parametrize(("call", "where"), [("held", "storage"), ("release", "memory")])
def test_a_restore_succeeds_although_the_snapshot_server_is_killed(
    call, where, node, tmp_path, monkeypatch, caplog
):
    one, two = Trained(), Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        ck.restore(one.objects())
        for step in (1, 2):  # So that one snapshot is released as soon as the other is restored.
            one.step()
            ck.save(step)
    real, lost = getattr(SnapshotClient, call), []

    def lost_first(client, *args):
        for pid in snapshot_servers(node.agent.pid) if not lost else ():
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not alive(pid), "the snapshot server has ended")
            lost.append(pid)
        return real(client, *args)

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotClient, call, lost_first)
        ck = Checkpointer(tmp_path / "ck")
        restored = ck.restore(two.objects())
    assert restored.step == 2
    assert restored.where == ("memory" if where == "memory" else str(tmp_path / "ck"))
    assert two.equals(one)
    assert lost
    two.step()
    ck.save(3)
    assert "[snapshot-server-lost]" in caplog.text
    ck.save(4)
    ck.close()
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(one.objects()).step == 4
    assert two.equals(one)
