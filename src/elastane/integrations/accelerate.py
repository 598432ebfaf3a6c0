"""Accelerate under `elastane run --in-place`: its rank and world size follow the world.

Accelerate keeps both from its start, and programs compute with them: the Hugging Face Trainer
multiplies each loss by that size. Its decisions for the first world, such as which samples of a
last batch are repetitions or which process opens trackers, are made again for the survivors.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from elastane.integrations.versions import require_known
from elastane.process import environment
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("1.",)
_UNKNOWN_TRACKERS = (
    "the worker of rank 0 is lost, and no other has called accelerator.init_trackers; scripts that"
    " call it on all workers continue to log"
)
_STATES = ("PartialState", "AcceleratorState")
# Accelerate's function, and the one that takes its place after a loss, gather no count of a script.
_GATHERS_OF_METRICS = ("gather_for_metrics", "among_those_left")


def adopt(name: str, world: VisibleWorld) -> None:
    """Let Accelerate's state follow `world`; `name`: the package as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name)
    require_known(name, str(package.__version__), KNOWN)
    states: Any = importlib.import_module(f"{name}.state")

    def follow() -> None:
        for state in _STATES:
            # All objects of the class share it; it is empty before the first.
            shared = getattr(states, state)._shared_state
            if "num_processes" in shared:
                shared.update(num_processes=world.size, process_index=world.rank)

    world.on_change(follow)
    for state in _STATES:
        _notice_questions(getattr(states, state), world)
    _go_first_alone(states.PartialState, world)
    operations: Any = importlib.import_module(f"{name}.utils.operations")
    for gather in ("_gpu_gather", "_gpu_gather_object"):
        world.make_whole(operations, gather)
    _reduce_again(package.Accelerator, world)
    _notice_counts(package.Accelerator, world)
    _share_evaluations(package.Accelerator, world)
    _gather_each_sample_once(package.Accelerator, operations, world)
    _save_again(package.Accelerator, world)
    _load_one_phase(name)
    _keep_schedule(name)
    _open_trackers_later(package.Accelerator, world)
    _require_trackers(package.Accelerator, world)
    _print_on_each_node(package.Accelerator)


def prints_for_node(is_main: bool, is_local_main: bool) -> bool:
    """Whether this worker prints what one of its node has to: on the first node that of rank 0.

    Its local rank 0 may be lost. `is_main`, `is_local_main`: whether rank or local rank is 0.
    """
    return is_main if environment.get("GROUP_RANK", "0") == "0" else is_local_main


def in_use(name: str) -> bool:
    """Whether the script has made an Accelerator or its state; `name`: the imported package.

    The models of Transformers import Accelerate, too.
    """
    states: Any = importlib.import_module(f"{name}.state")
    return bool(states.PartialState._shared_state)


def _notice_questions(owner: Any, world: VisibleWorld) -> None:
    """Let `world` know of each read of the size that a script multiplies its loss by."""

    def read(self: Any) -> int:
        try:
            size: int = self.__dict__["num_processes"]
        except KeyError:
            raise AttributeError("num_processes") from None
        world.asked_size()
        return size

    def write(self: Any, size: int) -> None:
        self.__dict__["num_processes"] = size

    owner.num_processes = property(read, write)


def _notice_counts(owner: Any, world: VisibleWorld) -> None:
    """Let `world` know of each count that a script gathers, and may divide its loss by."""
    gather: Callable[..., Any] = owner.gather

    @functools.wraps(gather)
    def gather_counts(self: Any, tensor: Any) -> Any:
        is_metric = sys._getframe(1).f_code.co_name in _GATHERS_OF_METRICS
        if is_metric or not dist.is_initialized():
            return gather(self, tensor)
        return world.gathered(lambda: gather(self, tensor), tensor)

    owner.gather = gather_counts


