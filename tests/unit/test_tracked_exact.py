"""What one worker takes over from another is the same to the last bit, whatever its kind."""

import torch

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


def test_replicas_are_taken_over_too():
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
