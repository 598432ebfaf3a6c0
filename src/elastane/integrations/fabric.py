"""Lightning's Fabric under `elastane run --in-place`, also where Lightning's Trainer uses it.

Fabric reads rank and world size from the environment, which changes with the program's world.
`adopt` changes the few places that keep them, or that call several collectives which belong
together. A script with Fabric has a loop of its own, so it may keep a rank or a size like any other
script. `adopt` uses private names of Fabric, so an unchecked version is refused.
"""

from __future__ import annotations

import csv
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from elastane.integrations.versions import require_known
from elastane.process import environment
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("2.5.", "2.6.")
# Reductions that are no sums: a script may have divided the parts of a sum by the world size.
_NO_SUMS = frozenset(("mean", "avg", "min", "max"))


def adopt(name: str, world: VisibleWorld) -> None:
    """Let Fabric follow `world`; `name`: the package as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name)
    require_known(name, str(package.__version__), KNOWN)
    _follow_rank(world)
    _accept_other_sizes(name, world)
    strategy: Any = importlib.import_module(f"{name}.strategies").DDPStrategy
    share_by_world(strategy)
    world.make_whole(strategy, "broadcast", only_following=True)
    world.make_whole(package.Fabric, "all_gather", only_following=True)
    # Fabric's save ends with a barrier: a save is made again if its writer is lost meanwhile.
    world.make_whole(package.Fabric, "save")
    _let_one_go_first(package.Fabric, world)
    _reduce_together(package.Fabric, world)
    _share_evaluations(name, world)
    _print_on_each_node(package.Fabric)
    _continue_csv_logs(name, world)


def share_by_world(strategy: Any) -> None:
    """Build later samplers for the current world, whose size may differ from devices=."""
    strategy.distributed_sampler_kwargs = property(
        lambda self: {"num_replicas": self.world_size, "rank": self.global_rank}
    )


def _follow_rank(world: VisibleWorld) -> None:
    """Let the next rank 0 print, log and save what only rank 0 does."""
    rank_zero_only: Any = importlib.import_module("lightning_utilities.core.rank_zero")
    rank_zero_only = rank_zero_only.rank_zero_only

    def follow() -> None:
        rank_zero_only.rank = world.rank

    world.on_change(follow)


def _accept_other_sizes(name: str, world: VisibleWorld) -> None:
    """Accept devices= of the first world in one of another size."""
    plugins: Any = importlib.import_module(f"{name}.plugins.environments")
    launched = plugins.TorchElasticEnvironment
    validate = launched.validate_settings

    def validate_settings(self: Any, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != world.first_size:
            validate(self, num_devices, num_nodes)

    launched.validate_settings = validate_settings


def _let_one_go_first(owner: Any, world: VisibleWorld) -> None:
    """Let another worker go first if that of rank 0 is lost in a block of `rank_zero_first`."""
    run: Callable[..., AbstractContextManager[None]] = owner.rank_zero_first

    @contextmanager
    def rank_zero_first(self: Any, local: bool = False) -> Iterator[None]:
        if local or not dist.is_initialized():
            with run(self, local):
                yield
            return
        with world.first_alone():
            yield
        dist.barrier()

    owner.rank_zero_first = functools.wraps(run)(rank_zero_first)


def _reduce_together(owner: Any, world: VisibleWorld) -> None:
    """Reduce all tensors of a collection over one membership."""
    reduce: Callable[..., Any] = owner.all_reduce
    collections: Any = importlib.import_module("lightning_utilities.core.apply_func")

    @functools.wraps(reduce)
    def all_reduce(self: Any, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        tensors: list[torch.Tensor] = []
        collections.apply_to_collection(data, torch.Tensor, tensors.append)
        own = [each.detach().clone() for each in tensors]

        def restore() -> None:
            # They are reduced in place.
            for tensor, value in zip(tensors, own, strict=True):
                tensor.detach().copy_(value)

        def call() -> Any:
            return reduce(self, data, group, reduce_op)

        kind = str(reduce_op).rpartition(".")[2].lower()
        return world.reduced(call, data, restore, is_sum=kind not in _NO_SUMS)

    owner.all_reduce = all_reduce


def _share_evaluations(name: str, world: VisibleWorld) -> None:
    """Share the data of a loader by the current world in each pass that needs no gradients.

    A script may divide what it adds up by the length of its dataset. A pass of training keeps the
    shares that it was set up with: with others it would have another number of steps, and schedules
    of learning rates are made for that number.
    """
    owner: Any = importlib.import_module(name).Fabric
    loader: Any = importlib.import_module(f"{name}.wrappers")._FabricDataLoader
    make: Callable[..., Any] = owner._get_distributed_sampler
    # By sampler of Fabric's: the world size and rank that it was made for.
    made: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    @functools.wraps(make)
    def get_distributed_sampler(*args: Any, **kwargs: Any) -> Any:
        sampler = make(*args, **kwargs)
        made[sampler] = sampler.num_replicas, sampler.rank
        return sampler

    def share(loader: Any) -> None:
        for holder in (loader, loader.batch_sampler):
            sampler = getattr(holder, "sampler", None)
            if isinstance(sampler, DistributedSampler) and sampler in made:
                is_training = torch.is_grad_enabled()
                _deal(sampler, *(made[sampler] if is_training else (world.size, world.rank)))

    length: Callable[[Any], int] = loader.__len__
    pass_over: Callable[[Any], Iterator[Any]] = loader.__iter__

    @functools.wraps(length)
    def shared_length(self: Any) -> int:
        share(self._dataloader)
        return length(self)

    @functools.wraps(pass_over)
    def shared_pass(self: Any) -> Iterator[Any]:
        share(self._dataloader)
        yield from pass_over(self)

    owner._get_distributed_sampler = staticmethod(get_distributed_sampler)
    loader.__len__ = shared_length
    loader.__iter__ = shared_pass


def _deal(sampler: DistributedSampler[Any], size: int, rank: int) -> None:
    """Let a sampler deal to a world of this size, for this rank."""
    if (sampler.num_replicas, sampler.rank) != (size, rank):
        options = sampler.shuffle, sampler.seed, sampler.drop_last
        # A derived class wraps its dataset, which exists already.
        DistributedSampler.__init__(sampler, sampler.dataset, size, rank, *options)


def _print_on_each_node(owner: Any) -> None:
    """Print once on each node: on the first one by rank 0, as its local rank 0 may be lost."""

    @functools.wraps(owner.print)
    def print_once(self: Any, *args: Any, **kwargs: Any) -> None:
        is_first_node = environment.get("GROUP_RANK", "0") == "0"
        if self.is_global_zero if is_first_node else self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201 - it is what the function is for

    owner.print = print_once


def _continue_csv_logs(name: str, world: VisibleWorld) -> None:
    """Let another rank 0 continue the file of CSVLogger, which it would delete."""
    writer: Any = importlib.import_module(f"{name}.loggers.csv_logs")._ExperimentWriter
    check = writer._check_log_dir_exists

    def check_log_dir_exists(self: Any) -> None:
        if world.first_rank == 0:
            check(self)
        elif self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    writer._check_log_dir_exists = check_log_dir_exists
