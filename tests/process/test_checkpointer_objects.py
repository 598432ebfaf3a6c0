"""The objects that a script may register with a Checkpointer, and the errors for others."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import elastane
from elastane.checkpoint.checkpointer import Checkpointer
from elastane.errors import CheckpointError, ConfigurationError

OPTIMIZERS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor),
    *(torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.LBFGS),
    *(torch.optim.Muon, torch.optim.SparseAdam),
]
SCHEDULES = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 4, 4]),
    "constant": lambda o: schedulers.ConstantLR(o, total_iters=3),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=7),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 7),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 7),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "averaged": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    "in turn": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [1])], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o)]),
}


class Runs:
    """One small training for each optimizer, and one for each schedule."""

    def __init__(self) -> None:
        self.nets = [torch.nn.Linear(3, 3, bias=False) for _ in [*OPTIMIZERS, *SCHEDULES]]
        for net in self.nets:
            torch.nn.init.constant_(net.weight, 0.25)
        weights = [[*net.parameters()] for net in self.nets]
        self.optimizers = [kind(own) for kind, own in zip(OPTIMIZERS, weights, strict=False)]
        rest = weights[len(OPTIMIZERS) :]
        plain = [torch.optim.SGD(own, lr=0.1, momentum=0.9) for own in rest]
        pairs = zip(SCHEDULES.values(), plain, strict=True)
        self.schedules = [make(optimizer) for make, optimizer in pairs]
        self.optimizers += plain

    def objects(self) -> dict:
        lists = {"net": self.nets, "optimizer": self.optimizers, "schedule": self.schedules}
        return {f"{name} {n}": one for name, held in lists.items() for n, one in enumerate(held)}

    def step(self) -> None:
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            optimizer.step(lambda net=net, optimizer=optimizer: loss(net, optimizer))
        for schedule in self.schedules:
            is_told = isinstance(schedule, schedulers.ReduceLROnPlateau)
            schedule.step(*([1.0] if is_told else []))

    def numbers(self) -> list[list]:
        lr = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        return [*lr, *(net.weight.tolist() for net in self.nets)]


def loss(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    error = (net(torch.arange(6.0).view(2, 3)) - 1).square().mean()
    error.backward()
    if isinstance(optimizer, torch.optim.SparseAdam):
        net.weight.grad = net.weight.grad.to_sparse()
    return float(error)


def test_every_optimizer_and_schedule_of_torch_continues_exactly(tmp_path):
    one, other = Runs(), Runs()
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore(one.objects())
        for step in range(1, 4):
            one.step()
            checkpointer.save(step)
    with Checkpointer(tmp_path / "ck") as checkpointer:
        assert checkpointer.restore(other.objects()).step == 3
    begun = copy.deepcopy(other.numbers())
    for _ in range(4):
        one.step()
        other.step()
        assert other.numbers() == one.numbers()
    assert other.numbers() != begun


class Kept:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def test_mappings_with_keys_of_every_kind_come_back(tmp_path):
    value = {1: 2, (1, 2): 3, 1.5: [{0: "a"}, torch.ones(1)], None: {True: b"4"}}
    for number, step in ((7, 1), (8, 2)):
        value[1] = number
        with Checkpointer(tmp_path / "ck") as checkpointer:
            kept = Kept(copy.deepcopy(value) if step == 1 else None)
            checkpointer.restore({"kept": kept})
            kept.value[1] = number
            checkpointer.save(step)
    kept = Kept(None)
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore({"kept": kept})
    assert kept.value == value
    assert [*map(type, kept.value)] == [*map(type, value)]


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    one, other = Runs(), Runs()
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore(one.objects())
        one.step()
        checkpointer.save(1)
    for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(where, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore(other.objects())
    assert other.numbers() == one.numbers()
    assert elastane.load_checkpoint(tmp_path / "ck").step == 1


def wrappings() -> dict:
    compiled = torch.compile(torch.nn.Linear(3, 2))
    parallel = torch.nn.DataParallel(torch.compile(torch.nn.Linear(3, 2)))
    return {"bare": torch.nn.Linear(3, 2), "compiled": compiled, "parallel": parallel}


@pytest.mark.parametrize("saved", ["bare", "compiled", "parallel"])
def test_a_module_has_the_same_names_whatever_is_wrapped_around_it(tmp_path, saved):
    net, others = wrappings()[saved], wrappings()
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore({"net": net})
        checkpointer.save(1)
    elastane.save_checkpoint(tmp_path / "one", {"net": net}, step=1)
    assert [*elastane.load_checkpoint(tmp_path / "ck").state["net"]] == ["weight", "bias"]
    for other in others.values():
        with Checkpointer(tmp_path / "ck") as checkpointer:
            checkpointer.restore({"net": other})
        assert all(map(torch.equal, net.parameters(), other.parameters()))
    for other in wrappings().values():
        elastane.load_checkpoint(tmp_path / "one", {"net": other})
        assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_a_generator_is_saved_and_loaded_by_one_call_as_well(tmp_path):
    generator = torch.Generator().manual_seed(3)
    elastane.save_checkpoint(tmp_path / "ck", {"generator": generator}, step=1)
    wanted = torch.rand(4, generator=generator)
    other = torch.Generator()
    elastane.load_checkpoint(tmp_path / "ck", {"generator": other})
    assert torch.equal(torch.rand(4, generator=other), wanted)


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (None, "a NoneType does not name"),
        (torch.nn.Linear(1, 1), "a Linear does not name"),
        ([torch.nn.Linear(1, 1)], "a list does not name"),
        ({3: torch.nn.Linear(1, 1)}, "3 is no name"),
        ({"net": None}, "'net' is a NoneType, without state_dict"),
        (
            {"elastane.checkpointer": torch.nn.Linear(1, 1)},
            "the name of the Checkpointer's own state",
        ),
        ({"net": torch.nn.Linear(1, 1, device="meta")}, "meta device"),
        ({"kept": Kept({1, 2})}, "a builtins.set"),
    ],
    ids=["none", "module", "list", "number", "stateless", "ours", "meta", "set"],
)
def test_an_unsavable_state_is_refused_before_the_first_step(tmp_path, objects, said):
    with pytest.raises((CheckpointError, ConfigurationError), match=said):
        Checkpointer(tmp_path / "ck").restore(objects)


def test_ranks_without_a_process_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="WORLD_SIZE is 2, and there is no process group"):
        Checkpointer(tmp_path / "ck").restore({"net": torch.nn.Linear(1, 1)})


def test_a_state_that_does_not_fit_names_its_object(tmp_path):
    saved = {"net": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2)}
    elastane.save_checkpoint(tmp_path / "ck", saved, step=1)
    wide = {"net": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 9)}
    with pytest.raises(RuntimeError, match="size mismatch for weight") as caught:
        elastane.load_checkpoint(tmp_path / "ck", wide)
    assert "'head' does not take the state" in caught.value.__notes__[0]


def test_a_buffer_that_is_one_number_many_times_is_left_to_torch(tmp_path):
    net = torch.nn.Linear(1, 1)
    net.register_buffer("many", torch.ones(1).expand(5))
    kept = Kept(torch.zeros(1).expand(5))
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore({"kept": kept})
        kept.value = torch.arange(5.0)
        checkpointer.save(1)
    kept = Kept(torch.zeros(1).expand(5))
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore({"kept": kept})
    assert kept.value.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    elastane.save_checkpoint(tmp_path / "net", {"net": net}, step=1)
    with pytest.raises(RuntimeError, match='named "many"'):
        elastane.load_checkpoint(tmp_path / "net", {"net": net})


def test_steps_may_be_any_whole_number_and_other_values_are_refused(tmp_path):
    with Checkpointer(tmp_path / "ck", every_steps=1) as checkpointer:
        checkpointer.restore({"net": torch.nn.Linear(1, 1)})
        assert not checkpointer.maybe_save(0), "nothing has been done"
        checkpointer.save(np.int64(1))
        checkpointer.save(torch.tensor(2))
        for wrong in (0, -1, "3", 2.0, None, torch.tensor(2.5)):
            with pytest.raises(CheckpointError, match="has not happened"):
                checkpointer.save(wrong)
        checkpointer.save(3)
    assert elastane.load_checkpoint(tmp_path / "ck").step == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": -1}, "step -1 has not"),
        ({"step": "3"}, "step '3' has not"),
        ({"step": 2.0}, "step 2.0 has not"),
        ({"step": 1, "keep": 0}, "keep is 0"),
    ],
)
def test_one_call_refuses_what_a_checkpointer_refuses(tmp_path, options, said):
    with pytest.raises((CheckpointError, ConfigurationError), match=said):
        elastane.save_checkpoint(tmp_path / "ck", {"x": 1}, **options)
    elastane.save_checkpoint(tmp_path / "ck", {"x": 1}, step=np.int64(4))
    assert elastane.load_checkpoint(tmp_path / "ck").step == 4


@pytest.mark.parametrize("where", ["", None, 5, b"folder"])
def test_a_place_without_a_name_is_refused(where):
    for refused in (Checkpointer, elastane.load_checkpoint):
        with pytest.raises(ConfigurationError, match="where is"):
            refused(where)


def test_a_place_with_a_tilde_is_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpointer("~/ck").where == str(tmp_path / "ck")