def _go_first_alone(owner: Any, world: VisibleWorld) -> None:
    """Let another worker go first if the first one is lost in a block of `main_process_first`.

    On one node `local_main_process_first` is the same. On several, each has a first one.
    """

    def alone(run: Callable[..., AbstractContextManager[None]], *, local: bool) -> Any:
        @contextmanager
        def go(self: Any) -> Iterator[None]:
            with first_alone(world, lambda: run(self), local=local):
                yield

        return functools.wraps(run)(go)

    owner.main_process_first = alone(owner.main_process_first, local=False)
    owner.local_main_process_first = alone(owner.local_main_process_first, local=True)


@contextmanager
def first_alone(
    world: VisibleWorld, run: Callable[[], AbstractContextManager[None]], *, local: bool
) -> Iterator[None]:
    """Run the block on rank 0 and then on the others; by `run` where each node has a first one."""
    has_more_nodes = environment.get("GROUP_WORLD_SIZE", "1") != "1"
    if not dist.is_initialized() or (local and has_more_nodes):
        with run():
            yield
    else:
        with world.first_alone():
            yield


def mean_of_members(reduce: Callable[..., Any], *args: Any) -> Any:
    """Return Accelerate's mean; `synchrony.callsites` knows its sum by the name of this function.

    Accelerate divides the sum by the size that it has when the sum returns.
    """
    return reduce(*args)


