"""State that one worker takes over from another is bitwise equal, for every kind of object."""

import random

import numpy as np
import pytest
import torch

from elastane.checkpoint import registered
from elastane.checkpoint.registered import RandomStreams, RegisteredObjects
from elastane.comms.digest import state_digest


class Wide(torch.optim.Optimizer):
    """Keeps moments in float32, whatever its parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros(parameter.shape))
            moment += torch.rand(parameter.shape) / 3
            parameter.sub_(self.param_groups[0]["lr"] * moment.to(parameter.dtype))


def tracked(lr):
    net = torch.nn.Linear(3, 3).to(torch.bfloat16)
    found, optimizer = RegisteredObjects(), Wide(net.parameters())
    optimizer.param_groups[0]["lr"] = lr
    found.add({"net": net, "optimizer": optimizer})
    optimizer.step()
    return found


def test_moments_wider_than_their_parameters_keep_all_their_bits():
    giver, taker = tracked(0.1), tracked(0.2)
    taker.load(giver.state())
    assert state_digest(taker.state()) == state_digest(giver.state())


def test_states_of_every_replica_optimizer_are_taken_over_too():
    giver, taker = tracked(0.1), tracked(0.2)
    taker.load_replicas(giver.replicas())
    assert state_digest(taker.replicas()) == state_digest(giver.replicas())
    assert state_digest(taker.state()) == state_digest(giver.state())


def test_random_streams_are_taken_without_beginning_to_use_a_gpu(monkeypatch):
    def begin():
        raise AssertionError("this would initialize CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", begin)
    streams = RandomStreams()
    drawn = torch.rand(3)
    streams.restore()
    assert torch.equal(torch.rand(3), drawn)


def python_pair():
    """Two numbers; the second is drawn ahead with the first."""
    return random.gauss(0, 1), random.gauss(0, 1)


# What a program may do to a stream; each leaves another state than before.
CHANGES = {
    "python draw": random.random,
    "python number drawn ahead": lambda: random.gauss(0, 1),
    "python both": python_pair,
    "python seed": lambda: random.seed(7),
    "numpy draw": np.random.rand,
    "numpy number drawn ahead": np.random.randn,
    "numpy both": lambda: np.random.randn(2),
    "numpy seed": lambda: np.random.seed(7),
    "nothing": lambda: None,
}


def drawn():
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()


@pytest.mark.parametrize("ahead", [0, 1], ids=["even", "ahead"])
@pytest.mark.parametrize("name", CHANGES)
def test_streams_are_as_they_were_whatever_was_drawn_since_they_were_last_read(name, ahead):
    for _ in range(ahead):  # so that one number is drawn ahead
        random.gauss(0, 1), np.random.randn()
    RandomStreams()
    CHANGES[name]()
    streams = RandomStreams()
    first = drawn()
    streams.restore()
    assert drawn() == first


def test_a_number_drawn_ahead_that_is_set_again_is_read_again():
    np.random.seed(3), random.seed(3)
    np.random.randn(), random.gauss(0, 1)
    ours, pythons = np.random.get_state(), random.getstate()
    np.random.randn(), random.gauss(0, 1)  # the ones drawn ahead: no word is used
    RandomStreams()
    np.random.set_state(ours), random.setstate(pythons)
    streams = RandomStreams()
    first = drawn()
    streams.restore()
    assert drawn() == first


def test_a_state_is_made_again_only_where_the_memory_has_changed():
    made = []
    state = np.random.get_state
    last = registered.LastState()

    def read():
        return last.read(registered._numpy_memory, lambda: made.append(1) or state())

    assert read()[1].tolist() == read()[1].tolist() and len(made) == 1
    np.random.rand()
    read()
    assert len(made) == 2


def test_a_state_that_changed_while_it_was_made_is_made_again():
    memory = iter([1, 2, 1, 1])
    last = registered.LastState()
    assert last.read(lambda: next(memory), lambda: "drawn meanwhile") == "drawn meanwhile"
    assert last.read(lambda: next(memory), lambda: "as it is") == "as it is"


@pytest.fixture
def asked_again():
    known = (registered._python_is_known, registered._numpy_is_known)
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


@pytest.mark.parametrize("fields", [b"the same", b"a pointer %d"])
def test_a_generator_that_keeps_its_words_elsewhere_is_read_in_full(
    asked_again, monkeypatch, fields
):
    """Some version's objects may hold a pointer, or nothing that changes with a draw."""
    monkeypatch.setattr(
        registered, "_fields", lambda thing, kind: fields % id(thing) if b"%" in fields else fields
    )
    assert registered._python_memory() is None
    if b"%" not in fields:
        assert registered._numpy_memory() is None
