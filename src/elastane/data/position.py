"""A rank's copy of the job's position in its data, and its rank and world.

Owns the common part of the elastic batch sampler and the elastic shards. `bind` sets the world,
`commit` moves the position, `state_dict` and `load_state_dict` save and restore it. Only committed
steps move the position, so reading ahead does not change it.

The module knows nothing of samples or loaders. Without a bound world it asks torch.distributed, if
the program has imported that. How it fails: ConfigurationError for invalid sizes, for a commit of a
step that is not the next, and for a state of other data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Protocol, Self

from elastane.data.checks import SEED_END, whole
from elastane.data.ledger import (
    NO_VIRTUAL_SHARDS,
    NOTHING_OWED,
    CommittedPosition,
    Ledger,
    LedgerShare,
    Owing,
    Spans,
    VirtualDeal,
    dealt_evenly,
)
from elastane.data.random_streams import FOR_LOADER
from elastane.data.recall import Recall
from elastane.errors import ConfigurationError

# The format of state_dict(), and the version of the order that a seed defines.
_FORMAT = 1


def world_of_process() -> tuple[int, int]:
    """Return (rank, world size) of the default process group; (0, 1) without one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def matching(mine: Mapping[str, object], state: Mapping[str, Any], of: str) -> None:
    """Raise ConfigurationError, which names the field, if a state is of other data than `mine`."""
    if not isinstance(state, Mapping):
        raise _refused(f"the state for {of} is a {type(state).__name__}", "a mapping")
    for key, value in {"format": _FORMAT, **mine}.items():
        if key not in state:
            raise _refused(f"the state for {of} has no {key!r}", "what state_dict() gave")
        if state[key] != value:
            raise _refused(f"{key} is {state[key]!r} in the state", f"{value!r}, as {of} has it")


def _refused(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        what,
        expected=expected,
        next_step="make it as the saved run made it, or read the data from its start, without this",
        slug="data-state",
    )


def _spans_of(owed: Any, end: int) -> Spans:
    """Return the owed positions of a state; raises ConfigurationError for impossible ones."""
    try:
        spans = tuple((whole("start", a, 0, end), whole("stop", b, a + 1, end)) for a, b in owed)
    except (TypeError, ValueError) as error:
        raise _refused(f"owed is {owed!r:.100} in the state", "pairs of positions") from error
    return spans


class JobPosition(Protocol):
    """A job's position in data of any kind, as the job uses it."""

    @property
    def next_step(self) -> int:
        """Return the number of the step that is dealt next, counted from the start of epoch 0."""

    def accumulate(self, micro_batches: int) -> object:
        """Deal each step in this many micro-batches."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the data that it belongs to, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state."""