def _reduce_again(owner: Any, world: VisibleWorld) -> None:
    """Take a mean over the members that are left, and make any `reduce` over one membership.

    A script may have divided what it sums by the world size. If a loss interrupts such a sum of
    floats, all workers restart.
    """
    reduce: Callable[..., Any] = owner.reduce

    @functools.wraps(reduce)
    def reduce_whole(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        function = functools.partial(mean_of_members, reduce) if reduction == "mean" else reduce

        def call() -> Any:
            return function(self, tensor, reduction, scale)

        return world.reduced(call, tensor, is_sum=reduction == "sum")

    owner.reduce = reduce_whole


def _shard_of(loader: Any) -> Any:
    """Return what deals the batches of a prepared loader to one process, or None."""
    samplers = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return next((each for each in samplers if hasattr(each, "process_index")), None)


def _share_evaluations(owner: Any, world: VisibleWorld) -> None:
    """Share the data of a prepared loader by the current world in each pass of an evaluation.

    Scripts compare what they gather with the whole dataset, in its order. In an evaluation all
    prepared models are in `eval()`; a loader whose batches were trained on keeps its shares, since
    schedules of learning rates are made for its number of steps.
    """
    prepare: Callable[..., Any] = owner.prepare_data_loader
    backward: Callable[..., None] = owner.backward
    trained: WeakSet[Any] = WeakSet()

    def share(accelerator: Any, loader: Any) -> None:
        shard = _shard_of(loader)
        if shard is None or loader in trained or not _evaluates(accelerator):
            return
        if not shard.split_batches or shard.batch_size % world.size == 0:
            shard.num_processes, shard.process_index = world.size, world.rank

    @functools.wraps(prepare)
    def prepare_data_loader(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        if (begin := getattr(prepared, "begin", None)) is not None:

            def begin_shared() -> None:
                share(self, prepared)
                begin()

            prepared.begin = begin_shared
        return prepared

    @functools.wraps(backward)
    def backward_noted(self: Any, *args: Any, **kwargs: Any) -> None:
        if (loader := self.gradient_state.active_dataloader) is not None:
            trained.add(loader)
        backward(self, *args, **kwargs)

    owner.prepare_data_loader = prepare_data_loader
    owner.backward = backward_noted


def _evaluates(accelerator: Any) -> bool:
    """Whether all prepared models are in `eval()`; the Trainer leaves a wrapper as it is."""
    models = [getattr(each, "module", each) for each in accelerator._models]
    return bool(models) and not any(each.training for each in models)


@dataclass(frozen=True, slots=True)
class _LastBatch:
    """The last batch of a loader whose end is filled with samples from its beginning.

    `loader`: the prepared loader. `size`: of the world that it is dealt to. `rows`: the samples of
    one member in this batch. `own`: how many of this member's come first and are no repetitions.
    """

    loader: Any
    size: int
    rows: int
    own: int

    @classmethod
    def of(cls, state: Any) -> _LastBatch | None:
        """Return that of the loader in use; `state`: Accelerate's GradientState."""
        if not state.end_of_dataloader or state.remainder <= 0:
            return None
        loader = state.active_dataloader
        shard = _shard_of(loader)
        if shard is None:
            return None
        rows = loader.total_batch_size // shard.num_processes
        own = min(max(state.remainder - shard.process_index * rows, 0), rows)
        return cls(loader, shard.num_processes, rows, own)

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Keep `gather_for_metrics` from dropping samples in this context."""
        remainder, self.loader.remainder = self.loader.remainder, 0
        try:
            yield
        finally:
            self.loader.remainder = remainder

    def without_repetitions(self, gathered: Any, counts: list[int]) -> Any:
        """Return the samples that are no repetitions; `counts`: how many each member has.

        `gathered`: a tensor, or a list of objects, with the parts of the members in their order.
        What does not have one row for each sample is cut off as Accelerate does.
        """
        if len(gathered) != self.rows * len(counts):
            return gathered[: self.loader.remainder]
        starts = range(0, len(gathered), self.rows)
        parts = [gathered[a : a + n] for a, n in zip(starts, counts, strict=True)]
        if isinstance(gathered, torch.Tensor):
            return torch.cat(parts)
        return [each for part in parts for each in part]


def _gather_each_sample_once(owner: Any, operations: Any, world: VisibleWorld) -> None:
    """Make `gather_for_metrics` drop each repeated sample, also after members were lost.

    Accelerate keeps the first rows of what it gathers, as many as are left over in a world of the
    size that the loader is dealt to. Without a member in their middle it would keep repetitions.
    """
    gather: Callable[..., Any] = owner.gather_for_metrics
    apply: Callable[..., Any] = operations.recursively_apply

    def among_those_left(self: Any, last: _LastBatch, data: Any, use_gather_object: bool) -> Any:
        with last.kept_whole():
            gathered = gather(self, data, use_gather_object)
            counts = self.gather(torch.tensor([last.own], device=self.device)).tolist()
        if use_gather_object or not _is_of_tensors(apply, data):
            return last.without_repetitions(gathered, counts)
        return apply(lambda tensor: last.without_repetitions(tensor, counts), gathered)

    @functools.wraps(gather)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        last = _LastBatch.of(self.gradient_state)
        if last is None:
            return gather(self, input_data, use_gather_object)

        def once() -> Any:
            if world.size == last.size:
                return gather(self, input_data, use_gather_object)
            return among_those_left(self, last, input_data, use_gather_object)

        return world.whole(once)

    owner.gather_for_metrics = gather_for_metrics


def _is_of_tensors(apply: Callable[..., Any], data: Any) -> bool:
    """Whether Accelerate gathers `data` as tensors; otherwise as a list of objects."""
    try:
        apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _save_again(owner: Any, world: VisibleWorld) -> None:
    """Repeat a save on another worker, under the same number, if the main process is lost.

    Only the main process writes. Accelerate refuses an existing folder, so the unfinished one is
    removed. All workers make a save that Accelerate numbers, as it has a barrier. Into a folder of
    its own, a script may save on the main process only, as those of diffusers do: then nothing may
    wait for the others.
    """
    save: Callable[..., Any] = owner.save_state

    @functools.wraps(save)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            return save(self, *args, **kwargs)
        number = project.iteration
        folder = Path(self.project_dir or ".", "checkpoints", f"checkpoint_{number}")
        # The main process makes it only after all workers have reached the barrier of `whole`.
        is_ours = not folder.exists()

        def restore() -> None:
            project.iteration = number
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)

        return world.whole(lambda: save(self, *args, **kwargs), restore, waits=True)

    owner.save_state = save_state


def _load_one_phase(name: str) -> None:
    """Let all workers continue at the same batch of an accumulated step after `load_state`.

    Accelerate reads the number of batches from a file of each rank. A world that is larger than the
    one that saved lacks some of these files, or has older ones: then gradients would be reduced
    after different batches.
    """
    checkpointing: Any = importlib.import_module(f"{name}.checkpointing")
    accelerator: Any = importlib.import_module(f"{name}.accelerator")
    load: Callable[..., dict[str, Any]] = checkpointing.load_accelerator_state

    @functools.wraps(load)
    def load_accelerator_state(input_dir: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded = load(input_dir, *args, **kwargs)
        of_first = Path(input_dir, f"{checkpointing.RNG_STATE_NAME}_0.pkl")
        if of_first.exists():
            loaded["step"] = checkpointing.load(of_first).get("step", 0)
        return loaded

    checkpointing.load_accelerator_state = load_accelerator_state
    accelerator.load_accelerator_state = load_accelerator_state


def _keep_schedule(name: str) -> None:
    """Step a prepared scheduler as often in each step as in the world where it was prepared.

    Accelerate steps it once for each process, since a prepared loader deals a batch to each. That
    loader continues to deal to lost workers, so a loss does not change the number of steps to come.
    """
    scheduling: Any = importlib.import_module(f"{name}.scheduler")
    state = scheduling.AcceleratorState
    owner = scheduling.AcceleratedScheduler
    begin: Callable[..., None] = owner.__init__
    step: Callable[..., None] = owner.step
    sizes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @functools.wraps(begin)
    def begin_in_world(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        sizes[self] = state().num_processes

    @functools.wraps(step)
    def step_as_prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        as_prepared = SimpleNamespace(num_processes=sizes[self])
        scheduling.AcceleratorState = lambda: as_prepared
        try:
            step(self, *args, **kwargs)
        finally:
            scheduling.AcceleratorState = state

    owner.__init__ = begin_in_world
    owner.step = step_as_prepared


def _open_trackers_later(owner: Any, world: VisibleWorld) -> None:
    """Let the next main process open the trackers that the script has asked for.

    Scripts such as those of diffusers call `init_trackers` on the main process only, so the next
    one does not know which project they are for. It logs nothing until all workers restart. They do
    not restart as it logs: the main process may have died in a save, so the newest checkpoint may
    be cut off until the survivors make the next one.
    """
    # By accelerator: what opens the trackers that the script has asked for; None once it did.
    asked: WeakKeyDictionary[Any, Callable[[], None] | None] = WeakKeyDictionary()
    init: Callable[..., None] = owner.init_trackers

    def open_if_main(accelerator: Any) -> None:
        if not accelerator.is_main_process:
            return
        if accelerator not in asked and accelerator.log_with and world.first_rank:
            asked[accelerator] = None
            sys.stderr.write(
                f"elastane: {_UNKNOWN_TRACKERS}. Nothing more is logged until all workers restart,"
                " at the script's next checkpoint if restarts are left\n"
            )
        if (opens := asked.get(accelerator)) is not None:
            asked[accelerator] = None
            opens()

    @functools.wraps(init)
    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> None:
        asked[self] = functools.partial(init, self, *args, **kwargs)
        open_if_main(self)

    def with_trackers(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            open_if_main(self)
            return function(self, *args, **kwargs)

        return called

    owner.init_trackers = init_trackers
    for name in ("log", "get_tracker"):
        setattr(owner, name, with_trackers(getattr(owner, name)))


def _require_trackers(owner: Any, world: VisibleWorld) -> None:
    """Restart all workers as a script asks for a tracker that a lost main process had opened."""
    get: Callable[..., Any] = owner.get_tracker

    @functools.wraps(get)
    def get_tracker(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = get(self, *args, **kwargs)
        if world.first_rank and self.is_main_process and self.log_with and not self.trackers:
            world.restart(_UNKNOWN_TRACKERS)
        return tracker

    owner.get_tracker = get_tracker


def _print_on_each_node(owner: Any) -> None:
    """Print once on each node."""

    @functools.wraps(owner.print)
    def print_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if prints_for_node(self.is_main_process, self.is_local_main_process):
            print(*args, **kwargs)  # noqa: T201 - it is what the function is for

    owner.print = print_once
