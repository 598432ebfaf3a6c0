"""What an ElasticTrainer computes and refuses, in a process without a launcher."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from elastane.errors import ConfigurationError

pytest.importorskip("transformers")
from transformers import TrainerCallback, TrainingArguments

from elastane.data.sources import ShardSource
from elastane.transformers import ElasticTrainer, _Progress

SAMPLES, BATCH, EPOCHS = 50, 12, 2  # The last update of an epoch has two samples.


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As a script that nothing has launched."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Sequences(Dataset):
    """Inputs with three labels each, of which some are not counted."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        values = torch.randn(4, generator=torch.Generator().manual_seed(index))
        labels = values[:3].gt(0).long()
        labels[: index % 3] = -100
        return {"x": values, "labels": labels}


class MeanNet(torch.nn.Module):
    """A model whose loss is the mean over the samples of a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x, labels):
        """Return the loss."""
        return {"loss": self.sums(x, labels).mean()}

    def sums(self, x, labels):
        """Return the summed loss of each sample."""
        predicted = self.linear(x).reshape(-1, 3, 2).transpose(1, 2)
        return torch.nn.functional.cross_entropy(predicted, labels, reduction="none").sum(1)


class CountingNet(MeanNet):
    """A model whose loss is a sum, divided by the number of labels of the whole update."""

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        """Return the loss."""
        count = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.sums(x, labels).sum() / count}


def arguments(folder, **options):
    """Return arguments with a constant learning rate and no clipping."""
    defaults = {
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": EPOCHS,
        "max_grad_norm": 0, "lr_scheduler_type": "constant", "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return TrainingArguments(**{**defaults, **options})


def trainer_of(folder, model, data=None, **options):
    """Return an ElasticTrainer that steps by plain gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return ElasticTrainer(
        model, arguments(folder, **options), train_dataset=data or Sequences(),
        optimizers=(optimizer, None), global_batch_size=BATCH,
    )  # fmt: skip


