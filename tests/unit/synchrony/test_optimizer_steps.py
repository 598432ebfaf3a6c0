"""A collective is known to be called in the step of an optimizer, except in its closure."""

import pytest
import torch

from elastane.synchrony.optimizer_steps import OptimizerSteps


class Asks(torch.optim.Optimizer):
    """An optimizer that records whose step is running, before and after it steps another."""

    def __init__(self, steps, seen, inner=None):
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
        self._steps, self._seen, self._inner = steps, seen, inner

    def step(self, closure=None):
        """Record; then call the closure and the other optimizer, and record again."""
        self._seen.append(self._steps.running)
        if closure is not None:
            closure()
        if self._inner is not None:
            self._inner.step()
        self._seen.append(self._steps.running)


class Outer(Asks):
    """An optimizer that steps another."""


@pytest.fixture
def steps():
    """Steps that are followed without hooks for all optimizers of the process."""
    made = []
    followed = OptimizerSteps(lambda: made.append(1))
    followed.made = made
    return followed


def follow(optimizer, steps):
    """Let `steps` follow this optimizer alone."""
    optimizer.register_step_pre_hook(steps.begin)
    optimizer.register_step_post_hook(steps.end)
    return optimizer


def test_an_optimizer_is_running_in_its_step_and_in_those_of_optimizers_within_it(steps):
    seen = []
    inner = follow(Asks(steps, seen), steps)
    follow(Outer(steps, seen, inner), steps).step()
    assert seen == ["Outer"] * 4 and steps.running == "" and len(steps.made) == 2


@pytest.mark.parametrize("mode", ["by place", "by name"])
def test_a_closure_is_the_programs_own_code(steps, mode):
    seen = []
    optimizer = follow(Asks(steps, seen), steps)

    def closure():
        seen.append(steps.running)

    optimizer.step(closure) if mode == "by place" else optimizer.step(closure=closure)
    assert seen == ["Asks", "", "Asks"]


def test_a_step_that_has_raised_ends_as_its_optimizer_steps_again(steps):
    seen = []
    optimizer = follow(Asks(steps, seen), steps)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert seen == ["Asks"] * 3 and steps.running == ""


def test_a_compiled_step_calls_the_hooks_and_is_known_as_one(steps):
    class Hidden(torch.distributed.ProcessGroup):
        """A group, whose attributes the tracer of torch.compile refuses to set."""

        made = False

    group, seen = Hidden(0, 1), []
    steps._made = lambda: setattr(group, "made", True)
    optimizer = follow(Asks(steps, seen), steps)
    torch.compile(optimizer.step, backend="eager")()
    assert seen == ["Asks"] * 2 and group.made and steps.running == ""
