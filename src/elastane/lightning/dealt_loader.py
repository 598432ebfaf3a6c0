"""The training data as Lightning iterates over it: dealt by the ledger, with a boundary per step.

`DealtLoader` takes the place of the script's DataLoader. Each step of `global_batch_size` samples
is divided among the members of the world in which it begins, so the number of batches of an epoch
is the same in every world. Fails with ConfigurationError for loaders that it cannot deal from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from elastane.data.feed import Feed, Portion
from elastane.data.ledger import LedgerShare, Spans
from elastane.data.sampler import ElasticBatchSampler
from elastane.errors import ConfigurationError
from elastane.lightning.limits import refusal
from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup


class DealtLoader:
    """Yields this worker's batches of each step, and knows the members that the step is dealt to.

    `loader` is the script's DataLoader as Lightning has prepared it for a distributed training, and
    `accumulate` the number of batches of a step. `group` is None where the world does not change.
    `world` returns rank and size; `before_step` is called before each boundary.
    """

    def __init__(
        self,
        loader: Any,
        global_batch_size: int,
        accumulate: int,
        group: OrderedGroup | None,
        *,
        world: Callable[[], tuple[int, int]],
        before_step: Callable[[], None],
    ) -> None:
        sampler = _sampler_of(loader)
        self.dataset = loader.dataset
        # Lightning tells the epoch to an attribute of this name.
        self.sampler = ElasticBatchSampler(
            len(loader.dataset),
            global_batch_size,
            seed=sampler.seed,
            shuffle=sampler.shuffle,
            drop_last=loader.drop_last,
            micro_batches=accumulate,
        )
        self._collate = loader.collate_fn
        self._feed = Feed(_rebuilt(loader, self.sampler))
        self._group = group
        self._world = world
        self._before_step = before_step
        self._portion: Portion | None = None
        self._dealt_to: tuple[Identity, ...] = ()
        self._is_stale = True

    def __len__(self) -> int:
        """Return the number of batches of an epoch, in every world."""
        return self.sampler.ledger.steps_per_epoch * self.sampler.micro_batches

    def __iter__(self) -> Self:
        self._portion, self._is_stale = None, True
        return self

    def __next__(self) -> Any:
        if self._portion is None:
            self._begin_step()
        elif self._portion.share.is_last:
            raise refusal(
                "a step was computed, and the optimizer did not step",
                "one step of the optimizer for each accumulate_grad_batches batches",
                "leave optimizer_step() of the LightningModule as it is, or let it step each time",
            )
        self._portion = next(self._feed)
        return self._portion.batch

    @property
    def portion(self) -> Portion:
        """The current batch, with its share of the step."""
        assert self._portion is not None, "Lightning computes a batch that it has drawn"
        return self._portion

    @property
    def dealt_to(self) -> tuple[Identity, ...]:
        """The members that the current step was dealt to, by rank."""
        return self._dealt_to

    def lost(self, members: tuple[Identity, ...]) -> Spans:
        """Return the shares of the current step that members not among `members` were dealt."""
        ranks = [rank for rank, each in enumerate(self._dealt_to) if each not in members]
        return tuple(span for rank in ranks for span in self.sampler.spans_of(rank))

    def read(self, share: LedgerShare) -> Any:
        """Return the batch of a share, read in this process."""
        [indices] = self.sampler.lists(iter([share]), share.epoch)
        together = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[i] for i in indices] if together is None else together(indices)
        return self._collate(samples)

    def commit(self) -> None:
        """Commit the current step, after the optimizer has stepped."""
        if self._portion is not None and self._portion.share.is_last:
            self.sampler.commit()
            self._portion = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which Lightning puts into its checkpoints; equal on all workers."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a checkpoint, or of another worker."""
        self.sampler.load_state_dict(state)
        self._is_stale = True

    def close(self) -> None:
        """End the processes that load the data."""
        self._feed.close()

    def _begin_step(self) -> None:
        """Pass the boundary before a step, and deal it to the world after that boundary."""
        if self._group is not None:
            self._before_step()
            self._group.pass_boundary()
            self._dealt_to = self._group.members
        world = self._world()
        if self._is_stale or world != self.sampler.world:
            self._feed.rewind(*world)
            self._is_stale = False


def _sampler_of(loader: Any) -> Any:
    """Return the DistributedSampler that Lightning, or the script, has given to a DataLoader."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        over = " over an IterableDataset" if isinstance(loader, DataLoader) else ""
        raise refusal(
            f"a {type(loader).__name__}{over} for training",
            "DataLoader(dataset, shuffle=True, ...) over a dataset with a length",
            "for data without a length use an elastane.ElasticLoader over an elastane.ElasticStream"
            " in a loop of your own",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise _not_dealt(f"a {type(loader).__name__} with an __iter__ of its own")
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        raise _not_dealt(f"a train DataLoader with a batch_sampler of type {kind}")
    if type(loader.sampler) is not DistributedSampler:
        kind = type(loader.sampler).__name__
        raise _not_dealt(f"a train DataLoader with a sampler of type {kind}")
    return loader.sampler


def _not_dealt(what: str) -> ConfigurationError:
    return refusal(
        what,
        "DataLoader(dataset, shuffle=True, ...) over a dataset with a length, whose samples are"
        " divided again when the world changes",
        "leave out the sampler: ElasticStrategy deals the samples of each epoch by itself",
    )


def _rebuilt(loader: Any, sampler: ElasticBatchSampler) -> DataLoader[Any]:
    """Return a DataLoader of the same dataset whose batches `sampler` makes."""
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
    )
    kept: dict[str, Any] = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, batch_sampler=sampler, **kept)