def directly_trained(model):
    """Return the model, trained without a Trainer, each update as one batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    samples = [Sequences()[n] for n in range(SAMPLES)]
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            batch = samples[start : start + BATCH]
            x, labels = (torch.stack([each[name] for each in batch]) for name in ("x", "labels"))
            optimizer.zero_grad()
            model(x, labels)["loss"].backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("net", [MeanNet, CountingNet])
@pytest.mark.parametrize("batches", [1, 3])
def test_an_elastic_trainer_takes_the_mean_over_each_updates_samples_or_labels(
    tmp_path, net, batches
):
    model = net()
    trainer = trainer_of(tmp_path, model, gradient_accumulation_steps=batches)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 5 * EPOCHS
    expected = directly_trained(net())
    assert torch.allclose(model.linear.weight, expected.linear.weight, atol=1e-6)
    assert torch.allclose(model.linear.bias, expected.linear.bias, atol=1e-6)


def test_the_run_time_of_a_trainer_counts_from_the_first_workers_begin_on_one_that_joined(tmp_path):
    trainer = trainer_of(tmp_path, MeanNet())

    class Joining(TrainerCallback):
        """In the first step, takes the state of a worker that began 1,000 s earlier."""

        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 0:
                progress = _Progress(trainer).state_dict()
                progress["numbers"]["_began_s"] -= 1000.0
                _Progress(trainer).load_state_dict(progress)

    trainer.add_callback(Joining())
    metrics = trainer.train().metrics
    assert metrics["train_runtime"] >= 1000.0 and metrics["train_steps_per_second"] < 1.0


def test_a_resumed_trainer_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path):
    model = MeanNet()
    trainer_of(tmp_path, model, max_steps=7, save_strategy="steps", save_steps=7).train()
    resumed = MeanNet()
    trainer = trainer_of(tmp_path, resumed)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5 * EPOCHS
    expected = directly_trained(MeanNet())
    assert torch.allclose(resumed.linear.weight, expected.linear.weight, atol=1e-6)


def test_a_checkpoint_of_another_global_batch_or_without_a_position_is_refused(tmp_path):
    trainer_of(tmp_path, MeanNet(), max_steps=7, save_strategy="steps", save_steps=7).train()
    trainer = trainer_of(tmp_path, MeanNet())
    trainer._global_batch_size = BATCH + 1
    with pytest.raises(ConfigurationError, match="global_batch_size is 12 in the state"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-7" / "elastane_data.json").unlink()
    with pytest.raises(ConfigurationError, match=r"without elastane_data\.json"):
        trainer_of(tmp_path, MeanNet()).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "persistent"),
    ],
)
def test_settings_that_depend_on_the_world_are_refused(tmp_path, options, named):
    with pytest.raises(ConfigurationError, match=named):
        trainer_of(tmp_path, MeanNet(), **options)


def test_a_loss_that_is_divided_by_the_labels_of_one_worker_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, CountingNet(), average_tokens_across_devices=False)
    with pytest.raises(ConfigurationError, match="items of one worker alone"):
        trainer.train()


def test_training_data_without_known_shards_are_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    with pytest.raises(
        ConfigurationError, match="training data of the kind Stream, which has no known sh"
    ):
        trainer_of(tmp_path, MeanNet(), Stream(), max_steps=3).train()


def one_shard():
    """Return the samples as a stream of one shard, so that they come in their order."""
    return ShardSource([0], lambda _, at, epoch: (Sequences()[n] for n in range(at, SAMPLES)))


@pytest.mark.parametrize(("net", "batches"), [(MeanNet, 1), (CountingNet, 3)])
def test_epochs_of_a_stream_train_as_those_of_a_dataset(tmp_path, net, batches):
    model, begun = net(), []

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    steps = 5 * EPOCHS
    trainer = trainer_of(
        tmp_path, model, one_shard(), max_steps=steps, gradient_accumulation_steps=batches
    )
    trainer.add_callback(Epochs)
    trainer.train()
    assert begun == [0, 5], "an epoch ends with its data"
    assert torch.allclose(model.linear.weight, directly_trained(net()).linear.weight, atol=1e-6)


def test_a_trainer_over_a_stream_is_resumed_within_a_later_epoch(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 7}
    trainer_of(tmp_path, MeanNet(), one_shard(), max_steps=7, **options).train()
    resumed = MeanNet()
    trainer = trainer_of(tmp_path, resumed, one_shard(), max_steps=5 * EPOCHS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5 * EPOCHS
    expected = directly_trained(MeanNet())
    assert torch.allclose(resumed.linear.weight, expected.linear.weight, atol=1e-6)


@pytest.mark.parametrize("option", ["dataloader_drop_last", "dataloader_num_workers"])
def test_what_a_stream_does_not_have_is_refused(tmp_path, option):
    with pytest.raises(ConfigurationError, match=f"{option} with training data without a length"):
        trainer_of(tmp_path, MeanNet(), one_shard(), max_steps=3, **{option: 1}).train()


def test_an_iterable_dataset_of_hugging_face_is_trained_on_shard_by_shard(tmp_path):
    datasets = pytest.importorskip("datasets")
    seen = []

    def rows(shards):
        for shard in shards:
            for n in range(shard * 10, shard * 10 + 10):
                yield {**{k: v.tolist() for k, v in Sequences()[n].items()}, "unused": n}

    class Noting(MeanNet):
        def forward(self, x, labels):
            seen.append(len(x))
            return super().forward(x, labels)

    dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [*range(5)]})
    trainer = trainer_of(tmp_path, Noting(), dataset.shuffle(seed=1), max_steps=10)
    trainer.train()
    assert seen == [12, 12, 12, 12, 2] * 2


def test_a_loss_of_a_worker_before_the_backward_pass_does_not_change_the_scale(tmp_path):
    from accelerate.state import AcceleratorState

    shared, scales = AcceleratorState._shared_state, []

    class Losing(ElasticTrainer):
        """Multiplies its loss by the size of the world, then loses a worker."""

        def get_batch_samples(self, *args):
            drawn = super().get_batch_samples(*args)
            self._counted_size = shared["num_processes"] = 3
            return drawn

        def compute_loss(self, *args, **kwargs):
            scales.append(self.accelerator.num_processes)
            shared["num_processes"] = 2
            loss = super().compute_loss(*args, **kwargs)
            scales.append(self.accelerator.num_processes)
            return loss

        def training_step(self, *args, **kwargs):
            try:
                return super().training_step(*args, **kwargs)
            finally:
                scales.append(self.accelerator.num_processes)
                shared["num_processes"] = 1

    trainer = Losing(
        CountingNet(), arguments(tmp_path, max_steps=1), train_dataset=Sequences(),
        global_batch_size=BATCH,
    )  # fmt: skip
    factors = []
    backward = trainer.accelerator.backward

    def noted(loss, **kwargs):
        factors.append(trainer._factor())
        backward(loss, **kwargs)

    trainer.accelerator.backward = noted
    trainer.train()
    assert scales == [3, 3, 2]
    assert factors == [1.0]


def test_a_callback_with_a_copy_of_the_weights_is_refused(tmp_path):
    class Average(TrainerCallback):
        """Holds the weights of the beginning."""

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.weights = [each.detach().clone() for each in model.parameters()]

    trainer = trainer_of(tmp_path, MeanNet())
    trainer.add_callback(Average())
    with pytest.raises(ConfigurationError, match=r"Average\.weights.* copy of the model's weights"):
        trainer.train()
