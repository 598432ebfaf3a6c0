"""The mode of a worker: how it computes the micro-batches of a step.

`Mode` is the ordinary way: it computes a rank's micro-batches as they are dealt, and leaves
gradients to DDP or to the body. `Deterministic` computes the same bits in every world: it owns what
`init(deterministic=True)` means for a worker. Each step is computed as virtual shards, each with
random streams of its own. The result depends on the number of shards and the seed, and not on which
worker computed which shard. Uses that would break this are refused: collectives inside a shard,
different settings on another member, an optimizer that steps before all shards are done.

Neither knows membership: a pass that a lost peer interrupted is discarded. Fails by JobError for a
use that cannot work, and as the group does.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import WorldGroup
from elastane.data.checks import SEED_END, whole
from elastane.data.feed import Portion
from elastane.data.permutation import mixed
from elastane.data.position import DataPosition, JobPosition
from elastane.data.random_streams import FOR_BUILD, FOR_SHARD, begin_streams
from elastane.errors import JobError
from elastane.worker.deterministic_pass import Means, Pass
from elastane.worker.healing import gathered
from elastane.worker.shard_speeds import ShardSpeeds
from elastane.worker.undo import buffers_of

# Without it cuBLAS may choose another algorithm for each stream. The value is NVIDIA's
# recommendation.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Mode:
    """The way one worker computes: `apply` once, `open` for each loop, `begin` for each step."""

    is_deterministic = False

    def __init__(self) -> None:
        self.group = ElasticGroup()
        self.tracked = RegisteredObjects()

    def apply(self, group: ElasticGroup, tracked: RegisteredObjects) -> None:
        """Begin with this group and the registered objects."""
        self.group = group
        self.tracked = tracked

    def close(self) -> None:
        """Restore all settings of this process that were changed."""

    def open(self, cursor: JobPosition, accumulate: int) -> None:
        """Deal each step in `accumulate` micro-batches from here on."""
        cursor.accumulate(accumulate)

    def insist_on_world(self, size: int) -> None:
        """Refuse a world size that this mode cannot compute in."""

    def begin(self, step: int) -> None:
        """Begin a step, or retry it."""

    def portions(self, dealt: Sequence[Portion]) -> Iterator[Portion]:
        """Yield this rank's micro-batches; the mode's own work happens between two of them."""
        yield from dealt

    def leave(self) -> None:
        """Discard an unfinished micro-batch: the body has ended."""

    def loaded(self, took_s: float) -> None:
        """Record how long this rank has waited for the data of the next step."""

    def restore_deal(self) -> None:
        """Repeat this world's uneven deal, if there was one: new data is dealt evenly at first."""

    def redeal(self) -> bool:
        """Change how later steps are dealt to ranks, once a step is made; return whether it did."""
        return False

    def insist_on_all(self) -> None:
        """Refuse an optimizer step that comes too early."""

    def settings(self) -> dict[str, Any]:
        """Return the settings on which results depend, besides the script and its data."""
        return {
            "deterministic": self.is_deterministic,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": _processor(),
        }


