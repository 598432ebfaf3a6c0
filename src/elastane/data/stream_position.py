"""A rank's copy of the job's position in a stream: data whose length is not known before.

It has the methods of `DataPosition`. The samples of a step are known only once the ranks have read
them: `readings` returns what this rank reads in each round, and `learn` takes the sum of all ranks'
reports. A commit applies the reports of the step; a change of the world drops them.

A step may also be committed without the shares of ranks that were lost in it (`ElasticLoader`). All
ranks know these shares and their lengths from the rounds of the step. The epoch then owes them:
later steps take some in addition to their own samples, and further steps the rest (`data.ledger`).
docs/decisions/streams-of-unknown-length.md has the reasons.

The module knows nothing of samples or sources. How it fails: ConfigurationError for a state of
other data, for a commit of a step that was not read, and for a dataset without a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elastane.data.checks import SEED_END, ceil_div, whole
from elastane.data.ledger import cut, owed_per_step
from elastane.data.permutation import Permutation
from elastane.data.position import matching
from elastane.data.shard_ledger import (
    LaneReading,
    Round,
    ShardLedger,
    ShardSpan,
    ShardSpans,
    first_of,
    length_of,
)
from elastane.errors import ConfigurationError

_FORMAT = 1


class StreamShare(NamedTuple):
    """One rank's share of a step, or of one micro-batch of it."""

    step: int  # Counted from the start of epoch 0.
    epoch: int
    micro: int  # The number of the micro-batch among `micro_batches`, each with its own share.
    micro_batches: int
    samples: int  # 0 if the batch is a stand-in.
    step_samples: int  # The samples of the whole step over all ranks, owed ones included.
    world_size: int
    shard: int = 0  # Virtual shards are refused.
    is_further: bool = False  # The step has owed samples only.

    @property
    def weight(self) -> float:
        """The factor of the local mean loss before backward(); see LedgerShare.weight."""
        return self.samples * self.world_size / self.step_samples

    @property
    def is_last(self) -> bool:
        """Whether this is the step's last micro-batch, after which the optimizer steps."""
        return self.micro == self.micro_batches - 1


