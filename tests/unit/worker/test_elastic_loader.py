"""An ElasticLoader in a world of one: position, epochs, and refused uses."""

import pytest
import torch
from torch.utils.data import DataLoader

import elastane
from elastane.data.sources import ShardSource
from elastane.errors import ConfigurationError
from elastane.worker import elastic_loader


def loader_of(n=10, batch=4, **options):
    sampler = elastane.ElasticBatchSampler(n, batch, shuffle=False)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(torch.arange(n).float().unsqueeze(1), batch_sampler=sampler)
    return elastane.ElasticLoader(data, model=model, **options)


def test_each_epoch_has_each_sample_once_and_state_dict_counts_finished_steps():
    loader = loader_of()
    seen, places = {}, []
    for epoch in loader.epochs(2):
        seen[epoch] = []
        for batch in loader:
            before = loader.state_dict()["samples"]
            seen[epoch] += batch.flatten().tolist()
            loader.backward((batch * torch.ones(1, requires_grad=True)).mean())
            after = loader.state_dict()
            places.append((before, after["epoch"], after["samples"]))
    assert seen == {0: [*range(10)], 1: [*range(10)]}
    assert places == [(0, 0, 4), (4, 0, 8), (8, 1, 0), (0, 1, 4), (4, 1, 8), (8, 2, 0)]


def test_a_loaded_position_continues_in_the_middle_of_its_epoch():
    first = loader_of()
    for _ in first.epochs(1, until_step=2):
        for _ in first:
            pass
    again = loader_of()
    again.load_state_dict(first.state_dict())
    rest = [batch.flatten().tolist() for _ in again.epochs(1) for batch in again]
    assert rest == [[8.0, 9.0]]


def test_accumulated_batches_of_a_step_have_weights_that_sum_to_one():
    loader = loader_of(accumulate=3)
    weights, lasts = [], []
    for _ in loader.epochs(1):
        for _ in loader:
            weights.append(loader.weight)
            lasts.append(loader.is_last)
    assert lasts == [False, False, True] * 3
    assert [sum(weights[i : i + 3]) for i in (0, 3, 6)] == [1.0, 1.0, 1.0]


def stream_loader(lengths=(5, 0, 9, 3), batch=4):
    source = ShardSource(range(len(lengths)), lambda k, start, _: range(lengths[k])[start:])
    stream = elastane.ElasticStream(source, batch, shuffle=False, lanes=2, collate_fn=list)
    return elastane.ElasticLoader(stream, model=torch.nn.Linear(1, 1))


def test_a_stream_has_its_epochs_and_no_length():
    loader = stream_loader()
    sizes = {epoch: [loader.samples for _ in loader] for epoch in loader.epochs(2)}
    assert sizes == {0: [4, 4, 4, 4, 1], 1: [4, 4, 4, 4, 1]}
    assert loader.epoch == 2
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


def test_a_position_in_a_stream_is_loaded_and_a_break_skips_the_rest_of_its_epoch():
    first = stream_loader()
    for epoch in first.epochs(3, until_step=4):
        for _ in first:
            first.backward(torch.ones(1, requires_grad=True).sum())
            if epoch == 0 and first.step == 1:
                break
    again = stream_loader()
    again.load_state_dict(first.state_dict())
    places = [(epoch, again.step, again.samples) for epoch in again.epochs(2) for _ in again]
    assert places == [(1, 4, 4), (1, 5, 4), (1, 6, 1)]


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda loader: next(iter(loader)), "outside of epochs()"),
        (lambda loader: loader.weight, "no current batch"),
        (lambda loader: loader.backward(torch.ones(1)), "no current batch"),
    ],
)
def test_use_outside_of_the_loop_is_refused_with_the_way_out(use, words):
    with pytest.raises(ConfigurationError, match=words.replace("(", r"\(").replace(")", r"\)")):
        use(loader_of())


def test_a_break_skips_the_rest_of_the_epoch_and_a_step_that_is_not_complete():
    loader = loader_of(accumulate=2)
    places = []
    for epoch in loader.epochs(3):
        for batch in loader:
            loader.backward((batch * torch.ones(1, requires_grad=True)).mean())
            if loader.is_last or epoch == 1:
                break
        places.append(loader.state_dict()["samples"])
    assert places == [4, 0, 4]
    assert loader.epoch == 3


def test_a_loader_that_was_made_before_its_process_group_is_refused(monkeypatch):
    loader = loader_of()
    monkeypatch.setattr(elastic_loader, "group_of_process", object)
    with pytest.raises(ConfigurationError, match="before init_process_group"):
        next(loader.epochs(1))


def test_a_position_is_loaded_before_the_loop_only():
    loader = loader_of()
    for _ in loader.epochs(1):
        with pytest.raises(ConfigurationError, match="within its loop"):
            loader.load_state_dict(loader.state_dict())


def test_objects_can_be_named_later_but_not_within_the_loop():
    loader = loader_of()
    loader.track(average=torch.nn.Linear(1, 1))
    assert "average" in loader.state()["tracked"]
    for _ in loader.epochs(1):
        with pytest.raises(ConfigurationError, match=r"track\(\) of an ElasticLoader within"):
            loader.track(late=torch.nn.Linear(1, 1))


def test_a_change_of_the_world_is_reported_only_with_a_process_group(tmp_path):
    with pytest.raises(ConfigurationError, match="without a process group") as caught:
        elastane.on_world_change(lambda rank, world_size: None)
    assert caught.value.slug == "world-change"
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        elastane.on_world_change(lambda rank, world_size: pytest.fail("the world never changes"))
    finally:
        torch.distributed.destroy_process_group()


class OneMember:
    """A group whose only member is this process."""

    is_shared, ddps, members = False, (), (1,)

    def share(self, state):
        """Return no joining worker."""

    def pass_boundary(self):
        """Do nothing, since there is no other member."""


def test_an_average_that_is_not_named_is_refused_before_the_next_step(monkeypatch):
    group = OneMember()
    monkeypatch.setattr(elastic_loader, "group_of_process", lambda: group)
    model = torch.nn.Linear(1, 1)

    def train(updated, **named):
        loader = loader_of(**named)
        for _ in loader.epochs(1):
            for _ in loader:
                updated.update_parameters(model)

    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(ConfigurationError, match="an AveragedModel that is updated was not named"):
        train(average)
    train(average, average=average)
    update = torch.optim.swa_utils.AveragedModel.update_parameters
    assert update.__module__ == "torch.optim.swa_utils", "the class is as it was"
