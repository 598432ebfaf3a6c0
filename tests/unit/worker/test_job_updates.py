"""No optimizer makes an update from a failed reduction, however its step is called.

In these tests the body decides when a peer is lost; from then on the group's `check` raises.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state_plan import MemberStatus, decide
from elastane.errors import JobError, PeerLostError
from elastane.worker.healing import Health
from elastane.worker.mode import Mode
from elastane.worker.step import Updates, refuse_partitioned
from elastane.worker.undo import Undo

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(32, 1, generator=torch.Generator().manual_seed(2))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: goes uphill, asks for the gradient there, and comes back."""

    def __init__(self, parameters, base, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.first_step()
        self.zero_grad()
        closure()
        self.second_step()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups


class Group(ElasticGroup):
    """A group that loses a peer as soon as `lost` is set."""

    lost = False

    def check(self):
        if self.lost:
            raise PeerLostError("a peer is lost", slug="peer-lost")


class Member:
    """One member with a model, optimizers, and the guard of its steps."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        made = make(self.net)
        self.optimizers = made if isinstance(made, tuple) else (made,)
        self.optimizer = self.optimizers[-1]
        self.group = Group()
        tracked = self.tracked = RegisteredObjects()
        named = {f"o{number}": each for number, each in enumerate(self.optimizers)}
        tracked.add({**named, "net": self.net})
        self.undo = Undo(tracked)
        self.health = Health(self.group, tracked)
        self.updates = Updates(self.group, tracked, self.health, self.undo, Mode(), lambda: None)
        self.updates.watch()
        self.passes = 0
        self.lost_at = None

    def loss(self):
        """Run forward and backward; the peer is lost in the pass with number `lost_at`."""
        self.passes += 1
        if self.passes == self.lost_at:
            self.group.lost = True
        self.optimizer.zero_grad()
        loss = (self.net(X) - Y).square().mean()
        loss.backward()
        return loss

    def state(self):
        found = [*self.net.state_dict().values()]
        for optimizer in self.optimizers:
            kept = optimizer.state_dict()
            flat = torch.utils._pytree.tree_leaves(kept)
            found += [
                each if isinstance(each, torch.Tensor) else torch.tensor(each)
                for each in flat
                if isinstance(each, (torch.Tensor, int, float))
            ]
        return [each.clone() for each in found]

    def begin(self):
        self.undo.begin()
        self.updates.step_number = 0

    def makes(self, body):
        """Make one undisturbed step."""
        self.begin()
        body(self)
        self.group.check()
        assert self.undo.is_whole or not self.undo.stepped
        self.undo.committed()

    def loses(self, body, at):
        """Make a step with a lost peer in pass `at`; return whether all state was restored."""
        self.begin()
        self.passes, self.lost_at = 0, at
        is_cut = False
        try:
            body(self)
        except PeerLostError:
            is_cut = True
        assert self.group.lost
        kept = self.health.keeps(self.undo, is_cut=is_cut)
        assert not kept, "a step whose group had failed would be committed"
        self.group.lost, self.lost_at = False, None
        return self.undo.restore()


def adamw(net, **more):
    return torch.optim.AdamW(net.parameters(), lr=0.1, **more)


def lbfgs(net):
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5)


def sam(net):
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return base, SAM(net.parameters(), base)


def pair(net):
    """Return two optimizers, each for one half of the model."""
    halves = net[0].parameters(), net[2].parameters()
    return tuple(torch.optim.AdamW(half, lr=0.1) for half in halves)


def accelerated(net):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(adamw(net))


def with_closure(member):
    member.optimizer.step(member.loss)


def each_with_closure(member):
    def closure():
        member.net.zero_grad()
        return member.loss()

    for optimizer in member.optimizers:
        optimizer.step(closure)


def by_name(member):
    member.optimizer.step(closure=functools.partial(member.loss))


def twice_outside(member):
    member.loss()
    member.optimizer.step(member.loss)


def scaled(member):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    member.passes += 1
    member.group.lost = member.passes == member.lost_at
    member.optimizer.zero_grad()
    scaler.scale((member.net(X) - Y).square().mean()).backward()
    scaler.step(member.optimizer)


def swallowed(member):
    with contextlib.suppress(PeerLostError):
        member.optimizer.step(member.loss)


def scheduled(member):
    torch.optim.lr_scheduler.StepLR(member.optimizer, 1)  # replaces the optimizer's `step`
    member.optimizer.step(member.loss)


class Mine(torch.optim.AdamW):
    """A user's optimizer that calls torch's."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "body", "at"),
    [
        (adamw, with_closure, 1),
        (adamw, by_name, 1),
        (pair, each_with_closure, 2),
        (functools.partial(adamw, fused=True), with_closure, 1),
        (functools.partial(adamw, foreach=True), with_closure, 1),
        (functools.partial(adamw, fused=True), scaled, 1),
        (adamw, scaled, 1),
        (adamw, swallowed, 1),
        (adamw, scheduled, 1),
        (lbfgs, with_closure, 1),
        (lbfgs, with_closure, 3),
        (sam, twice_outside, 1),
        (sam, twice_outside, 2),
        (lambda net: Mine(net.parameters(), lr=0.1), with_closure, 1),
        (accelerated, with_closure, 1),
    ],
)  # fmt: skip
def test_an_update_whose_reductions_failed_is_not_made_and_the_retry_is_exact(make, body, at):
    disturbed, calm = Member(make), Member(make)
    for member in (disturbed, calm):
        for _ in range(2):
            member.makes(body)
    before = disturbed.state()
    assert disturbed.loses(body, at)
    assert all(map(torch.equal, before, disturbed.state()))
    for member in (disturbed, calm):
        for _ in range(2):
            member.makes(body)
    assert all(map(torch.equal, disturbed.state(), calm.state()))