class StreamPosition:
    """The position of one rank's copy; copies are equal if all ranks commit the same steps.

    `shards` is their number. `lanes` is how many of them all ranks together read side by side; it
    determines which samples make a step, so it is fixed for the job.
    """

    def __init__(
        self, shards: int, global_batch_size: int, seed: int, lanes: int, *, shuffle: bool
    ) -> None:
        self.shards = whole("number of shards", shards, 1)
        self.global_batch_size = whole("global_batch_size", global_batch_size, 1)
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        # More lanes than samples in a step would leave some lanes unread.
        self.lanes = min(whole("lanes", lanes, 1), self.global_batch_size)
        self.shuffle = bool(shuffle)
        self.micro_batches = 1
        self._world = 0, 1
        self._next = 0
        self._epoch = 0
        self._committed = self._beginning(self._epoch)
        # The samples that the epoch owes, and whether all its own steps are committed.
        self._owed: ShardSpans = ()
        self._is_further = False
        # The step that is being read: its rounds with the sums of their reports, and the round
        # whose reports the ranks have not exchanged yet.
        self._read = self._committed
        self._rounds: list[tuple[Round, Sequence[int]]] = []
        self._round: Round | None = None
        self._last_of_epoch = -1

    def accumulate(self, micro_batches: int) -> None:
        """Deal each step in this many micro-batches."""
        self.micro_batches = whole("micro_batches", micro_batches, 1)

    @property
    def portions_per_step(self) -> int:
        """The number of shares that this rank has of each step."""
        return self.micro_batches

    def bind(self, rank: int, world_size: int) -> None:
        """Deal for this rank of this world from now on, from the committed position."""
        world_size = whole("world_size", world_size, 1)
        self._world = whole("rank", rank, 0, world_size - 1), world_size
        self.forget()

    @property
    def world(self) -> tuple[int, int]:
        """The rank and world size of `bind`."""
        return self._world

    @property
    def next_step(self) -> int:
        """The number of the step that is dealt next, counted from the start of epoch 0."""
        return self._next

    @property
    def epoch(self) -> int:
        """The epoch of the step that is dealt next."""
        return self._epoch

    @property
    def committed(self) -> ShardLedger:
        """The committed position in this epoch."""
        return self._committed

    @property
    def is_further(self) -> bool:
        """Whether the next step has only owed samples: the epoch's own steps are committed."""
        return self._is_further

    @property
    def steps_done_in_epoch(self) -> int:
        """The number of the epoch's own steps that are committed."""
        return ceil_div(self._committed.samples, self.global_batch_size)

    def is_last_of_epoch(self, step: int) -> bool:
        """Whether this step was read last and is the last one of its epoch."""
        return step == self._last_of_epoch

    def forget(self) -> None:
        """Drop the rounds since the last commit."""
        self._read, self._round = self._committed, None
        self._rounds.clear()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is in that epoch already.

        The next step's number is one more than the last, even if steps of an epoch are left out.
        """
        if whole("epoch", epoch) != self._epoch:
            self._begin_epoch(epoch)
            self.forget()

    def readings(self) -> list[LaneReading]:
        """Return what this rank reads in the next round of the step, possibly nothing.

        Raises ConfigurationError if all shards of an epoch have ended without a sample.
        """
        if self._read.is_complete and not self._read.samples:
            raise ConfigurationError(
                f"none of the {self.shards} shards of epoch {self._epoch} has a sample",
                expected="at least one sample",
                next_step="check the files, and the filters of the dataset",
                slug="data-no-step",
            )
        self._round = self._read.round(self.global_batch_size - self._own_samples)
        return list(self._round.readings(*self._world))

    @property
    def is_whole(self) -> bool:
        """Whether the step that is being read needs no further round.

        Then it is known whether the epoch has another sample after this step.
        """
        is_full = self._own_samples == self.global_batch_size and self._read.continues
        is_last = self._read.is_complete and self._own_samples > 0
        return self._is_further or is_full or is_last

    @property
    def _own_samples(self) -> int:
        """The number of samples of the next step that were read so far, without owed ones."""
        return self._read.samples - self._committed.samples

    @property
    def _owed_in_step(self) -> tuple[ShardSpans, ShardSpans]:
        """The owed samples that the next step takes, and the rest."""
        most = self.global_batch_size
        return first_of(self._owed, most if self._is_further else owed_per_step(most))

    def owed_of(self, rank: int) -> ShardSpans:
        """Return the owed samples that a rank takes in the next step, in this world."""
        taken = self._owed_in_step[0]
        start, stop = cut(0, length_of(taken), rank, self._world[1])
        return first_of(first_of(taken, start)[1], stop - start)[0]

    def expected(self) -> tuple[int, list[LaneReading]]:
        """Return the epoch and the first readings of the step after the one that was read.

        The readings are right if the step is committed and the world does not change.
        """
        epoch, begin = self._epoch, self._read
        if begin.is_complete:
            epoch, begin = epoch + 1, self._beginning(epoch + 1)
        return epoch, list(begin.round(self.global_batch_size).readings(*self._world))

    def report(self, found: Mapping[int, tuple[int, bool]], samples: int) -> list[int]:
        """Return this rank's report of the round; see Round.report."""
        assert self._round is not None, "readings() comes first"
        return self._round.report(found, samples)

    def learn(self, reports: Sequence[int]) -> None:
        """Accept the sum of all ranks' reports of the round."""
        assert self._round is not None, "readings() comes first"
        self._read = self._read.after(self._round, reports)
        self._rounds.append((self._round, tuple(reports)))
        self._round = None
        if self.is_whole:
            is_last = self._read.is_complete
            self._last_of_epoch = self._next if is_last else -1

    def shares(self, samples: Sequence[int]) -> list[StreamShare]:
        """Return this rank's shares of the step that was read, with these numbers of samples."""
        in_step = self._own_samples + length_of(self._owed_in_step[0])
        return [
            StreamShare(
                self._next,
                self._epoch,
                micro,
                len(samples),
                own,
                in_step,
                self._world[1],
                is_further=self._is_further,
            )
            for micro, own in enumerate(samples)
        ]

    def commit(self, step: int) -> None:
        """Commit a step by its number; committing a step again does nothing.

        Raises ConfigurationError for a step that was not read.
        """
        step = whole("step", step)
        if step < self._next:
            return
        if step > self._next or not self.is_whole:
            raise ConfigurationError(
                f"step is {step}, and the step that was read is {self._next}",
                expected=f"step {self._next}, after its portions were taken from the feed",
                next_step="commit each step, or load another rank's position by load_state_dict",
                slug="data-step",
            )
        self.commit_without_ranks(())

    def commit_without_ranks(self, ranks: Sequence[int]) -> bool:
        """Commit the step that was read without the shares of these ranks, which the epoch owes.

        Returns whether the ranks had samples. The epoch no longer owes the samples that the step
        took from its owed ones, unless these ranks had them.
        """
        assert self.is_whole, "a step is committed after its portions were taken from the feed"
        lost = tuple(span for rank in ranks for span in self.spans_of(rank))
        self._owed = (*self._owed_in_step[1], *lost)
        self._committed = self._read
        self._is_further = self._read.is_complete and bool(self._owed)
        if not self._is_further:
            self._next += 1
            if self._read.is_complete:
                self._begin_epoch(self._epoch + 1)
        self.forget()
        return bool(lost)

    def spans_of(self, rank: int) -> ShardSpans:
        """Return the samples that a rank of this world has of the step that was read."""
        parts = (round_.spans(rank, self._world[1], sums) for round_, sums in self._rounds)
        return (*self.owed_of(rank), *(span for part in parts for span in part))

    def described(self) -> dict[str, object]:
        """Return the properties that define the shards and their order; a state must agree."""
        return {
            "shards": self.shards,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "lanes": self.lanes,
            "global_batch_size": self.global_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the data that it belongs to, equal on all ranks."""
        place = {"step": self._next, "epoch": self._epoch, "place": self._committed.state_dict()}
        state = {"format": _FORMAT, **self.described(), **place}
        if self._owed:
            owed = [list(span) for span in self._owed]
            state.update(owed=owed, is_further=self._is_further)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; raises ConfigurationError, unchanged, for other data.

        The world and the micro-batches are not part of a state: they may differ.
        """
        matching(self.described(), state, "the stream")
        step, epoch = whole("step", state.get("step")), whole("epoch", state.get("epoch"))
        committed = ShardLedger.from_state(self._order(epoch), state["place"])
        owed = tuple(self._span(*span) for span in state.get("owed", []))
        self._next, self._epoch, self._committed = step, epoch, committed
        self._owed, self._is_further = owed, bool(owed) and bool(state["is_further"])
        self._last_of_epoch = step if self._is_further else -1
        self.forget()

    def _span(self, shard: int, start: int, stop: int) -> ShardSpan:
        start = whole("start", start)
        number = whole("shard", shard, 0, self.shards - 1)
        return ShardSpan(number, start, whole("stop", stop, start + 1))

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._committed = epoch, self._beginning(epoch)
        self._owed, self._is_further = (), False

    def _beginning(self, epoch: int) -> ShardLedger:
        return ShardLedger.begin(self._order(epoch), self.lanes)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.shards))
        return [int(n) for n in Permutation(self.shards, self.seed, epoch).block(0, self.shards)]