class DataPosition:
    """The position of one rank's copy; copies are equal if all ranks commit the same steps."""

    def __init__(self, ledger: Ledger, seed: int, shuffle: bool) -> None:
        self.ledger = ledger
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        self.shuffle = bool(shuffle)
        self.micro_batches = 1
        # If not 0, each step is dealt in this many virtual shards, with streams from this seed.
        self.virtual_shards = 0
        self.stream_seed = 0
        # How many virtual shards each rank has; None: as evenly as possible.
        self._counts: tuple[int, ...] | None = None
        # Set by the feed that deals from here.
        self.recall: Recall | None = None
        self._next = 0
        # The positions that the current epoch owes.
        self._owing = NOTHING_OWED
        self._world: tuple[int, int] | None = None

    def accumulate(self, micro_batches: int) -> Self:
        """Deal each step in this many micro-batches; existing iterators keep theirs."""
        self.micro_batches = whole("micro_batches", micro_batches, 1)
        return self

    def cut_into(self, shards: int, stream_seed: int = 0) -> Self:
        """Deal each step in this many virtual shards, in every world.

        The random draws of a loader for a shard's samples depend only on `stream_seed`, step and
        shard. Existing iterators keep theirs. Micro-batches are ignored then.
        """
        self.virtual_shards = whole("shards", shards, 1, self.ledger.global_batch_size)
        self._counts = None
        self.stream_seed = whole("stream_seed", stream_seed, 0, SEED_END - 1)
        return self

    @property
    def portions_per_step(self) -> int:
        """The number of shares that this rank has of each step."""
        if not self.virtual_shards:
            return self.micro_batches
        return len(self.dealt[self.world[0]])

    def bind(self, rank: int, world_size: int) -> Self:
        """Deal for this rank of this world from now on; existing iterators keep theirs.

        Virtual shards are dealt as evenly as possible then, until `deal_by`.
        """
        world_size = whole("world_size", world_size, 1)
        self._world = whole("rank", rank, 0, world_size - 1), world_size
        self._counts = None
        return self

    def deal_by(self, counts: Sequence[int]) -> Self:
        """Deal this many consecutive virtual shards to each rank; existing iterators keep theirs.

        All ranks must do so at the same step. There are `counts` for each rank, of at least 1.
        """
        size, shards = self.world[1], self.virtual_shards
        if len(counts) != size or sum(counts) != shards or min(counts) < 1:
            raise ConfigurationError(
                f"counts are {', '.join(map(str, counts))}, for {shards} virtual shards",
                expected=f"{size} counts of at least 1, whose sum is {shards}",
                next_step="leave the virtual shards to job.steps()",
                slug="data-step",
            )
        self._counts = tuple(counts)
        return self

    @property
    def dealt(self) -> tuple[range, ...]:
        """The virtual shards of each rank: consecutive ones."""
        if self._counts is None:
            return dealt_evenly(self.virtual_shards, self.world[1])
        ends = [0, *accumulate(self._counts)]
        return tuple(map(range, ends, ends[1:]))

    @property
    def virtual(self) -> VirtualDeal:
        """The virtual shards of this rank."""
        if not self.virtual_shards:
            return NO_VIRTUAL_SHARDS
        held = self.dealt[self.world[0]]
        return VirtualDeal(self.virtual_shards, held.start, held.stop)

    @property
    def world(self) -> tuple[int, int]:
        """Rank and world size: those of `bind`, else those of torch.distributed, else (0, 1)."""
        return self._world or world_of_process()

    @property
    def place(self) -> CommittedPosition:
        """The epoch, and the number of its samples that are committed."""
        return self.ledger.place_before(self._next)

    @property
    def next_step(self) -> int:
        """The number of the step that is dealt next, counted from the start of epoch 0."""
        return self._next

    @property
    def epoch(self) -> int:
        """The epoch of the step that is dealt next."""
        return self._next // self.ledger.steps_per_epoch

    @property
    def is_further(self) -> bool:
        """Whether the next step has only owed samples: the epoch's own steps are committed."""
        return self._owing.is_further

    @property
    def steps_done_in_epoch(self) -> int:
        """The number of steps of the epoch that are committed, without further ones."""
        return self._next % self.ledger.steps_per_epoch

    def is_last_of_epoch(self, step: int) -> bool:
        """Whether a step is the last one of its epoch."""
        return (step + 1) % self.ledger.steps_per_epoch == 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is in that epoch already.

        So a script that calls this at the start of its loop resumes at the restored position.
        """
        epoch = whole("epoch", epoch)
        if epoch != self.epoch:
            self._next = epoch * self.ledger.steps_per_epoch
            self._owing = NOTHING_OWED

    def commit(self, step: int | None = None) -> None:
        """Commit a step by its number; None is the next one.

        Committing a step again does nothing, since a rank may learn late that a step is committed.
        Raises ConfigurationError for a step beyond the next, which would skip one.
        """
        step = self._next if step is None else whole("step", step)
        if step > self._next:
            raise ConfigurationError(
                f"step is {step}, and step {self._next} is not committed",
                expected=f"step {self._next}, or an earlier one",
                next_step="commit each step, or load another rank's position by load_state_dict",
                slug="data-step",
            )
        if step == self._next:
            self.commit_without(())

    def commit_without(self, lost: Spans) -> None:
        """Commit the next step without the positions `lost`, which the epoch then owes.

        The epoch no longer owes the positions that the step took from its owed ones, unless they
        are in `lost`.
        """
        step, owing = self._next, self._owing
        rest = self.ledger.dealt_owed(owing.spans, is_further=owing.is_further)[1]
        owed = (*rest, *lost)
        if owed and self.is_last_of_epoch(step):
            self._owing = Owing(owed, is_further=True)
            return
        self._next, self._owing = step + 1, Owing(owed, is_further=False)

    def commit_without_ranks(self, ranks: Sequence[int]) -> bool:
        """Commit the next step without the shares of these ranks; return whether they had samples.

        The epoch then owes their samples, unless its data can only be read forwards.
        """
        lost = tuple(span for rank in ranks for span in self.spans_of(rank))
        self.commit_without(lost if self.deals_owed else ())
        return bool(lost)

    def spans_of(self, rank: int) -> Spans:
        """Return the positions of another rank's share of the next step, in this world."""
        shares = self.ledger.deal_epoch(
            self._next, rank, self.world[1], self.micro_batches, owing=self._owing
        )
        return tuple(span for share in islice(shares, self.micro_batches) for span in share.spans)

    @property
    def deals_owed(self) -> bool:
        """Whether later steps take the shares of members that were lost in a step."""
        return True

    def shares(self) -> Iterator[LedgerShare]:
        """Yield this rank's shares from the position to the end of its epoch.

        Position and world are those at the call, and do not change with later calls.
        """
        return self.ledger.deal_epoch(
            self._next, *self.world, self.micro_batches, self.virtual, self._owing
        )

    def share(self, step: int | None = None, micro: int = 0) -> LedgerShare:
        """Return this rank's share of a step (None: the next) in its current world."""
        step = self._next if step is None else whole("step", step)
        micro = whole("micro", micro, 0, self.portions_per_step - 1)
        dealt = self.ledger.deal_epoch(step, *self.world, self.micro_batches, self.virtual)
        return next(islice(dealt, micro, None))

    def words(self, share: LedgerShare) -> tuple[int, ...]:
        """Return the seed words of the random draws of a share's samples; () without shards."""
        if not self.virtual_shards:
            return ()
        return FOR_LOADER, self.stream_seed, share.step, share.shard

    def portions_left(self) -> int:
        """Return the number of shares, micro-batches included, that are left of the epoch."""
        return self.ledger.steps_left(self._next, self._owing) * self.portions_per_step

    def described(self) -> dict[str, object]:
        """Return the properties that define the order and its steps; a state must agree."""
        ledger = self.ledger
        return {
            "n": ledger.n,
            "global_batch_size": ledger.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": ledger.drop_last,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the data that it belongs to, equal on all ranks."""
        epoch, samples = self.place
        state = {"format": _FORMAT, **self.described(), "epoch": epoch, "samples": samples}
        spans, is_further = self._owing
        if spans:
            state.update(owed=[list(span) for span in spans], is_further=is_further)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; raises ConfigurationError, unchanged, for other data.

        The world and the micro-batches are not part of a state: they may differ.
        """
        matching(self.described(), state, type(self).__name__)
        epoch, samples = (whole(key, state.get(key)) for key in ("epoch", "samples"))
        step = self.ledger.step_at(CommittedPosition(epoch, samples))
        owed = _spans_of(state.get("owed", []), self.ledger.samples_per_epoch)
        if owed and (self.virtual_shards or not self.deals_owed):
            raise _refused(
                "the state owes samples of workers that were lost",
                "a state of a job.steps() loop, or data by an ElasticBatchSampler",
            )
        self._next = step
        self._owing = Owing(owed, is_further=bool(owed) and bool(state.get("is_further")))
