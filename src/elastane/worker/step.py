"""One step of a job: a body whose update either all members make, or that is retried.

Owns the edges of the body. It saves what the body may change, and lets no optimizer step on an
incomplete reduction. When the body ends, normally or by an error, it determines whether the step
was made. `job` owns the consequences.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.elastic import ElasticGroup
from elastane.comms.untraced import untraced
from elastane.data.feed import Portion
from elastane.errors import JobError
from elastane.worker.healing import Health
from elastane.worker.mode import Mode
from elastane.worker.undo import Undo

# The arguments of an optimizer's step, the optimizer first.
_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# torch's optimizers that keep a part of their state, or of the model, on each rank only.
_UNLIKE = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")


class StepOwner(Protocol):
    """What a step needs of its job: `worker.job` implements it."""

    mode: Mode

    def begin_step(self, step: Step) -> None:
        """Begin the body of a step."""

    def end_step(self, step: Step, error: Exception | None) -> bool:
        """End the body of a step; return whether `error` was that of a lost peer."""

    def beat(self) -> None:
        """Report progress within a body."""

    def is_last_of_epoch(self, number: int) -> bool:
        """Whether the step of this number is the last one of its epoch."""


class Step:
    """One step, yielded by `job.steps`; use it as `with step:` around one optimizer update.

    `number` counts from 0 over the whole job. `epoch` is that of its data.
    """

    def __init__(self, job: StepOwner, number: int, portions: list[Portion]) -> None:
        self.number = number
        self.epoch = portions[0].share.epoch if portions else 0
        self.committed = False
        self.begun = False
        self.weight = portions[0].weight if portions else 1.0
        self._portions = portions
        self._job = job

    def commit(self) -> None:
        """Record that all members accepted the step's update."""
        self.committed = True

    @property
    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches; each sets the weight that `backward` uses.

        With `deterministic=True` these are virtual shards, and gradients are reduced after the last
        one.
        """
        for portion in self._job.mode.portions(self._portions):
            self.weight = portion.weight
            yield portion.batch
            self._job.beat()

    @property
    def last_of_epoch(self) -> bool:
        """Whether this is the last step of its epoch; the same on all workers."""
        return self._job.is_last_of_epoch(self.number)

    @property
    def samples(self) -> int:
        """How many samples of the step this rank has."""
        return sum(portion.samples for portion in self._portions)

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        """Run `loss.backward()` with the weight of this rank's share.

        `loss` is the mean over the local batch, a tensor of one element. `more` is passed on to
        `torch.Tensor.backward`. The gradient is then that of the mean over the
        step's samples, in any world and with any distribution of them.
        """
        (loss if self.weight == 1.0 else loss * self.weight).backward(**more)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Step:
        self.begun = True
        self._job.begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False
        return self._job.end_step(self, error if isinstance(error, Exception) else None)


class Updates:
    """Decides before each update of an optimizer whether it may be made.

    No update is made on a reduction that failed or is incomplete. With a closure the reductions run
    inside of the optimizer's step, so the check follows the closure. torch's own optimizers change
    nothing before that, except LBFGS. LBFGS and optimizers of other packages, such as SAM, may:
    their state is copied first, and each return of the closure is checked.

    `settle` waits until registered objects may be changed. Updates are checked from `watch` on.
    """

    def __init__(
        self,
        group: ElasticGroup,
        tracked: RegisteredObjects,
        health: Health,
        undo: Undo,
        mode: Mode,
        settle: Callable[[], None],
    ) -> None:
        self._group = group
        self._tracked = tracked
        self._health = health
        self._undo = undo
        self._mode = mode
        self._settle = settle
        self._handles: list[Any] = []
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # The step whose body runs, or None; outside of bodies, optimizers are the script's own.
        self.step_number: int | None = None

    def watch(self) -> None:
        """Hook into the registered optimizers, and into all steps of others."""
        for optimizer in self._tracked.optimizers:
            self._known.add(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        self._handles.append(register_optimizer_step_pre_hook(self._before_any))

    def begin_step(self, number: int) -> None:
        """Check the updates of this step's body."""
        self.step_number = number

    def end_step(self) -> None:
        """Leave the body: optimizers are the script's own."""
        self.step_number = None

    def close(self) -> None:
        """Remove all hooks from torch. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    @untraced
    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        if self._health.is_healing:
            return None
        self._undo.called(optimizer)
        given = [*args[1:], *kwargs.values()]
        if not any(map(callable, given)):
            self._allow(optimizer)
            self._undo.before_update(optimizer)
            return None
        self._mode.insist_on_all()
        is_first = _runs_closure_first(optimizer)
        if not is_first:
            self._begin_early(optimizer)

        def watched(closure: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = closure(*args, **kwargs)
                if is_first:
                    self._allow(optimizer)
                    self._undo.before_update(optimizer)
                else:
                    self._group.check()
                return result

            return call

        def passed(value: Any) -> Any:
            return watched(value) if callable(value) else value

        own, *rest = args
        return (own, *map(passed, rest)), {name: passed(value) for name, value in kwargs.items()}

    def _allow(self, optimizer: torch.optim.Optimizer) -> None:
        self._settle()
        self._group.check()
        self._mode.insist_on_all()
        self._health.agree(optimizer)
        if self.step_number is not None:
            self._group.pairing.start(self.step_number)

    def _begin_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for an optimizer that changes parameters before its closure has run."""
        if self._health.shards is not None:
            raise JobError(
                f"{type(optimizer).__name__}.step(closure) with a model that is sharded: it may"
                " change parameters before the closure, which cannot be taken back on all workers",
                expected="an optimizer of torch.optim other than LBFGS, or no closure",
                next_step="step.backward(loss), then optimizer.step()",
                slug="job-update",
            )
        self._settle()
        self._group.check()
        self._undo.before_update(optimizer, runs_body=True)

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._health.is_healing:
            self._undo.after_update(optimizer)

    @untraced
    def _before_any(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer that changes registered parameters, and is not registered itself."""
        if self.step_number is None or optimizer in self._known:
            return
        ours = self._tracked.optimizers
        if not any(optimizer is each or optimizer.state is each.state for each in ours):
            tracked = {id(each) for each in self._tracked.parameters()}
            groups = [group["params"] for group in optimizer.param_groups]
            if any(id(each) in tracked for group in groups for each in group):
                raise _untracked(optimizer)
        self._known.add(optimizer)


def refuse_partitioned(tracked: RegisteredObjects) -> None:
    """Refuse optimizers whose state cannot be given to another worker."""
    for optimizer in tracked.optimizers:
        kind = type(optimizer).__name__
        is_hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
        if kind in _UNLIKE or not is_hooked:
            what = "each rank holds what no other does" if is_hooked else "it has no step hooks"
            raise JobError(
                f"track(): a {kind} cannot recover in place: {what}",
                expected="an optimizer whose whole state is on each worker, or fully_shard()",
                next_step="job.track(optimizer=...) with the optimizer inside of it, or"
                " fully_shard(model, mesh=job.device_mesh(shard=S))",
                slug="job-track",
            )


def _runs_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the closure once, before it changes anything."""
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


def _untracked(optimizer: torch.optim.Optimizer) -> JobError:
    kind = type(optimizer).__name__
    return JobError(
        f"an optimizer that is not tracked ({kind}) steps on parameters that are",
        where="in the body of a step",
        expected="every optimizer in job.track(): its state is part of the job's",
        next_step="job.track(inner=optimizer.base_optimizer, optimizer=optimizer), the inner one"
        " first, where one optimizer holds another",
        slug="job-update",
    )
