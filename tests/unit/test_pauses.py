"""A worker's count of its pauses on the page, and the agent's reading of them."""

import importlib
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import safetensors
import torch
from torch.distributed import checkpoint

from elastane.agent.pauses import PauseWatch
from elastane.process import pauses, step_meter
from elastane.process.pauses import EVALUATION_STEPS, pausing
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.process.step_meter import StepMark
from elastane.protocol.model import UNUSED, CheckpointUse
from elastane.protocol.pauses import PAUSE_LASTS_S, PAUSE_LOGGED_S, Pause

STEP_NS = 100


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(ns=1_000)
    monkeypatch.setattr(pauses.time, "monotonic_ns", lambda: now.ns)
    return now


@pytest.fixture
def page(clock):
    page = StatusPage.create()
    worker = WorkerPage.open(os.dup(page.fd))
    step_meter.begin(worker)
    pauses.begin(worker)
    yield page
    step_meter._process.forget()
    pauses._process.forget()
    worker.close()
    page.close()


def step(clock, took_ns=STEP_NS):
    clock.ns += took_ns
    step_meter.mark(StepMark.BACKWARD)


def evaluate():
    pauses._process.clock.evaluate()


def test_an_inner_pause_counts_as_its_own_kind(page, clock):
    with pausing(Pause.RESTORING):
        clock.ns += 5
        with pausing(Pause.SAVING):
            clock.ns += 20
        clock.ns += 300
        assert page.pauses_ns(clock.ns) == (20, 0, 305), "one that lasts counts too"
    clock.ns += 4_000
    assert page.pauses_ns(clock.ns) == (20, 0, 305)


def test_an_evaluation_lasts_until_the_next_step_less_a_step(page, clock):
    step(clock), step(clock)
    evaluate()
    clock.ns += 1_000
    with pausing(Pause.SAVING):
        clock.ns += 7_000
    clock.ns += 2_000
    shown_ns = page.pauses_ns(clock.ns)[1]
    step(clock)
    assert page.pauses_ns(clock.ns) == (7_000, 3_000, 0)
    assert 0 < shown_ns <= 3_000, "it is shown before its end, and never too long"


def test_a_part_of_a_model_that_is_not_trained_is_no_evaluation(page, clock):
    step(clock), step(clock)
    for _ in range(10):
        evaluate()
        assert page.pauses_ns(clock.ns + EVALUATION_STEPS * STEP_NS)[1] == 0
        step(clock)
    assert page.pauses_ns(clock.ns) == (0, 0, 0)


def test_without_measured_steps_nothing_is_an_evaluation(page, clock):
    evaluate()
    clock.ns += 1_000
    assert page.pauses_ns(clock.ns) == (0, 0, 0)


def test_saves_of_safetensors_count_once_the_script_imports_it(page, clock, tmp_path, monkeypatch):
    def writes(*_, **__):
        clock.ns += 60

    monkeypatch.setattr(safetensors, "serialize_file", writes)
    monkeypatch.setattr(safetensors, "torch", None, raising=False)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    module = importlib.import_module("safetensors.torch")
    module.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert page.pauses_ns(clock.ns) == (60, 0, 0)


def test_saves_and_loads_of_distributed_checkpoints_count(page, clock, tmp_path, monkeypatch):
    class Writer(checkpoint.FileSystemWriter):
        def write_data(self, *given):
            clock.ns += 70
            return super().write_data(*given)

    class Reader(checkpoint.FileSystemReader):
        def read_data(self, *given):
            clock.ns += 30
            return super().read_data(*given)

    for name in ("state_dict_saver", "state_dict_loader"):
        monkeypatch.setattr(checkpoint, name, None)
        monkeypatch.delitem(sys.modules, f"torch.distributed.checkpoint.{name}")
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    loader = importlib.import_module("torch.distributed.checkpoint.state_dict_loader")
    state = {"weight": torch.ones(2)}
    saver.save(state, storage_writer=Writer(tmp_path), no_dist=True)
    loader.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert page.pauses_ns(clock.ns) == (70, 0, 30)
    step(clock)
    loader.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert page.pauses_ns(clock.ns) == (70, 0, 30), "what is read later is data"


def test_other_threads_and_forks_count_nothing(page, clock):
    def save():
        with pausing(Pause.SAVING):
            clock.ns += 50

    other = threading.Thread(target=save)
    other.start()
    other.join()
    child = os.fork()
    if child == 0:
        save()
        os._exit(0)
    os.waitpid(child, 0)
    assert page.pauses_ns(clock.ns) == (0, 0, 0)


def shown(seconds, *, rank=0, pid=7, is_alive=True):
    page = SimpleNamespace(pauses_ns=lambda _now: tuple(int(s * 1e9) for s in (seconds, 0, 0)))
    process = SimpleNamespace(pid=pid)
    return SimpleNamespace(rank=rank, process=process, page=page, is_alive=is_alive)


def test_short_pauses_are_reported_together_and_long_ones_while_they_last():
    found = []
    watch = PauseWatch(lambda *one: found.append(one))
    for now_s, seconds in enumerate((0.4, 0.4, 0.8, 0.8, 1.2, 1.2)):
        watch.look([shown(9.0, rank=1, pid=9), shown(seconds)], now_s)
    assert found == [(Pause.SAVING, 1.2, 4)], "once they are long enough, and until when"
    watch.look([shown(1.2 + PAUSE_LASTS_S)], 20)
    watch.look([shown(1.2 + PAUSE_LASTS_S + PAUSE_LOGGED_S)], 21)
    assert found[1:] == [(Pause.SAVING, PAUSE_LASTS_S, 20)]
    watch.look([shown(99.0, is_alive=False)], 22)
    assert found[2:] == [(Pause.SAVING, PAUSE_LOGGED_S, 21)], "a pause ends with its worker"


def test_a_survivor_that_becomes_rank_0_reports_from_then_on():
    found = []
    watch = PauseWatch(lambda *one: found.append(one))
    for rank, seconds, now_s in ((1, 7.0, 1), (1, 8.0, 2), (0, 8.0, 3), (0, 9.0, 4), (0, 9.0, 5)):
        watch.look([shown(seconds, rank=rank)], now_s)
    assert found == [(Pause.SAVING, 1.0, 4)]


def test_another_process_of_rank_0_counts_from_its_beginning():
    found = []
    watch = PauseWatch(lambda *one: found.append(one))
    for pid, now_s in ((7, 1), (7, 2), (8, 3), (8, 4)):
        watch.look([shown(2.0, pid=pid)], now_s)
    assert found == [(Pause.SAVING, 2.0, 1), (Pause.SAVING, 2.0, 3)]


def test_what_a_worker_does_with_checkpoints_shows_from_any_thread(page, clock):
    assert page.checkpoint_use == UNUSED
    with pausing(Pause.RESTORING):
        assert page.checkpoint_use == CheckpointUse(read=True, written=False)
    other = threading.Thread(target=pausing(Pause.SAVING).__enter__)
    other.start(), other.join()
    assert page.checkpoint_use == CheckpointUse(read=True, written=True)
    assert page.pauses_ns(clock.ns) == (0, 0, 0)


def test_what_a_worker_that_is_not_watched_does_with_checkpoints_is_unknown():
    page = StatusPage.create()
    assert page.checkpoint_use is None
    page.close()