def every_optimizer():
    found = vars(torch.optim).values()
    made = (torch.optim.Optimizer, torch.optim.LBFGS)
    return [each for each in found if isinstance(each, type) and each not in made]


@pytest.mark.parametrize("kind", every_optimizer())
def test_torchs_own_optimizers_change_nothing_before_their_closure_returns(kind):
    """That is why parameters are not copied before their steps."""
    net = torch.nn.Linear(4, 4, bias=kind.__name__ != "Muon")
    optimizer = kind(net.parameters())
    before = [each.clone() for each in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())

    def closure():
        raise PeerLostError("a peer is lost", slug="peer-lost")

    net.weight.grad = torch.ones_like(net.weight)
    with pytest.raises(PeerLostError):
        optimizer.step(closure)
    assert str(optimizer.state_dict()) == str(state)
    assert all(map(torch.equal, before, net.parameters()))


def by_hand(member):
    member.loss()
    with torch.no_grad():
        for parameter in member.net.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)


def by_hand_and_step(member):
    by_hand(member)
    member.optimizer.step()


@pytest.mark.parametrize("body", [by_hand, by_hand_and_step])
def test_parameters_are_copied_once_a_body_changed_them_without_an_optimizer(body):
    member = Member(adamw)
    assert not member.loses(body, 1), "nothing was known of it: the state is another member's"
    member = Member(adamw)
    member.makes(body)
    before = member.state()
    assert member.loses(body, 1)
    assert all(map(torch.equal, before, member.state()))


def test_parameters_that_a_body_lets_share_memory_are_put_back_without_a_write_to_that():
    member = Member(adamw)
    other = [torch.zeros_like(each) for each in member.net.parameters()]

    def shares(member):
        member.loss()
        for parameter, each in zip(member.net.parameters(), other, strict=True):
            parameter.data = each

    member.makes(shares)
    for parameter in member.net.parameters():
        parameter.data = torch.ones_like(parameter)
    assert member.loses(shares, 1)
    assert all(bool((each == 1).all()) for each in member.net.parameters())
    assert not any(bool(each.any()) for each in other)


