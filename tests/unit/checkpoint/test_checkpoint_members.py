"""A rank warns while it waits for others that may never call."""

import threading
import time

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastane.checkpoint.members import GroupMembers, PeerTimeout

SAID = "this rank has waited"


@pytest.fixture
def group():
    """A group of two ranks with this process as one of them; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def told(caplog) -> int:
    return sum(SAID in record.getMessage() for record in caplog.records)


def until(condition) -> None:
    until_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_rank_that_waits_alone_warns_once_per_wait(group, caplog, monkeypatch):
    patience, looks = PeerTimeout(0.02), 0
    members = GroupMembers(group, patience)

    def nobody_comes(*_: object, **__: object) -> None:
        until(lambda: told(caplog) > looks)
        with monkeypatch.context() as counted:
            seen = threading.Semaphore(0)
            real = time.sleep
            counted.setattr(time, "sleep", lambda s: (seen.release(), real(s)))
            for _ in range(4):
                seen.acquire(timeout=30)

    monkeypatch.setattr(dist, "all_gather", nobody_comes)
    threads = set()
    for looks in range(2):
        members.numbers([3])
        assert told(caplog) == looks + 1, "once for each wait, however long"
        threads.add(patience._thread)
    assert len(threads) == 1 and threads.pop().daemon
    assert "[checkpoint-ranks]" in caplog.text


def test_waits_for_texts_do_not_warn(group, monkeypatch):
    class Never(PeerTimeout):
        def __enter__(self) -> None:
            raise AssertionError("it is watched")

    members = GroupMembers(group, Never())
    monkeypatch.setattr(dist, "all_gather", lambda heard, own, group: [h.copy_(own) for h in heard])
    assert members.texts(b"long") == [b"long", b"long"]
    with pytest.raises(AssertionError, match="it is watched"):
        members.numbers([0])
