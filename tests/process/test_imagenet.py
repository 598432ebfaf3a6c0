"""The ImageNet example: all three scripts under faults, to the end, and their sample ledgers.

Weights are compared, to the last bit, with those of a run that nothing happened to, of the same
script in a world of the same size. BatchNorm's buffers are each rank's own, and are not: after a
restart they are those of another rank than before, where ranks have changed nodes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from imagenet_jobs import (
    CHECKPOINTS,
    CLASSES,
    EXAMPLE,
    IN_PLACE,
    OF_EACH_CLASS,
    PER_EPOCH,
    PLAIN,
    SIZE,
    WIDTH,
    Nodes,
    Torchrun,
    every_sample_once,
)

sys.path.insert(0, str(EXAMPLE))
EARLY, MIDDLE, LATE = PER_EPOCH + 3, 2 * PER_EPOCH + 3, 3 * PER_EPOCH + 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from make_images import make

    folder = tmp_path_factory.mktemp("images")
    make(folder, CLASSES, {"train": OF_EACH_CLASS, "val": 5}, SIZE + 8)
    return folder


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Undisturbed trainings of the first two scripts, under torchrun."""
    found = {}

    def training(script):
        if script not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            if script == IN_PLACE:
                found[script] = job = Nodes(script, data, folder, shared=True)
                with job.cluster:
                    job.start("a", "b")
                    job.cluster.wait_done()
            else:
                found[script] = Torchrun(script, data, folder)
                with found[script].run():
                    pass
        return found[script]

    return training


def test_the_networks_have_the_published_numbers_of_parameters():
    import torch
    from common import resnet

    known = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}
    with torch.device("meta"):
        for arch, parameters in known.items():
            net = resnet(arch, 1000)
            assert sum(each.numel() for each in net.parameters()) == parameters
            assert net(torch.empty(1, 3, 224, 224)).shape == (1, 1000)


def test_the_images_are_equal_for_the_same_seed(tmp_path):
    from make_images import make

    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        make(tmp_path / name, 2, {"train": 2}, 16, seed)
    one, again, other = (
        [path.read_bytes() for path in sorted((tmp_path / name).rglob("*.jpeg"))]
        for name in ("one", "again", "other")
    )
    assert one == again != other
    assert len({*one}) == 4


SOAK = pytest.mark.soak


@SOAK
@pytest.mark.parametrize("script", [PLAIN, CHECKPOINTS])
def test_under_torchrun_a_killed_worker_leaves_no_trace(script, data, undisturbed, tmp_path):
    job = Torchrun(script, data, tmp_path)
    job.to(EARLY)
    with job.run():
        job.wait(lambda: job.are_at(EARLY), "both workers are there")
        os.kill(job.lines("did")[-1]["pid"], signal.SIGKILL)
        job.to_the_end()
    begun = {line["step"] for line in job.lines("begins")[2:]}
    assert len(begun) == 1
    if script == PLAIN:
        assert begun == {PER_EPOCH}
    else:  # Saves are left out while storage has not taken the one before.
        assert 0 < min(begun) < EARLY
    every_sample_once(job.committed())
    assert job.end()["weights"] == undisturbed(script).end()["weights"]


@SOAK
def test_the_plain_script_trains_on_every_sample_once(undisturbed):
    every_sample_once(undisturbed(PLAIN).committed())
    assert undisturbed(PLAIN).end()


@SOAK
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("script", [PLAIN, CHECKPOINTS])
def test_a_lost_worker_and_a_lost_node_leave_no_trace(script, shared, data, undisturbed, tmp_path):
    job = Nodes(script, data, tmp_path, shared=shared)
    job.to(EARLY)
    with job.cluster:
        b = job.start("a", "b")[1]
        job.go(EARLY)
        b.kill_worker()
        job.go(MIDDLE)
        b.kill()
        job.start("c")  # which holds nothing
        job.go(LATE)
        job.finish()
    begun = [line["step"] for line in job.lines("begins")]
    assert len(begun) >= 6 and begun[:2] == [0, 0] and all(begun[2:])
    every_sample_once(job.committed())
    assert job.end()["weights"] == undisturbed(script).end()["weights"]
    assert shared or [*(tmp_path / "c" / "checkpoints").iterdir()]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=SOAK)])
def test_in_place_a_lost_worker_a_lost_node_and_the_loss_of_all_leave_no_trace(
    shared, data, undisturbed, tmp_path
):
    job = Nodes(IN_PLACE, data, tmp_path, shared=shared)
    job.to(EARLY)
    with job.cluster:
        a, b = job.start("a", "b")
        job.go(EARLY)
        job.cluster.wait(a.workers, "its agent names its worker")
        survivor = a.workers()
        b.kill_worker()
        job.go(MIDDLE)
        b.kill()
        (c,) = job.start("c")  # which holds nothing
        job.go(LATE)
        job.cluster.wait(a.workers, "its agent names the workers of this world")
        assert a.workers() == survivor
        if not shared:
            job.cluster.wait(
                lambda: any(event.node == "c" for event in job.cluster.events("checkpoint-saved")),
                "the arrival has a checkpoint of its own",
            )
        a.kill()
        c.kill()
        before = job.committed_in_place()
        job.ledger.rename(tmp_path / "before")
        job.start("c", "d")
        job.finish()
    begun = {line["step"] for line in job.lines("begins")}
    assert len(begun) == 1 and 0 < min(begun) < LATE
    committed = {step: lines for step, lines in before.items() if step <= min(begun)}
    every_sample_once(committed | job.committed_in_place())
    assert job.end()["weights"] == undisturbed(IN_PLACE).end()["weights"]


@SOAK
@pytest.mark.parametrize("script", [CHECKPOINTS, IN_PLACE])
def test_a_node_that_comes_without_a_checkpoint_gets_state_and_a_share(script, data, tmp_path):
    """In a world of another size BatchNorm sees other batches: weights differ, the ledger not."""
    job = Nodes(script, data, tmp_path, nnodes="1:2")
    job.to(EARLY)
    with job.cluster:
        job.start("a")
        job.go(EARLY, world_size=1)
        job.start("b")
        job.cluster.wait_event("drain-started")
        job.go(LATE)
        job.finish()
    done = job.committed_in_place() if script == IN_PLACE else job.committed()
    every_sample_once(done)
    assert {len(lines) for lines in done.values()} == {1, 2}
    assert len(job.lines("ends")) == 2 and job.end()


def test_the_best_weights_are_kept_and_load_as_they_were_tested(data, undisturbed):
    import torch
    from common import Images, accuracy, resnet

    import elastane

    job = undisturbed(IN_PLACE)
    best = max(job.lines("tested"), key=lambda line: (line["accuracy"], -line["epoch"]))
    net = resnet("resnet18", CLASSES, WIDTH, SIZE)
    loaded = elastane.load_checkpoint(Path(f"{job.checkpoint}-best"), into={"net": net})
    assert loaded.step == (best["epoch"] + 1) * PER_EPOCH
    images = Images(data / "val", SIZE)
    again = accuracy(net, images, torch.device("cpu"))
    assert again == best["accuracy"] == loaded.state["accuracy"]