def _processor() -> str:
    """Return the kind of processor, by which torch chooses its kernels."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


class Deterministic(Mode):
    """Computes a step's `portions` shard by shard, and reduces their gradients at the end."""

    is_deterministic = True

    def __init__(self, shards: int, seed: int) -> None:
        super().__init__()
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        self.shards = whole("shards", shards, 1)
        self._virtual_shards = (
            self.shards
        )  # virtual shards of a step: `shards` times its micro-batches
        self._means = Means()
        self._cursor: DataPosition | None = None
        self._compared_world: WorldGroup | None = None
        self._speeds = ShardSpeeds()
        self._loading_s = 0.0
        # How many shards each rank has: from the next step on, if that was decided in this one,
        # and what was decided last in a world.
        self._next_counts: tuple[int, ...] | None = None
        self._decided: tuple[WorldGroup | None, tuple[int, ...]] = None, ()
        self._step = 0
        self._passes = 0
        self._had_gradients = False
        # How many shards of the current pass are done, and of how many; None between passes.
        self._inside: tuple[int, int] | None = None
        self._former: tuple[bool, bool, bool] | None = None

    def apply(self, group: ElasticGroup, tracked: RegisteredObjects) -> None:
        """Make torch deterministic, and seed what is built from here on with the job's seed."""
        super().apply(group, tracked)
        group.guard_by(self._refuse_collective)
        os.environ.setdefault(*_CUBLAS)
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        self._former = enabled, warns, torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        begin_streams(FOR_BUILD, self.seed)

    def close(self) -> None:
        """Restore torch's settings."""
        if self._former is not None:
            enabled, warns, benchmark = self._former
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
            torch.backends.cudnn.benchmark = benchmark
            self._former = None

    def open(self, cursor: JobPosition, accumulate: int) -> None:
        """Deal the data in shards from here on; JobError for data or a model that forbids it."""
        if not isinstance(cursor, DataPosition):
            raise _refused(
                "deterministic=True with an ElasticStream, whose lengths are not known",
                "data that can be dealt in virtual shards",
                "an ElasticBatchSampler, or ElasticShards, which knows the lengths",
            )
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
        self._virtual_shards = cut
        self._cursor = cursor
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
        """Begin a step, or retry it."""
        self._step = step
        self._passes = 0
        self._next_counts = None
        self._had_gradients = False
        self._inside = None
        # Registered generators are part of the state, so all members have the same ones already.
        begin_streams(*self._stream_key(0))

    def portions(self, dealt: Sequence[Portion]) -> Iterator[Portion]:
        """Yield this rank's shards in one pass over the step, then reduce their gradients."""
        assert self._cursor is not None, "open() comes first"
        self._compare_settings()
        self._passes += 1
        self.group.hush()
        parameters = self.tracked.parameters()
        buffers = buffers_of(self.tracked.modules)
        made = Pass(self.group, self._means, self._cursor.dealt, parameters, buffers)
        begun_s = time.perf_counter()
        for done, portion in enumerate(dealt):
            self._inside = done, len(dealt)
            self._begin_streams(1 + portion.share.shard)
            yield portion
            is_last = done == len(dealt) - 1
            made.collect(portion.weight, is_first=portion.share.shard == 0, is_last=is_last)
        self._inside = None
        made.wait_for_device()
        took_s = self._loading_s + time.perf_counter() - begun_s
        self._had_gradients = made.finish() or self._had_gradients
        if self._passes == 1 and self._speeds.measure(took_s, len(dealt)):
            self._decide_deal(self._cursor)
        self._begin_streams(0)

    def _decide_deal(self, cursor: DataPosition) -> None:
        """Exchange the ranks' speeds, and decide how many shards each has from the next step on."""
        medians_us = [us for (us,) in gathered(self.group, [self._speeds.pop_median_us()])]
        counts = tuple(map(len, cursor.dealt))
        found = self._speeds.decide(counts, medians_us)
        if found == counts:
            return
        self._next_counts = found
        if self.group.rank() == 0:
            slowest = max(range(len(medians_us)), key=medians_us.__getitem__)
            ratio = medians_us[slowest] / min(medians_us)
            sys.stderr.write(
                f"elastane: step {self._step}: rank {slowest} takes {ratio:.1f} times as long for a"
                f" virtual shard as the fastest rank. From the next step on, ranks 0 to"
                f" {len(found) - 1} have {', '.join(map(str, found))} of {sum(found)} shards; they"
                f" had {', '.join(map(str, counts))}. Results stay the same\n"
            )

    def loaded(self, took_s: float) -> None:
        """Record how long this rank has waited for the data of the next step."""
        self._loading_s = took_s

    def redeal(self) -> bool:
        """Change how later steps are dealt to ranks, once a step is made; return whether it did."""
        counts, self._next_counts = self._next_counts, None
        if counts is None or self._cursor is None:
            return False
        self._decided = self.group.world, counts
        self._cursor.deal_by(counts)
        return True

    def restore_deal(self) -> None:
        """Deal by speed as was decided in this world: another loop over the steps begins."""
        world, counts = self._decided
        if self._cursor is None or world is None or world is not self.group.world:
            return  # The members of another world know no speeds yet.
        if sum(counts) == self._cursor.virtual_shards:
            self._cursor.deal_by(counts)

    def leave(self) -> None:
        """Discard an unfinished pass: the body has ended."""
        self._inside = None

    def insist_on_all(self) -> None:
        """Refuse an optimizer step that lacks the gradients of some shards."""
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
        """Return the settings on which results depend, besides the script and its data."""
        return {**super().settings(), "shards": self._virtual_shards, "seed": self.seed}

    def _compare_settings(self) -> None:
        """In the first pass of a world, refuse members whose settings would give other results."""
        group, world = self.group, self.group.world
        if self._compared_world is world:
            return
        assert self._cursor is not None, "open() comes first"
        own = {**self.settings(), "deal of shards": tuple(map(len, self._cursor.dealt))}
        received = gathered(group, [_number(value) for value in own.values()])
        for (name, value), *others in zip(own.items(), *received, strict=True):
            odd = [rank for rank, other in enumerate(others) if other != _number(value)]
            if odd:
                raise _refused(
                    f"{name} is {value!r} here, and another on rank {', '.join(map(str, odd))}",
                    "the same on all members: results depend on it",
                    _SAME.get(name, "use the same on all nodes"),
                    where=f"rank {group.rank()} of {group.size()}",
                )
        self._compared_world, self._speeds = world, ShardSpeeds()

    def _refuse_collective(self, name: str) -> None:
        if self._inside is not None:
            raise _refused(
                f"{name} was called inside a shard",
                "collectives before or after the loop over step.batches: ranks have different"
                " numbers of shards",
                "move it after the loop",
                where=f"step {self._step}",
            )

    def _stream_key(self, place: int) -> tuple[int, ...]:
        return FOR_SHARD, self.seed, self._step, self._passes, place

    def _begin_streams(self, place: int) -> None:
        words = self._stream_key(place)
        begin_streams(*words)
        for number, generator in enumerate(self.tracked.generators):
            generator.manual_seed(mixed(*words, number) >> 1)


_SAME = {
    "threads": "OMP_NUM_THREADS=1 on all nodes",
    "processor": "nodes of one kind",
}


def _number(value: object) -> int:
    """Return 63 bits that represent a setting."""
    return value % 2**63 if isinstance(value, int) else zlib.crc32(str(value).encode())


def _syncs(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.SyncBatchNorm)


def _refused(what: str, expected: str, next_step: str, where: str = "") -> JobError:
    return JobError(
        what, expected=expected, next_step=next_step, where=where, slug="deterministic-use"
    )