def test_settings_of_the_optimizer_and_a_tracked_scaler_are_as_before_the_lost_step():
    member, scaler = Member(adamw), torch.amp.GradScaler("cpu", init_scale=4.0)
    member.tracked.add({"scaler": scaler})

    def body(member):
        for group in member.optimizer.param_groups:
            group["lr"] *= 0.5
        member.passes += 1
        member.group.lost = member.passes == member.lost_at
        member.optimizer.zero_grad()
        scaler.scale((member.net(X) - Y).square().mean()).backward()
        scaler.unscale_(member.optimizer)  # It refuses a second time before `update`.
        scaler.step(member.optimizer)
        scaler.update()

    member.makes(body)
    assert member.loses(body, 1)
    assert [group["lr"] for group in member.optimizer.param_groups] == [0.05]
    member.makes(body)
    assert [group["lr"] for group in member.optimizer.param_groups] == [0.025]


def test_a_second_update_of_one_optimizer_can_be_taken_back_once_it_was_seen():
    def twice(member):
        for _ in range(2):
            member.loss()
            member.optimizer.step()

    member = Member(adamw)
    assert not member.loses(twice, 2)
    member.begin()
    twice(member)
    before = member.state()
    assert member.loses(twice, 2)
    assert all(map(torch.equal, before, member.state()))


def test_a_state_that_cannot_be_restored_is_no_longer_held():
    member = Member(adamw)
    member.health.whole()
    member.begin()
    by_hand(member)
    member.health.put_back(member.undo)
    assert (member.health.holds, member.health.torn) == (False, True)


@pytest.mark.parametrize(("make", "kept"), [(adamw, True), (sam, False)])
def test_a_body_cut_behind_its_update_is_retried_where_the_update_can_be_taken_back(make, kept):
    member = Member(make)
    member.begin()
    twice_outside(member)
    assert member.health.keeps(member.undo, is_cut=True) is kept
    assert member.health.keeps(member.undo, is_cut=False) is True


def test_a_completed_body_wins_over_one_interrupted_after_its_update():
    whole, cut = MemberStatus(5, True), MemberStatus(5, True, cut_short=True)
    assert decide([cut, whole, whole]).right == (1, 2)
    assert decide([cut, cut, MemberStatus(4, True)]).right == (0,)


def test_an_untracked_optimizer_may_not_step_tracked_parameters():
    member = Member(adamw)
    other = torch.optim.SGD(member.net.parameters(), lr=0.1)
    member.begin()
    member.loss()
    with pytest.raises(JobError, match="not tracked") as caught:
        other.step()
    assert caught.value.slug == "job-update"
    own = torch.nn.Linear(1, 1)
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    member.updates.step_number = None
    torch.optim.SGD(member.net.parameters(), lr=0.1).step()  # The script's own, between steps.
    member.updates.step_number = 0
    member.updates.close()
    other.step()


def test_a_partitioned_optimizer_is_refused_as_it_is_tracked():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Named as torch's, which needs a process group to be made."""

    tracked = RegisteredObjects()
    tracked.add({"o": ZeroRedundancyOptimizer(torch.nn.Linear(1, 1).parameters(), lr=0.1)})
    with pytest.raises(JobError, match="ZeroRedundancyOptimizer cannot recover in place"):
        refuse_partitioned(tracked)


def test_an_optimizer_without_step_hooks_is_refused_as_it_is_tracked():
    class Hookless(torch.optim.SGD):
        """Keeps its parts elsewhere than torch's optimizers do."""

        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            del self._optimizer_step_pre_hooks

    tracked = RegisteredObjects()
    tracked.add({"o": Hookless(torch.nn.Linear(1, 1).parameters())})
    with pytest.raises(JobError, match="it has no step hooks") as caught:
        refuse_partitioned(tracked)
    assert caught.value.slug == "job-track"


def test_a_compiled_step_is_guarded_too():
    member = Member(lambda net: torch.optim.SGD(net.parameters(), 0.1))
    step = torch.compile(member.optimizer.step, backend="eager")
    member.loss()
    step()
    before = [each.detach().clone() for each in member.net.parameters()]
    member.loss()
    member.group.lost = True
    with pytest.raises(PeerLostError):
        step()
    assert all(map(torch.equal, before, member.net.parameters()))
