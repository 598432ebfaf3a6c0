"""A Checkpointer in one process: restored states, and refused uses."""

from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import elastane
from elastane.checkpoint.checkpointer import Checkpointer
from elastane.errors import CheckpointError, ConfigurationError, StorageError
from elastane.observe import progress
from elastane.process.status_page import finish_before_park


class Trained:
    """A model with everything that a state may hold, and its optimizer."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(40, 300),
            torch.nn.BatchNorm1d(300),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(300, 40, dtype=torch.float32),
        )
        self.net.register_buffer("turned", torch.arange(9, dtype=torch.bfloat16).reshape(3, 3).t())
        self.net.register_buffer("nothing", torch.empty(0, 7))
        self.net.register_buffer("flagged", torch.tensor(True))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.generator = torch.Generator().manual_seed(seed)

    def objects(self) -> dict:
        return {
            "net": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
        }

    def step(self) -> None:
        x = torch.randn(8, 40, generator=self.generator)
        self.net(x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def bits(self) -> list[bytes]:
        states = [*self.net.state_dict().values()]
        for held in self.optimizer.state_dict()["state"].values():
            states += held.values()
        raw = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in states]
        lr = str(self.scheduler.get_last_lr()).encode()
        return [*raw, lr, self.generator.get_state().numpy().tobytes()]


def test_a_long_restore_reports_its_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    one = Trained()
    with_saved = Checkpointer(tmp_path, every_steps=1)
    with_saved.restore(one.objects())
    one.step()
    with_saved.save(3)
    with_saved.wait()
    capsys.readouterr()
    other = Trained(1)
    assert Checkpointer(tmp_path, every_steps=1).restore(other.objects()).step == 3
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "restoring" in x]
    assert line.startswith("elastane: restoring step 3: ") and other.bits() == one.bits()


def wait_for(condition) -> None:
    until_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def folders(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir() if path.name.startswith("step-"))


def test_a_restored_run_continues_as_if_it_had_never_stopped(tmp_path):
    one = Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(one.objects()) is None
        for _ in range(5):
            one.step()
        ck.save(5)
        ck.wait()
        for _ in range(4):
            one.step()
        after = one.bits(), torch.rand(3).tolist(), np.random.rand(3).tolist()
    other = Trained(seed=1)
    with Checkpointer(tmp_path / "ck") as ck:
        restored = ck.restore(other.objects())
        assert restored is not None
        assert restored.step == 5
        assert restored.skipped == ()
        for _ in range(4):
            other.step()
        assert other.bits() == after[0]
        assert torch.rand(3).tolist() == after[1]


def test_a_save_has_the_state_of_its_step_although_training_continues(tmp_path):
    one, ck = Trained(), Checkpointer(tmp_path / "ck", keep=10)
    ck.restore(one.objects())
    states = {}
    for number in range(1, 9):
        one.step()
        states[number] = copy.deepcopy(one.net.state_dict())
        ck.save(number)  # its copy continues during the next step
    ck.wait()
    ck.close()
    for name in folders(tmp_path / "ck"):
        state = {"net": {k: torch.zeros_like(v) for k, v in states[1].items()}}
        reader = dcp.FileSystemReader(str(tmp_path / "ck" / name))
        dcp.load(state, storage_reader=reader, no_dist=True)
        number = int(name.split(".")[0].removeprefix("step-"))
        for key, value in states[number].items():
            assert torch.equal(state["net"][key], value), (number, key)
    assert len(folders(tmp_path / "ck")) == 8


def test_torch_alone_reads_a_checkpoint_whole(tmp_path):
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    one.step()
    ck.save(1)
    ck.wait()
    ck.close()
    dcp_to_torch_save(str(tmp_path / "ck" / folders(tmp_path / "ck")[0]), str(tmp_path / "all.pt"))
    read = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, value in one.net.state_dict().items():
        assert torch.equal(read["net"][name], value), name
    assert read["optimizer"]["param_groups"][0]["lr"] == 1e-2
    assert read["scheduler"]["last_epoch"] == 1


def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_restored(tmp_path):
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    for number in (1, 2):
        one.step()
        ck.save(number)
    ck.wait()
    ck.close()
    newest = tmp_path / "ck" / folders(tmp_path / "ck")[-1]
    data = newest / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    ck = Checkpointer(tmp_path / "ck")
    restored = ck.restore(one.objects())
    ck.close()
    assert restored.step == 1
    assert newest.name in restored.skipped[0]
    with pytest.raises(CheckpointError, match=newest.name):
        Checkpointer(tmp_path / "ck", strict=True).restore(one.objects())


def test_if_no_checkpoint_can_be_restored_it_is_an_error(tmp_path):
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    one.step()
    ck.save(1)
    ck.wait()
    ck.close()
    (tmp_path / "ck" / folders(tmp_path / "ck")[0] / "layout.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="nothing can be restored"):
        Checkpointer(tmp_path / "ck").restore(one.objects())


def test_a_run_that_restored_an_older_checkpoint_saves_the_newest_one(tmp_path):
    one, ck = Trained(), Checkpointer(tmp_path / "ck", keep=10)
    ck.restore(one.objects())
    for number in range(1, 6):
        one.step()
        ck.save(number)
    ck.wait()
    ck.close()
    for name in folders(tmp_path / "ck")[2:]:
        shutil.move(tmp_path / "ck" / name, tmp_path / name)
    ck = Checkpointer(tmp_path / "ck", keep=10)
    assert ck.restore(one.objects()).step == 2
    ck.save(3)
    ck.wait()
    ck.close()
    for name in os.listdir(tmp_path):  # those of the abandoned run come back
        if name.startswith("step-"):
            shutil.move(tmp_path / name, tmp_path / "ck" / name)
    ck = Checkpointer(tmp_path / "ck")
    assert ck.restore(one.objects()).step == 3
    ck.close()


def test_parameters_changed_during_a_save_are_noticed_and_later_copied_at_once(tmp_path, caplog):
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    one.step()
    copier = ck._saver.copier
    copy_rest = copier._copy_rest

    def changed(*args):
        with torch.no_grad():
            one.net[0].weight.mul_(2)
        copy_rest(*args)

    copier._copy_rest = changed
    ck.save(1)
    copier.finish()
    assert "changed outside of an optimizer's step" in caplog.text
    assert folders(tmp_path / "ck") == []
    ck.save(2)
    ck.wait()
    ck.close()
    other = Trained(seed=3)
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(other.objects()).step == 2
    assert other.bits() == one.bits()


def test_one_call_saves_and_one_loads(tmp_path):
    one = Trained()
    one.step()
    assert elastane.load_checkpoint(tmp_path / "ck") is None
    state = {"net": one.net, "optimizer": one.optimizer, "epoch": 3, "best": torch.tensor(0.5)}
    elastane.save_checkpoint(tmp_path / "ck", state, step=7)
    loaded = elastane.load_checkpoint(tmp_path / "ck")
    assert (loaded.step, loaded.state["epoch"]) == (7, 3)
    assert torch.equal(loaded.state["best"], torch.tensor(0.5))
    other = Trained(seed=1)
    into = {"net": other.net, "optimizer": other.optimizer, "epoch": 0, "best": None}
    assert elastane.load_checkpoint(tmp_path / "ck", into).state["epoch"] == 3
    other.scheduler, other.generator = one.scheduler, one.generator
    assert other.bits() == one.bits()
    one.step()
    elastane.save_checkpoint(tmp_path / "ck", state, step=8, keep=1)
    assert elastane.load_checkpoint(tmp_path / "ck").step == 8
    wait_for(lambda: len(folders(tmp_path / "ck")) == 1)  # the older one is removed after the call


def test_the_last_save_is_the_newest_even_if_an_older_run_made_more_steps(tmp_path):
    """A new run in the folder of an old one, and one that goes back: their steps are smaller."""
    for step in (1000, 10, 20, 15, 15):
        elastane.save_checkpoint(tmp_path / "ck", {"step": step}, step=step, keep=2)
        loaded = elastane.load_checkpoint(tmp_path / "ck")
        assert (loaded.step, loaded.state) == (step, {"step": step})


def test_other_objects_than_were_saved_are_named(tmp_path):
    one = Trained()
    one.step()
    elastane.save_checkpoint(tmp_path / "ck", {"net": one.net, "ema": one.net}, step=1)
    with pytest.raises(CheckpointError, match="no optimizer and also ema"):
        elastane.load_checkpoint(tmp_path / "ck", {"net": one.net, "optimizer": one.optimizer})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"keep": True}, "keep is True"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_steps": "10"}, "every_steps is '10'"),
        ({"every_steps": 1.5}, "every_steps is 1.5"),
        ({"every_s": -1}, "every_s is -1"),
        ({"every_s": "often"}, "every_s is 'often'"),
    ],
)
def test_invalid_options_are_refused_by_name(tmp_path, options, named):
    with pytest.raises(ConfigurationError, match=named):
        Checkpointer(tmp_path, **options)


def test_a_memory_url_is_refused_as_a_place_for_checkpoints():
    with pytest.raises(ConfigurationError, match="memory of one process"):
        Checkpointer("memory://ck")
    with pytest.raises(ConfigurationError, match="memory of one process"):
        elastane.save_checkpoint("memory://ck", {"x": torch.ones(1)}, step=1)


def test_a_save_before_restore_says_what_comes_first(tmp_path):
    with pytest.raises(CheckpointError, match=r"restore\(\) before the first save"):
        Checkpointer(tmp_path, every_steps=1).maybe_save(1)


def test_an_unusable_place_is_an_error_in_restore(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        Checkpointer(tmp_path / "file" / "ck").restore({"net": torch.nn.Linear(1, 1)})


def test_a_killed_snapshot_server_loses_one_save_and_training_continues(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    one, ck = Trained(), Checkpointer(tmp_path / "ck", every_steps=1)
    ck.restore(one.objects())
    one.step()
    ck.save(1)
    ck.wait()
    killed = snapshot_servers_of(str(tmp_path).encode())
    assert killed
    for pid in killed:
        os.kill(pid, 9)
    one.step()
    ck.save(2)
    ck._finish_copies()  # It may still be dying when the save begins.
    assert "snapshot server" in caplog.text
    one.step()
    ck.save(3)
    ck.wait()
    ck.close()
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(one.objects()).step == 3


def test_a_requested_save_that_was_missed_is_reported_at_the_end(tmp_path, monkeypatch):
    """The last save before a drain is such a save."""
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    one.step()
    ck.save(1)
    ck.wait()
    agree = ck._saver.agree

    def then_the_snapshot_server_dies(*asked):
        heard = agree(*asked)
        for pid in snapshot_servers_of(str(tmp_path).encode()):
            os.kill(pid, 9)
        return heard

    ck._saver.agree = then_the_snapshot_server_dies
    ck.save(2)
    with pytest.raises(CheckpointError, match=r"not saved: .*the snapshot server"):
        ck.wait()
    ck._saver.agree = agree
    ck.save(3)
    ck.wait()
    ck._saver.agree = then_the_snapshot_server_dies
    with pytest.raises(CheckpointError, match="not saved"), ck:
        ck.save(4)


def test_a_requested_save_that_storage_did_not_finish_is_reported(tmp_path, monkeypatch):
    one, ck = Trained(), Checkpointer(tmp_path / "ck")
    ck.restore(one.objects())
    one.step()
    monkeypatch.setattr("elastane.checkpoint.checkpointer.WAIT_S", 0.1)
    monkeypatch.setattr(ck._saver, "_is_busy", lambda: True)
    ck.save(1)
    with pytest.raises(CheckpointError, match="storage was not ready"):
        ck.wait()
    ck.close()


def cycles(tmp_path: Path, count: int) -> None:
    """Save and restore `count` times; compare the resources of process and server at both ends."""
    one = Trained()
    one.step()

    def once(number: int) -> None:
        with Checkpointer(tmp_path / "ck", keep=2) as ck:
            ck.restore(one.objects())
            ck.save(number)

    def held() -> tuple[int, int]:
        own = Path("/proc/self")
        return len(os.listdir(own / "fd")), len(os.listdir(own / "task"))

    for number in range(1, 6):
        once(number)
    wait_for(lambda: not snapshot_servers_of(str(tmp_path).encode()))
    before = held()
    for number in range(6, 6 + count):
        once(number)
    wait_for(lambda: not snapshot_servers_of(str(tmp_path).encode()))
    # What an earlier test of this process held may have gone meanwhile; and a thread that was
    # joined may be there for a moment yet.
    wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert len(folders(tmp_path / "ck")) == 2


def test_cycles_of_saving_and_restoring_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    cycles(tmp_path, 15)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_hundred_cycles_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    cycles(tmp_path, 500)


def snapshot_servers_of(mark: bytes) -> list[int]:
    """Return the snapshot servers that were started with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                env = (entry / "environ").read_bytes()
            except OSError:
                continue
            if words.startswith(b"elastane-snapshots") and mark in env:
                found.append(int(entry.name))
    return found


def test_a_save_is_complete_before_its_worker_parks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs in the background, and the agent kills a parked worker at once."""
    trained, settled = Trained(), []
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(trained.objects())
        trained.step()
        checkpointer.save(1)
        copier = checkpointer._saver.copier
        settle = copier.finish
        monkeypatch.setattr(copier, "finish", lambda: settled.append(settle()))
        finish_before_park()
        assert settled
    settled.clear()
    finish_before_park()
    assert not settled
