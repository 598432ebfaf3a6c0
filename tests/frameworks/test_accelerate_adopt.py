"""What elastane.accelerate.adopt() makes of an accelerator, in a process without a launcher."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastane
from elastane.data.sources import ShardSource
from elastane.errors import ConfigurationError

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

SAMPLES, BATCH, EPOCHS = 50, 12, 2  # The last step of an epoch has two samples.


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """Accelerate keeps its settings in the process."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for state in (AcceleratorState, GradientState):
        state._reset_state(*([True] if state is AcceleratorState else []))
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def data():
    """Return inputs and targets."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    return inputs, inputs.sum(1, keepdim=True)


def model_and_optimizer():
    """Return them with equal weights at each call."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.05)


def test_a_stream_is_prepared_as_the_loader_and_its_position_is_saved(tmp_path):
    accelerator = elastane.accelerate.adopt(Accelerator(cpu=True))
    model, optimizer = model_and_optimizer()
    samples = [*zip(*data(), strict=True)]
    source = ShardSource([0, 1], lambda shard, at, _: samples[shard::2][at:])
    stream = elastane.ElasticStream(source, BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, stream)
    sizes = []
    for epoch in loader.epochs(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            sizes.append((epoch, len(inputs)))
            if len(sizes) == 7:
                accelerator.save_state(str(tmp_path))
    assert sizes == [(epoch, size) for epoch in range(2) for size in (12, 12, 12, 12, 2)]
    accelerator.load_state(str(tmp_path))
    assert [(epoch, len(x)) for epoch in loader.epochs(EPOCHS) for x, _ in loader] == sizes[7:]


@pytest.mark.parametrize("batches", [1, 3])
def test_an_adopted_loop_takes_the_mean_over_each_steps_samples(batches):
    accelerator = elastane.accelerate.adopt(
        Accelerator(cpu=True, gradient_accumulation_steps=batches)
    )
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sampler = elastane.ElasticBatchSampler(SAMPLES, BATCH, shuffle=False)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(TensorDataset(*data()), batch_sampler=sampler)
    )
    assert len(loader) == 5 * batches
    for _ in loader.epochs(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert scheduler.scheduler.last_epoch == 5 * EPOCHS
    expected = directly_trained()
    assert torch.allclose(model.weight, expected.weight, atol=1e-6)
    assert torch.allclose(model.bias, expected.bias, atol=1e-6)


def directly_trained():
    """Return a model that was trained without Accelerate, each step as one batch."""
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    inputs, targets = data()
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            span = slice(start, start + BATCH)
            optimizer.zero_grad()
            (model(inputs[span]) - targets[span]).square().mean().backward()
            optimizer.step()
            scheduler.step()
    return model


@pytest.mark.parametrize(
    ("loading", "named"),
    [
        ({"split_batches": True}, "split_batches=True"),
        ({"dispatch_batches": True}, "dispatch_batches=True"),
        ({"even_batches": False}, "even_batches=False"),
    ],
)
def test_loading_that_depends_on_the_world_is_refused(loading, named):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loading))
    with pytest.raises(ConfigurationError, match=named):
        elastane.accelerate.adopt(accelerator)


def test_a_gradient_that_is_reduced_in_each_batch_is_refused():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    with pytest.raises(ConfigurationError, match="sync_each_batch=True"):
        elastane.accelerate.adopt(accelerator)


def test_adopt_after_prepare_is_refused():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*model_and_optimizer())
    with pytest.raises(ConfigurationError, match=r"adopt\(\) after prepare\(\)"):
        elastane.accelerate.adopt(accelerator)


def test_an_accelerator_that_reduces_no_gradients_is_refused_in_a_launched_worker(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigurationError, match="trains in each worker by itself"):
        elastane.accelerate.adopt(accelerator)


def test_iterable_data_and_uneven_inputs_are_refused():
    accelerator = elastane.accelerate.adopt(Accelerator(cpu=True))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from range(4)

    with pytest.raises(ConfigurationError, match="iterable dataset Stream"):
        accelerator.prepare(DataLoader(Stream()))
    with pytest.raises(ConfigurationError, match="join_uneven_inputs"):
        accelerator.join_uneven_inputs([])


def test_importing_elastane_and_its_module_does_not_import_accelerate():
    import subprocess
    import sys

    code = "import sys, elastane; elastane.accelerate.adopt; print('accelerate' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_worker_that_joins_continues_with_the_random_streams_of_another():
    accelerator = elastane.accelerate.adopt(Accelerator(cpu=True))
    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH)
    loader = DataLoader(TensorDataset(*data()), batch_sampler=batches)
    streams = accelerator.prepare(loader)._prepared()["streams 0"]
    state = streams.state_dict()
    drawn = [torch.rand(1), random.random()]
    streams.load_state_dict(state)
    assert [torch.rand(1), random.random()] == drawn
