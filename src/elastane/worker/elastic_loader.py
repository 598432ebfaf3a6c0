"""For a framework or DDP loop of the user's own: exact data, joining workers, changes of the world.

`ElasticLoader` takes a DataLoader over an ElasticBatchSampler or ElasticShards, or an
ElasticStream. It divides each step among the members of the world in which the step begins. If a
worker is lost before its contribution to the gradient, later steps of the epoch take its samples
(`data.ledger`). Between two steps the program passes a boundary (`synchrony.rules`), where new
workers receive the state of the named objects. Under another launcher the world does not change.
Fails with ConfigurationError where newcomers would train with another state than the others.

A step of a stream begins with sums over the members, one for each round of reading. If a member is
missing after one of them, the step is read again: docs/decisions/streams-of-unknown-length.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms import ddp
from elastane.comms.elastic import ElasticGroup
from elastane.comms.untraced import untraced
from elastane.data.checks import whole
from elastane.data.feed import Feed, Portion
from elastane.data.stream import ElasticStream, ReadingCutError, StreamFeed
from elastane.errors import ConfigurationError
from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup

SLUG = "elastic-loader"


def on_world_change(call: Callable[[int, int], None]) -> None:
    """Call `call(rank, world_size)` at each change of the rank or world size that a program sees.

    For a framework that keeps either of them. Call it on all workers, after
    `torch.distributed.init_process_group()`. The change happens inside of a collective, at the same
    place of the program on all workers, and `call` may run in another thread there: it stores the
    numbers, and calls nothing of torch.distributed. Without `elastane run --in-place` the world
    never changes. Raises ConfigurationError without a process group, and in a job of
    `elastane.init()`, where `job.rank` and `job.world_size` are current.
    """
    group = c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(group, OrderedGroup):
        group.on_change(call)
    elif group is None:
        raise ConfigurationError(
            "on_world_change() without a process group",
            slug="world-change",
            expected="a call after torch.distributed.init_process_group()",
            next_step="call init_process_group() first, on all workers",
        )
    elif isinstance(group, ElasticGroup):
        raise ConfigurationError(
            "on_world_change() in a job of elastane.init()",
            slug="world-change",
            expected="job.rank and job.world_size, which are those of the current step",
            next_step="read both in each step",
        )


class ElasticLoader:
    """Iterates over epochs and batches; survivors and newcomers continue with the same step.

        loader = elastane.ElasticLoader(loader, model=model, optimizer=optimizer)
        for epoch in loader.epochs(10):
            for inputs, labels in loader:
                optimizer.zero_grad()
                loader.backward(criterion(model(inputs), labels))
                optimizer.step()

    `loader`: a DataLoader over an ElasticBatchSampler, whose batch size is that of all workers
    together, or over ElasticShards; or an ElasticStream. `accumulate`: the number of batches of
    each step. `tracked`: the objects by name that a newcomer needs to continue like the others:
    models, optimizers, schedulers, scalers, averages; anything with `state_dict` and
    `load_state_dict`.

    Make the loader after these objects, on all workers, and one in each process. Evaluation,
    saving and logging belong after the inner loop, or into it. Not thread-safe.
    """

    def __init__(self, loader: Any, *, accumulate: int = 1, **tracked: Any) -> None:
        is_stream = isinstance(loader, ElasticStream)
        self._feed = StreamFeed(loader, self._add_up) if is_stream else Feed(loader)
        self._cursor = self._feed.cursor
        self._cursor.accumulate(whole("accumulate", accumulate, 1))
        self._tracked = RegisteredObjects()
        self._tracked.add(tracked)
        self._group = group_of_process()
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        self._averaged: dict[int, AveragedModel] = {}
        # The epoch that the inner loop is in; None outside of one.
        self._epoch: int | None = None
        self._until_step: int | None = None
        # Whether the boundary before the next step was passed.
        self._is_passed = False
        self._portion: Portion | None = None
        # The members among which the current step was divided, and those whose samples are in its
        # gradient: None until that is known.
        self._dealt_to: tuple[Identity, ...] = ()
        self._contributors: tuple[Identity, ...] | None = None
        self._is_committed = self._is_stale = False
        if self._group is not None:
            if self._group.is_shared:
                raise ConfigurationError(
                    "a second ElasticLoader in one process",
                    slug=SLUG,
                    expected="one, for the data that is trained on",
                    next_step="use a plain DataLoader for evaluation",
                )
            self._group.share(self)

    def track(self, **objects: Any) -> None:
        """Register more objects of the training state by name, on all workers.

        A joining worker receives their state. Raises ConfigurationError within the loop.
        """
        if self._epoch is not None:
            raise ConfigurationError(
                "track() of an ElasticLoader within its loop",
                slug=SLUG,
                expected="all objects by name before epochs(), on all workers",
                next_step="make them before the loop",
            )
        self._tracked.add(objects)

    def epochs(self, until: int, *, until_step: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch, from the position to `until`, which is not included.

        A newcomer waits here for its place, and begins with the epoch and step of the others. A
        `break` out of the inner loop skips the rest of the epoch; all workers make it at the same
        step. `until_step`: the number of steps after which it ends, from the start of epoch 0.
        Raises ConfigurationError if the process group is newer than this loader.
        """
        whole("until", until)
        if self._group is not group_of_process():
            raise ConfigurationError(
                "an ElasticLoader was made before init_process_group()",
                slug=SLUG,
                expected="a loader of the process group that the loop runs in",
                next_step="call torch.distributed.init_process_group() first",
            )
        self._until_step = None if until_step is None else whole("until_step", until_step)
        hook = register_optimizer_step_pre_hook(self._note_step)
        update = AveragedModel.update_parameters
        averaged = self._averaged

        def update_parameters(average: AveragedModel, model: torch.nn.Module) -> None:
            averaged[id(average)] = average
            update(average, model)

        patched: Any = AveragedModel
        patched.update_parameters = update_parameters
        try:
            yield from self._epochs(until)
        finally:
            patched.update_parameters = update
            hook.remove()
        self._feed.close()

    def _epochs(self, until: int) -> Iterator[int]:
        while True:
            self._pass_boundary()
            if self._cursor.epoch >= until or self._is_at_end():
                return
            self._epoch = self._cursor.epoch
            self._feed.rewind(*_world())
            try:
                yield self._epoch
                self._finish_step()
                if self._cursor.epoch == self._epoch and not self._is_at_end():
                    self._cursor.set_epoch(self._epoch + 1)
            finally:
                self._epoch = self._portion = self._contributors = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the rest of the current epoch."""
        if self._epoch is None:
            raise ConfigurationError(
                "an ElasticLoader is iterated over outside of epochs()",
                slug=SLUG,
                expected="for epoch in loader.epochs(10): for batch in loader: ...",
                next_step="let loader.epochs() count the epochs: a worker that joins later begins"
                " with the epoch of the others",
            )
        while (batch := self._next()) is not _NONE:
            yield batch

    @property
    def weight(self) -> float:
        """The factor of the current batch's mean loss, for the mean over the step's samples.

        Shares of a step differ in size, and an empty one is computed with weight 0.
        """
        return self._current.weight

    @property
    def samples(self) -> int:
        """The number of the step's samples in the current batch; 0: it is a stand-in."""
        return self._current.samples

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after the current batch: it is the last one of its step."""
        return self._current.share.is_last

    @property
    def is_further(self) -> bool:
        """Whether the current step follows the last one of its epoch.

        It has only samples of lost workers, and no number of its own: a schedule by steps should
        not advance.
        """
        return self._current.is_further

    @property
    def in_step(self) -> bool:
        """Whether the program is in the body of the inner loop, with a current batch."""
        return self._portion is not None

    @property
    def replicas(self) -> list[DistributedDataParallel]:
        """The tracked models whose gradients are reduced over a group that may lose members."""
        return [] if self._group is None else self._group.ddps

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same in every world.

        Further steps are not counted (`is_further`). Raises TypeError for a stream.
        """
        if isinstance(self._feed, StreamFeed):
            raise TypeError("an ElasticLoader over an ElasticStream has no length")
        cursor = self._feed.cursor
        return cursor.ledger.steps_per_epoch * cursor.micro_batches

    @property
    def step(self) -> int:
        """The number of the current batch's step, counted from the start of epoch 0."""
        return self._current.step

    @property
    def epoch(self) -> int:
        """The epoch of the current step, or of the next one."""
        return self._cursor.epoch if self._epoch is None else self._epoch

    def backward(self, loss: torch.Tensor) -> None:
        """Run `loss.backward()` with the weight of this rank's samples.

        `loss` is the mean over the current batch, a tensor of one element. The gradient is then
        that of the mean over the samples of all workers.
        """
        (loss * self.weight).backward()  # type: ignore[no-untyped-call]
        self._note_contributors()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all workers.

        The current step counts as done as soon as its gradient is complete: save before the
        backward pass, or after the optimizer has stepped.
        """
        if self._contributors is not None:
            self._commit(self._contributors)
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in a state of `state_dict()`, on all workers.

        Raises ConfigurationError within the loop, or for a state of other data.
        """
        if self._epoch is not None:
            raise ConfigurationError(
                "load_state_dict() of an ElasticLoader within its loop",
                slug=SLUG,
                expected="a call before epochs(), on all workers",
                next_step="load the checkpoint before the loop",
            )
        self._cursor.load_state_dict(state)

    # The state that a newcomer receives: `SharedState`.

    def state(self) -> dict[str, Any]:
        """Return the states of the named objects, and the position."""
        return {"tracked": self._tracked.state(), "data": self._cursor.state_dict()}

    def load(self, state: Any) -> None:
        """Accept the state of another worker."""
        self._tracked.load(state["tracked"])
        self._cursor.load_state_dict(state["data"])

    @property
    def _current(self) -> Portion:
        if self._portion is None:
            raise ConfigurationError(
                "an ElasticLoader has no current batch",
                slug=SLUG,
                expected="weight, samples, step, is_last and backward() within the inner loop",
                next_step="use them in the body of: for batch in loader",
            )
        return self._portion

    def _next(self) -> Any:
        self._finish_step()
        if self._portion is None:
            if self._cursor.epoch != self._epoch or self._is_at_end():
                return _NONE
            self._pass_boundary()
        self._is_passed = False
        while True:
            try:
                self._portion = next(self._feed)
            except ReadingCutError:
                self._deal()
            else:
                return self._portion.batch

    def _add_up(self, numbers: list[int]) -> list[int]:
        """Return the sums of these numbers over all members, which read the same step.

        Raises ReadingCutError if a member of those that the step was dealt to is missing.
        """
        device = "cpu" if self._group is not None else c10d._get_object_coll_device()
        total = torch.tensor(numbers, device=device)
        dist.all_reduce(total)
        if self._group is not None and self._group.members != self._dealt_to:
            # All survivors see this here, and the sum may lack what the lost member has read.
            raise ReadingCutError("a member was lost")
        return total.tolist()

    def _deal(self) -> None:
        """Deal the next step to the members that are left, since it was not read by all."""
        assert self._group is not None, "without a group no member is lost"
        self._dealt_to = self._group.members
        self._feed.rewind(*_world())

    def _finish_step(self) -> None:
        """Commit the current step if its last batch was computed."""
        self._note_contributors()
        if self._contributors is not None:
            self._commit(self._contributors)
            self._portion = self._contributors = None

    def _note_contributors(self) -> None:
        """Note the members whose samples are in the step's gradient, after its last backward pass.

        The program sees exactly these members there (`synchrony.rules`), and may see fewer later.
        """
        portion = self._portion
        if portion is not None and portion.share.is_last and self._contributors is None:
            self._contributors = () if self._group is None else self._group.members

    def _commit(self, contributors: tuple[Identity, ...]) -> None:
        """Commit the step without the shares of members that are not among `contributors`."""
        portion, cursor = self._portion, self._cursor
        if portion is None or self._is_committed:
            return
        self._is_committed = True
        lost = [r for r, member in enumerate(self._dealt_to) if member not in contributors]
        # The loader has read ahead, and the coming steps now have other samples.
        self._is_stale = cursor.commit_without_ranks(lost)

    def _is_at_end(self) -> bool:
        return self._until_step is not None and self._cursor.next_step >= self._until_step

    def _pass_boundary(self) -> None:
        """Pass the boundary before the next step, unless that is done; deal to the world there."""
        if self._is_passed:
            return
        if self._group is not None:
            self._check(self._group)
            if self._lets_join():
                self._group.pass_boundary()
            self._dealt_to = self._group.members
        self._is_passed = True
        self._is_committed = False
        world = _world()
        if world != self._cursor.world or self._is_stale:
            self._feed.rewind(*world)
            self._is_stale = False

    def _lets_join(self) -> bool:
        """Whether workers may join before the next step."""
        return True

    @untraced
    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before an optimizer steps."""
        self._note_contributors()
        self._stepped[id(optimizer)] = optimizer

    def _check(self, group: OrderedGroup) -> None:
        """Refuse modules and optimizers that were not named: a newcomer would lack their state."""
        known = {id(parameter) for parameter in self._tracked.parameters()}
        for module in group.ddps:
            if any(id(p) not in known for p in module.parameters() if p.requires_grad):
                kind = type(module.module).__name__
                raise self._not_named(f"the DistributedDataParallel of a {kind}", "model")
            if hook := ddp.stateful_hook(module):
                raise ConfigurationError(
                    f"an ElasticLoader and a communication hook with {hook}",
                    slug=SLUG,
                    expected="hooks without a state: a worker that joins has none of it",
                    next_step="leave the hook out, or use a plain DataLoader: then the world grows"
                    " by a restart at checkpoints",
                )
        named = {id(each) for each in self._tracked.optimizers}
        for optimizer in self._stepped.values():
            if id(optimizer) not in named and _trains(optimizer, known):
                raise self._not_named(f"a {type(optimizer).__name__} that steps", "optimizer")
        self._stepped.clear()
        parts = {id(part) for each in self._tracked.modules for part in each.modules()}
        for average in self._averaged.values():
            if id(average) not in parts:
                raise self._not_named("an AveragedModel that is updated", "average")
        self._averaged.clear()
        self._check_schedules()

    def _check_schedules(self) -> None:
        schedulers = torch.optim.lr_scheduler.LRScheduler
        if any(isinstance(each, schedulers) for each in self._tracked.others):
            return
        for optimizer in self._tracked.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                raise self._not_named(f"the scheduler of a {type(optimizer).__name__}", "scheduler")

    def _not_named(self, what: str, name: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what} was not named to the ElasticLoader: a worker that joins would not get its"
            " state",
            slug=SLUG,
            expected="all that the training changes, by name",
            next_step=self._naming(name),
        )

    def _naming(self, name: str) -> str:
        """Return the call by which the script names an object to this loader."""
        return f"elastane.ElasticLoader(loader, {name}={name}, ...)"


_NONE = object()


def _trains(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """Whether an optimizer changes one of these parameters."""
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])


def _world() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def group_of_process() -> OrderedGroup | None:
    """Return the group in which workers can join; None with another launcher, or without one."""
    if not dist.is_initialized():
        return None
    group = c10d._get_default_group()
    if isinstance(group, OrderedGroup):
        return group
    if isinstance(group, ElasticGroup):
        raise ConfigurationError(
            "an ElasticLoader in a job of elastane.init()",
            slug=SLUG,
            expected="a loop of job.steps(), which deals exact data and takes workers in",
            next_step="for step, batch in job.steps(loader, until_epoch=10): ...",
        )
    return None
