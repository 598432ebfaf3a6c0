"""Which saves of a script count as checkpoints, and when they are whole."""

import io
import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from elastane.worker.running_saves import of_process
from elastane.worker.script_saves import ScriptSaves, holds_optimizer


@pytest.fixture
def saves(monkeypatch):
    for owner, name in (
        (torch, "save"),
        (torch.serialization, "save"),
        (torch, "load"),
        (torch.serialization, "load"),
        (loader, "_load_state_dict"),
        (saver, "_save_state_dict"),
        (_ThreadBasedAsyncCheckpointExecutor, "execute_save"),
        (_ProcessBasedAsyncCheckpointExecutor, "execute_save"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    saves = ScriptSaves(refusal)
    saves.watch()
    return saves


def refusal(what, expected):
    return ValueError(f"{what}; expected: {expected}")


def state():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    return {"model": net.state_dict(), "optimizers": [optimizer.state_dict()]}


def test_a_save_is_whole_once_a_later_step_was_made_and_is_reported_once(saves, tmp_path):
    saves.whole_at(7)
    torch.save(state(), tmp_path / "last.pt")
    assert saves.whole_at(7) is None
    assert saves.whole_at(8) == str(tmp_path / "last.pt")
    assert saves.whole_at(9) is None
    assert torch.load(tmp_path / "last.pt").keys() == {"model", "optimizers"}


def test_a_load_of_a_whole_checkpoint_before_the_first_step_is_seen(saves, tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt")
    assert not saves.has_loaded
    torch.save(state(), tmp_path / "last.pt")
    assert torch.load(tmp_path / "last.pt").keys() == {"model", "optimizers"}
    assert saves.has_loaded


def test_a_load_of_a_distributed_checkpoint_is_seen(saves, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "dcp")
    assert not saves.has_loaded
    dcp.load(state(), checkpoint_id=tmp_path / "dcp")
    assert saves.has_loaded


def test_a_load_after_the_first_step_does_not_resume(saves, tmp_path):
    torch.save(state(), tmp_path / "last.pt")
    saves.whole_at(1)
    torch.load(tmp_path / "last.pt")
    assert not saves.has_loaded


def test_a_model_alone_a_buffer_and_a_save_of_another_thread_do_not_count(saves, tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "best.pt")
    torch.save(state(), io.BytesIO())
    thread = threading.Thread(target=torch.save, args=(state(), tmp_path / "aside.pt"))
    thread.start(), thread.join()
    assert saves.whole_at(1) is None and (tmp_path / "aside.pt").exists()


def test_a_file_object_counts_once_the_script_has_closed_it(saves, tmp_path):
    with (tmp_path / "closed.pt").open("wb") as file:
        torch.save(state(), file)
    assert saves.whole_at(1) == str(tmp_path / "closed.pt")
    with (tmp_path / "open.pt").open("wb") as file:
        torch.save(state(), file)
        assert saves.whole_at(2) is None


def test_a_save_that_failed_does_not_count(saves, tmp_path):
    with pytest.raises(RuntimeError):
        torch.save(state(), tmp_path / "missing" / "last.pt")
    assert saves.whole_at(1) is None and not saves.is_saving


def test_a_save_still_running_in_a_thread_delays_the_report(saves, tmp_path):
    goes_on, reached = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self):
            reached.set()
            goes_on.wait(30)
            return (int, ())

    thread = threading.Thread(target=torch.save, args=(Slow(), tmp_path / "aside.pt"))
    thread.start()
    assert reached.wait(30)
    torch.save(state(), tmp_path / "last.pt")
    assert saves.is_saving and saves.whole_at(1) is None
    goes_on.set(), thread.join()
    assert saves.whole_at(2) == str(tmp_path / "last.pt")


def test_a_file_that_lightning_writes_by_way_of_memory_counts(saves, tmp_path):
    module = ModuleType("lightning.fabric.utilities.cloud_io")
    code = "def _atomic_save(checkpoint, filepath):\n    torch.save(checkpoint, io.BytesIO())\n"
    vars(module).update(torch=torch, io=io)
    exec(code, vars(module))
    module._atomic_save(state(), tmp_path / "epoch=3.ckpt")
    assert saves.whole_at(1) == str(tmp_path / "epoch=3.ckpt")


def test_a_distributed_checkpoint_counts(saves, tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state(), checkpoint_id=tmp_path / "step-7")
    assert saves.whole_at(1) == str(tmp_path / "step-7")
    saves.watch_distributed()
    assert not hasattr(saver._save_state_dict.__wrapped__, "__wrapped__"), "it is watched once"


def test_an_optimizer_is_found_in_nested_containers_and_a_huge_object_is_given_up():
    optimizer = torch.optim.SGD([torch.zeros(1)], 1e-3)
    assert holds_optimizer({"trainer": ({"optimizers": [optimizer]},)})
    assert not holds_optimizer({"model": {"weight": torch.zeros(2)}, "state": 3})
    assert not holds_optimizer([[0] * 20_000, [optimizer]])


@pytest.fixture
def one_worker(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class SlowWriter(FileSystemWriter):
    """A writer that waits until it may go on."""

    def __init__(self, path):
        super().__init__(path)
        self.goes_on = threading.Event()

    def finish(self, *args, **kwargs):
        assert self.goes_on.wait(30)
        super().finish(*args, **kwargs)


def test_an_asynchronous_save_of_one_rank_counts_once_its_future_is_done(
    saves, one_worker, tmp_path
):
    writer = SlowWriter(tmp_path / "step-7")
    saves.whole_at(7)
    future = saver.async_save(state(), storage_writer=writer, no_dist=True)
    assert saves.is_saving and saves.whole_at(8) is None
    writer.goes_on.set()
    future.result(30)
    assert of_process.finish(30)
    assert saves.whole_at(8) is None, "the next step shows that it is whole"
    assert saves.whole_at(9) == str(tmp_path / "step-7")


def test_an_asynchronous_save_that_failed_does_not_count(saves, one_worker, tmp_path):
    (tmp_path / "file").touch()
    future = saver.async_save(state(), checkpoint_id=tmp_path / "file" / "step-7", no_dist=True)
    assert future.exception(30) is not None
    assert of_process.finish(30)
    assert saves.whole_at(1) is None


def test_an_asynchronous_save_by_all_workers_is_refused_as_it_is_called(
    saves, one_worker, tmp_path
):
    with pytest.raises(ValueError, match=r"async_save\(\); expected: save\(\), or async_save"):
        saver.async_save(state(), checkpoint_id=tmp_path / "step-7")
    with pytest.raises(ValueError, match=r"async_save.* by a process"):
        saver.async_save(
            state(),
            checkpoint_id=tmp_path / "step-7",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            no_dist=True,
        )
    assert not saves.is_saving and not (tmp_path / "step-7").exists()


def test_an_asynchronous_save_without_a_process_group_is_not_refused(saves, tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        saver.async_save(state(), checkpoint_id=tmp_path / "step-7").result(30)
    assert of_process.finish(30)
    assert saves.whole_at(1) == str(tmp_path / "step-7")
