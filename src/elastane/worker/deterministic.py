"""The same mathematics in every world: a step's virtual shards, their streams, their order.

Owns what `init(deterministic=True)` means for a worker: each step is computed shard by shard, each
with random streams of its own, and what comes of it depends on the number of shards and the seed
alone, not on who computed which. What cannot be so is refused: collectives inside a shard, other
settings on another member, an optimizer that steps on less than all shards.

Knows nothing of membership; a pass that a lost peer cut short is forgotten. Fails by JobError for
a use that cannot work, and as the group does.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elastane.checkpoint.registered import Tracked
from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import WorldGroup
from elastane.data.checks import SEED_END, whole
from elastane.data.cursor import DataPosition
from elastane.data.feed import Portion
from elastane.data.permutation import mixed
from elastane.data.streams import FOR_BUILD, FOR_SHARD, begin_streams
from elastane.errors import JobError
from elastane.worker.buffers import standing
from elastane.worker.deterministic_pass import Means, Pass
from elastane.worker.healing import gathered
from elastane.worker.mode import Mode

# Without it cuBLAS may choose another algorithm for each stream; this is NVIDIA's own setting.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Deterministic(Mode):
    """Each pass over a step's `portions` is one over its shards, and reduces their gradients."""

    is_deterministic = True

    def __init__(self, shards: int, seed: int) -> None:
        super().__init__()
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        self.shards = whole("shards", shards, 1)
        self._cut = self.shards  # times the micro-batches of a step
        self._means = Means()
        self._met: WorldGroup | None = None
        self._step = 0
        self._passes = 0
        self._had_gradients = False
        # How many shards of the pass in hand are done, and of how many; None between passes.
        self._inside: tuple[int, int] | None = None
        self._former: tuple[bool, bool, bool] | None = None

    def apply(self, group: ElasticGroup, tracked: Tracked) -> None:
        """Let torch be deterministic, and let what is built now begin with the job's seed."""
        super().apply(group, tracked)
        group.guard = self._refuse_collective
        os.environ.setdefault(*_CUBLAS)
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        self._former = enabled, warns, torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        begin_streams(FOR_BUILD, self.seed)

    def close(self) -> None:
        """Let torch be as it was."""
        if self._former is not None:
            enabled, warns, benchmark = self._former
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
            torch.backends.cudnn.benchmark = benchmark
            self._former = None

    def open(self, cursor: DataPosition, accumulate: int) -> None:
        """Deal in shards from now on; JobError for what could not be the same everywhere."""
        batch, cut = cursor.ledger.global_batch_size, self.shards * accumulate
        if batch < cut:
            raise _refused(
                f"global_batch_size is {batch}, and a step is cut into {cut} shards",
                "a global batch with at least one sample for each shard of each micro-batch",
                f"elastane.init(deterministic=True, shards={max(1, batch // accumulate)})",
            )
        if not any(True for _ in self.tracked.parameters()):
            raise _refused(
                "deterministic=True, and nothing is tracked that has parameters",
                "all that is trained, for its gradients are reduced by the job",
                "job.track(model=model, optimizer=optimizer)",
            )
        synced = [m for module in self.tracked.modules for m in module.modules() if _syncs(m)]
        if synced:
            raise _refused(
                f"the model has {len(synced)} of {type(synced[0]).__name__}, which looks at all "
                "ranks' samples at once",
                "layers that look at the samples of one shard",
                "leave out convert_sync_batchnorm(); BatchNorm's statistics are combined anyway",
            )
        self._cut = cut
        cursor.cut_into(cut, self.seed)

    def insist_on_world(self, size: int) -> None:
        """Refuse a world in which some ranks would have no shard."""
        if size > self.shards:
            raise _refused(
                f"the world has {size} workers, and there are {self.shards} shards",
                f"at most {self.shards} workers",
                f"elastane.init(deterministic=True, shards={size}), or a smaller --nnodes",
            )

    def begin(self, step: int) -> None:
        """Begin a step, or begin it again."""
        self._step, self._passes, self._had_gradients, self._inside = step, 0, False, None
        # Those that are tracked are the same on all members, and stay.
        begin_streams(*self._words(0))

    def portions(self, dealt: Sequence[Portion]) -> Iterator[Portion]:
        """Yield this rank's shards of a pass over the step; at its end, gradients are reduced."""
        self._meet()
        self._passes += 1
        self.group.hush()
        parameters = self.tracked.parameters()
        buffers = standing(self.tracked.modules)
        made = Pass(self.group, self._means, self._cut, parameters, buffers)
        for done, portion in enumerate(dealt):
            self._inside = done, len(dealt)
            self._begin_streams(1 + portion.share.shard)
            yield portion
            is_last = done == len(dealt) - 1
            made.take(portion.weight, is_first=portion.share.shard == 0, is_last=is_last)
        self._inside = None
        self._had_gradients = made.finish() or self._had_gradients
        self._begin_streams(0)

    def leave(self) -> None:
        """Forget the pass in hand, where there is one: the body has ended."""
        self._inside = None

    def insist_on_all(self) -> None:
        """Refuse a step of an optimizer that does not have the gradients of all shards."""
        if self._inside is not None:
            done, count = self._inside
            what = f"an optimizer steps after {done + 1} of this rank's {count} shards"
        elif not self._passes:
            what = "an optimizer steps, and the step's shards were not computed"
        elif not self._had_gradients:
            what = "an optimizer steps, and no shard has left a gradient"
        else:
            return
        raise _refused(
            what,
            "forward and backward of each shard, then one step of the optimizer",
            "for batch in step.batches: step.backward(loss_of(batch));  then optimizer.step()",
            where=f"step {self._step}",
        )

    def settings(self) -> dict[str, Any]:
        """What results depend on, besides the script and its data."""
        return {**super().settings(), "shards": self._cut, "seed": self.seed}

    def _meet(self) -> None:
        """In a world's first pass, refuse members whose results would be other ones."""
        group, world = self.group, self.group.world
        if self._met is world:
            return
        mine = self.settings()
        heard = gathered(group, [_number(value) for value in mine.values()])
        for (name, value), *others in zip(mine.items(), *heard, strict=True):
            odd = [rank for rank, other in enumerate(others) if other != _number(value)]
            if odd:
                raise _refused(
                    f"{name} is {value!r} here, and another on rank {', '.join(map(str, odd))}",
                    "the same on all members: results depend on it",
                    _SAME.get(name, "use the same on all nodes"),
                    where=f"rank {group.rank()} of {group.size()}",
                )
        self._met = world

    def _refuse_collective(self, name: str) -> None:
        if self._inside is not None:
            raise _refused(
                f"{name} was called inside a shard",
                "collectives before or after the loop over step.batches: ranks have different"
                " numbers of shards",
                "move it behind the loop",
                where=f"step {self._step}",
            )

    def _words(self, place: int) -> tuple[int, ...]:
        return FOR_SHARD, self.seed, self._step, self._passes, place

    def _begin_streams(self, place: int) -> None:
        words = self._words(place)
        begin_streams(*words)
        for number, generator in enumerate(self.tracked.generators):
            generator.manual_seed(mixed(*words, number) >> 1)


_SAME = {
    "threads": "OMP_NUM_THREADS=1 on all nodes",
    "processor": "nodes of one kind",
}


def _number(value: object) -> int:
    """A number of 63 bits that stands for a setting."""
    return value % 2**63 if isinstance(value, int) else zlib.crc32(str(value).encode())


def _syncs(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.SyncBatchNorm)


def _refused(what: str, expected: str, next_step: str, where: str = "") -> JobError:
    return JobError(
        what, expected=expected, next_step=next_step, where=where, slug="deterministic-use"
    )
