"""A worker's view of its job: its rank in the world, and the loop of its steps.

`init()` returns a `Job`. Owns the loop of steps and what happens between two of them: a change of
the world, and the comparison of the members' states there. `world` moves the worker from world to
world, and the coordinator decides the membership. Without an agent the job is a world of one.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.checkpoint.state_source import CHECKPOINTER
from elastane.comms.digest import state_digest
from elastane.comms.pairing import MispairedError
from elastane.data.checks import whole
from elastane.data.feed import Feed, Portion
from elastane.data.stream import ElasticStream, ReadingCutError, StreamFeed
from elastane.errors import ElastaneError, JobError, PeerLostError
from elastane.process import step_meter
from elastane.protocol.hangs import Activity
from elastane.protocol.model import Fence
from elastane.worker import comparison, healing, shard_support
from elastane.worker.comparison import Replicas
from elastane.worker.control_socket import ControlSocket
from elastane.worker.digest_log import DigestLog, digest_log_of
from elastane.worker.early_read import warn_of_early_read
from elastane.worker.mode import Deterministic, Mode
from elastane.worker.retry import Before, Calls, RetriedCall, RetryProgress, given_up
from elastane.worker.saved import SavedJob
from elastane.worker.scalars import ScalarLog
from elastane.worker.step import Step, Updates, refuse_partitioned
from elastane.worker.undo import Undo
from elastane.worker.world import Worlds

T = TypeVar("T")


def init(  # noqa: PLR0913 - each is a choice of the user
    *,
    deterministic: bool = False,
    shards: int = 8,
    seed: int = 0,
    digest_log: str | Path | None = None,
    digest_every: int = 1,
    wait_for_place: bool = True,
    backend: str = "",
) -> Job:
    """Join the job that this worker was started for; without a launcher, a world of one.

    Use it as `with elastane.init() as job:`. The process group is ready: `job.process_group`.

    `wait_for_place`: a worker that joins while the others train waits here for its place in a
    world. So rank and world size, also in RANK, WORLD_SIZE and the other variables, are valid from
    here on. The others wait for its first step. With False it builds while they train, and has
    neither rank nor these variables before its first step (docs/in-place-explained.md).

    `deterministic`: the result of a step depends on `shards` and `seed` alone, bit for bit, and not
    on the world; its body takes its data from `step.batches` (docs/deterministic.md). `digest_log`:
    a file with a digest of the state after each `digest_every` steps, for `elastane verify-run`.
    The default is the path in ELASTANE_DIGEST_LOG.

    `backend`: "nccl" or "gloo", for tensors on a GPU, the same on all workers. The default is NCCL.
    gloo copies them through the host: slower, but several workers may share one GPU.
    """
    mode = Deterministic(shards, seed) if deterministic else Mode()
    line = ControlSocket.inherited()
    if line is not None:
        warn_of_early_read(sys._getframe(1))
    job = Job(line, mode, digest_log_of(digest_log, digest_every), backend)
    return job.join(wait_for_place=wait_for_place)


class Job:
    """A worker's view of its job. Not thread-safe."""

    def __init__(
        self,
        line: ControlSocket | None,
        mode: Mode,
        digest_log: DigestLog | None,
        backend: str = "",
    ) -> None:
        self._world = Worlds(line, backend)
        self.process_group = self._world.group
        self._tracked = RegisteredObjects()
        self.mode = mode
        self._digest_log = digest_log
        self._undo = Undo(self._tracked)
        self._health = healing.Health(self.process_group, self._tracked)
        self._replicas = Replicas(
            self.process_group, self._tracked, self._health, self._world.differed
        )
        self._saved = SavedJob(self._world, self._tracked, self._health)
        self._updates = Updates(
            self.process_group,
            self._tracked,
            self._health,
            self._undo,
            mode,
            self._saved.settle,
        )
        self._calls = Calls(self.process_group)
        self._scalars = ScalarLog()
        self._scalars.show_in_job()
        self._former_hook = sys.excepthook
        self._verify_every = 0
        self._feed: Feed | StreamFeed | None = None
        self._loader: Any = None
        # Whether all members are known to hold the same state: none has made a step since the world
        # was entered, or since they compared their states. The same on all of them, also on a
        # worker that has just joined.
        self._met = False

    def join(self, *, wait_for_place: bool = True) -> Self:
        """Meet the other workers; `init` calls it."""
        atexit.register(self.close)
        self._former_hook = sys.excepthook
        sys.excepthook = self._excepthook
        self._world.join(wait_for_place=wait_for_place)
        self.mode.apply(self.process_group, self._tracked)
        return self

    @property
    def rank(self) -> int:
        """This worker's rank in the current world; JobError while it has no place in one."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The size of the current world; JobError while this worker has no place in one."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """The number of this worker on its node, the same in every world."""
        return self._world.local_rank

    @property
    def fence(self) -> Fence:
        """The round and attempt of the current world; zeros without an agent."""
        return self._world.fence

    @property
    def device(self) -> torch.device:
        """This worker's device: a GPU by its local rank, or the CPU.

        A GPU is made CUDA's current device before `init` returns.
        """
        return self._world.device

    def track(self, **objects: Any) -> None:
        """Register the objects of the job's state, for healing peers and undoing failed steps.

        Models, optimizers, schedulers, scalers, samplers, generators: anything with `state_dict`
        and `load_state_dict`. The names must be the same on all workers. Raises JobError after
        `steps()` or a restore.
        """
        first = "job.steps()" if self._feed is not None else self._saved.restored_by
        if first:
            raise JobError(
                f"track({', '.join(objects)}): {first} came first",
                expected=f"all that is tracked, before {first}, which is called once",
                next_step="name it beside the others, before that",
                slug="job-track",
            )
        self._tracked.add(objects)
        refuse_partitioned(self._tracked)
        shard_support.refuse(self._tracked, self.mode, self._digest_log)

    def log_to(self, *targets: Any) -> None:
        """Write the scalars of `log` to these, from now on.

        A path is a file of JSON lines; `elastane.TensorBoard`, `WandB`, `MLflow` and `Trackio` need
        the packages that they are named for. Call it on all workers. One of them writes, so a path
        has to be reached from all nodes; else each node's file has the steps of the time when one
        of its workers wrote.
        """
        self._scalars.add_sinks(targets)

    def log(self, **values: Any) -> None:
        """Log scalars; each reaches the sinks of `log_to` once per committed step.

        In the body of a step they are of that step, and a retried body replaces them. Log before
        `optimizer.step()`: a body that a lost peer cuts short after the update is not run again.
        Between steps they are of the steps committed so far. The values of one worker are written,
        usually of rank 0: reduce them before, where they differ. A tensor with one element is
        awaited.
        """
        self._scalars.add(values, self.committed)

    def device_mesh(self, *, shard: int) -> Any:
        """Return a DeviceMesh of replicas of `shard` workers each, for `fully_shard`.

        Its dimensions are "replicate" and "shard". Call it once, before the model is built, on all
        workers. A joining worker waits here for its place, and uses no collectives until `steps()`.
        """
        return shard_support.open_mesh(self._world, shard)

    def steps(
        self,
        loader: Any,
        *,
        until_epoch: int | None = None,
        until_step: int | None = None,
        accumulate: int = 1,
        verify_every: int = 0,
    ) -> Iterator[tuple[Step, Any]]:
        """Yield (step, batch) until an epoch or a step is reached; `with step:` is its body.

        `loader` is a DataLoader over an ElasticBatchSampler or over ElasticShards, or an
        ElasticStream. With `accumulate` micro-batches a step, take them from `step.batches`. A
        `break` out of the loop has to happen on all workers at the same step. After every
        `verify_every` steps the workers compare their states, and one that differs receives the
        majority's. Raises JobError without an end, or if a step was not entered with `with`.
        """
        if until_epoch is None and until_step is None:
            raise JobError(
                "steps() was given no end",
                expected="until_epoch= or until_step=, or both",
                next_step="for step, batch in job.steps(loader, until_epoch=10): ...",
                slug="job-steps",
            )
        self._verify_every = whole("verify_every", verify_every)
        feed = self._open(loader, accumulate)
        try:
            while not self._is_done(feed, until_epoch, until_step):
                self._log_digest()
                if not self._boundary():
                    continue
                self._world.progress.at(Activity.LOADING)
                portions = self._next_portions(feed)
                if not portions:
                    continue  # The epoch or the world has ended.
                step = Step(self, feed.cursor.next_step, portions)
                self.mode.begin(step.number)
                self._world.progress.at(Activity.BETWEEN)
                self._calls.after_step()
                yield step, portions[0].batch
                self._world.widen()
                if not step.begun:
                    raise _not_begun(step)
                if not step.committed:
                    self._enter_next()
            self._meet_at_the_end()
            self._log_digest()
        except GeneratorExit:  # After a break the last step is complete.
            self._log_digest()
            raise
        finally:  # Also after a break: it enters no other world.
            self._world.widen()
            self._calls.loop_ended()
            self._world.progress.at(Activity.APART)
            self._world.finished()

    def retry(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function with collectives; if a peer is lost, run it again.

        For code between steps: evaluation, metrics, a barrier. Call it after the `with` of a step,
        or between two loops, on all workers at the same place. In the next world the function runs
        from its beginning, with that world's rank and world size. Random streams, buffers and train
        or eval mode are restored before. The function has to undo any other change itself, and must
        not step an optimizer. Returns the function's value; raises what the function raises, unless
        a lost peer explains it. How joining workers take part: docs/in-place-explained.md.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        call = self._calls.begin(name, self.committed)
        if call.is_over:
            return cast(T, call.value)
        if call.is_between_loops:
            self._world.able()
        self._world.progress.at(Activity.BETWEEN)
        call.begin_run(Before(self._tracked, self.process_group))
        try:
            while not self._is_run(call, functools.partial(function, *args, **kwargs)):
                pass
        finally:
            self._calls.end()
            if call.is_between_loops:
                self._world.progress.at(Activity.APART)
                self._world.finished()
        return cast(T, call.value)

    def _is_run(self, call: RetriedCall, function: Callable[[], Any]) -> bool:
        """Run the function of a call; False if a peer was lost and it has to run again."""
        try:
            call.run(functools.partial(self._run_paired, function))
            self.process_group.check()
            torch.distributed.barrier(group=self.process_group)
            self.process_group.check()
        except Exception as error:
            self._world.lose(error)
            return self._is_over_in_the_next(call)
        self._calls.complete(call)
        self.process_group.pairing.passed()
        return True

    def _run_paired(self, function: Callable[[], Any]) -> Any:
        """Run the function if the members have made the same collectives so far."""
        self.process_group.pairing.insist()
        return function()

    def _is_over_in_the_next(self, call: RetriedCall) -> bool:
        """Enter the next world from within a call; return whether another member completed it."""
        while True:
            self._enter_next()
            self._world.progress.at(Activity.BETWEEN)
            callers = self._calls.callers()
            if call.is_over or call.is_between_loops or len(callers) == self.process_group.size():
                return call.is_over
            try:
                self._world.narrow(callers)
                return False
            except (ElastaneError, RuntimeError) as error:
                self._world.lose(error)

    def is_last_of_epoch(self, number: int) -> bool:
        """Whether the step of this number is the last one of its epoch."""
        return self._open_feed.cursor.is_last_of_epoch(number)

    def beat(self) -> None:
        """Report that a step makes progress: a long body reports nothing else."""
        self._world.progress.beat()

    def begin_step(self, step: Step) -> None:
        """Begin the body of a step; `with step:` calls it."""
        self._world.progress.at(Activity.BODY)
        self._calls.in_step()
        self._undo.begin()
        self._updates.begin_step(step.number)
        self._scalars.begin()

    def end_step(self, step: Step, error: Exception | None) -> bool:
        """End the body of a step; return whether `error` was that of a lost peer."""
        self._calls.after_step()
        self._updates.end_step()
        self._scalars.leave()
        self.mode.leave()
        is_cut = error is not None
        if error is None:
            try:
                with step_meter.Waiting():
                    self.process_group.check()
                    self._health.agree(None)
                    self.process_group.pairing.agree(step.number)
            except PeerLostError as lost:
                error = lost
        elif not (self.process_group.failed or self._world.world_has_ended):
            return False
        if error is None or self._health.keeps(self._undo, is_cut=is_cut):
            step.commit()
            self._met = False
            self._health.forget()
            self._undo.committed()
            self._open_feed.commit(step.number)
            if error is None and self.mode.redeal():
                self._open_feed.rewind()
            self._scalars.commit(self.committed)
            self._world.progress.step_made()
        else:
            self._health.put_back(self._undo)
            self._world.lose(error)
        return error is not None

    def checkpointed_by(self, checkpointer: Any) -> SavedJob:
        """Return the state source for a Checkpointer; its agreements become part of the state."""
        self.track(**{CHECKPOINTER: checkpointer})
        return self._saved.saved_by(checkpointer)

    def close(self) -> None:
        """Leave the job; nothing of it stays in this process. Idempotent."""
        atexit.unregister(self.close)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._former_hook
        self._updates.close()
        if self._feed is not None:
            self._feed.close()
        if self._digest_log is not None:
            self._digest_log.close()
        self._scalars.end()
        self.mode.close()
        self._world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self._report_given_up(error)
        self.close()

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an error of a script that does not use `with elastane.init()`."""
        self._report_given_up(error)
        self._former_hook(kind, error, trace)

    def _report_given_up(self, error: BaseException) -> None:
        """Report what is lost with this worker, if an error of a lost peer ends it."""
        # these have texts of their own
        is_ours = isinstance(error, JobError) or self._world.restarts
        if is_ours or self._feed is None or not isinstance(error, Exception):
            return
        if self.process_group.failed or isinstance(error, PeerLostError):
            where = f"rank {self.process_group.rank()} of {self.process_group.size()}"
            saved = "what the Checkpointer finds" if self._saved.restored_by else "the beginning"
            sys.stderr.write(given_up(error, where, self.committed, saved))

    @property
    def committed(self) -> int:
        """How many steps the job has committed, on any workers."""
        return self._feed.cursor.next_step if self._feed is not None else 0

    @property
    def _open_feed(self) -> Feed | StreamFeed:
        assert self._feed is not None, "steps() comes first"
        return self._feed

    def _open(self, loader: Any, accumulate: int) -> Feed | StreamFeed:
        """Return the feed of the loader, at its position; the first call begins the steps."""
        if self._feed is not None and loader is not self._loader:
            raise JobError(
                "steps() was called with another loader than before",
                expected="one loader for all steps: its place is part of the job's state",
                next_step="put the datasets into one, or end the job and begin another",
                slug="job-steps",
            )
        if self._feed is None:
            is_stream = isinstance(loader, ElasticStream)
            self._feed = StreamFeed(loader, self._add_up) if is_stream else Feed(loader)
            self._loader = loader
            self._saved.opened(self._feed.cursor)
            self.mode.open(self._feed.cursor, accumulate)
            self._begin()
        else:
            self._world.able()  # It reported its end when the last loop ended.
        self.mode.open(self._feed.cursor, accumulate)
        self._rewind()
        return self._feed

    def _begin(self) -> None:
        """Enter the first world with steps, and the state of members that are further."""
        if self._tracked.sharded:
            shard_support.begin(self._world, self._health, self._undo, self._verify_every)
        if self._world.came_later:
            self._health.prepare()
        self._updates.watch()
        self._world.begin()
        self._world.progress.at(Activity.ENTERING)
        if self._world.restarts:
            self._met = True
            self._enter_log(is_writer=self.rank == 0)
        elif self._world.waits or not self._come_together():
            self._enter_next()

    def _is_done(
        self, feed: Feed | StreamFeed, until_epoch: int | None, until_step: int | None
    ) -> bool:
        cursor = feed.cursor
        return (until_epoch is not None and cursor.epoch >= until_epoch) or (
            until_step is not None and cursor.next_step >= until_step
        )

    def _boundary(self) -> bool:
        """Check for a change of the world between two steps; return False if there was one."""
        self._world.reach(self.committed + 1, self._saved.save_before_stop)
        if not self._world.world_has_ended and self._is_verified():
            return True
        self._enter_next()
        return False

    def _next_portions(self, feed: Feed | StreamFeed) -> list[Portion]:
        """Return the portions of the next step; none at the end of an epoch or of the world."""
        count, begun_s = feed.cursor.portions_per_step, time.perf_counter()
        try:
            with step_meter.Loading():
                found = [*itertools.islice(iter(functools.partial(next, feed, None), None), count)]
            self.mode.loaded(time.perf_counter() - begun_s)
            return found
        except ReadingCutError:
            self._enter_next()
            return []

    def _add_up(self, numbers: list[int]) -> list[int]:
        """Return the sums of these numbers over all members, which read the same step."""
        self._world.progress.at(Activity.BETWEEN)
        total = torch.tensor(numbers)
        try:
            self.process_group.pairing.insist()
            torch.distributed.all_reduce(total, group=self.process_group)
            self.process_group.check()
        except (ElastaneError, RuntimeError) as error:
            self._world.lose(error)
            raise ReadingCutError(f"a peer was lost: {error}") from error
        self._world.progress.at(Activity.LOADING)
        return total.tolist()

    def _is_verified(self) -> bool:
        """Compare replicas, if it is time; return False if the world broke meanwhile."""
        if not self._verify_every or self.committed % self._verify_every or not self.committed:
            return True
        self._world.progress.at(Activity.ENTERING)
        self._saved.settle()
        try:
            self.process_group.pairing.insist()
            self._replicas.verify(self.committed)
        except (ElastaneError, RuntimeError) as error:
            self._world.lose(error)
            return False
        return True

    def _enter_next(self) -> None:
        """Wait for a place in another world, and continue there with the newest state."""
        self._saved.settle()
        while not self._come_together(in_the_next=True):
            pass
        self._rewind()

    def _come_together(self, *, in_the_next: bool = False) -> bool:
        """Meet the members of a world, and come to their state; return False if the world broke."""
        try:
            if in_the_next:
                self._world.enter()
            self.process_group.pairing.meet(updated=self._health.cut_short)
            comparison.align_ddps(self.process_group, self.committed if self._health.holds else -1)
            self._calls.meet()
            self._world.progress.at(Activity.HEALING)
            self._health.compare(RetryProgress(self._open_feed.cursor, self._calls))
            self._choose_writer()
        except MispairedError:
            raise
        except (ElastaneError, RuntimeError) as error:
            self._world.lose(error)
            return False
        self._met = True
        self.process_group.pairing.begin()
        self._world.met(self.committed)
        return not self._world.is_over()

    def _choose_writer(self) -> None:
        """Agree which member writes the scalars: one that has those of the last committed step."""
        place = self._scalars.place(self.process_group.rank())
        lowest = torch.tensor([place])
        torch.distributed.all_reduce(
            lowest, op=torch.distributed.ReduceOp.MIN, group=self.process_group
        )
        self.process_group.check()
        self._enter_log(is_writer=int(lowest) == place)

    def _enter_log(self, *, is_writer: bool) -> None:
        is_first = self.fence.round <= 1 and self.fence.attempt == 0
        self._scalars.enter(is_writer=is_writer, committed=self.committed, is_first=is_first)

    def _meet_at_the_end(self) -> None:
        """Leave the steps together, so that all members hold the last one.

        A joining worker may find the steps of this loop done, and leaves at once.
        """
        if self._met:
            return
        try:
            self.process_group.pairing.insist()
            torch.distributed.barrier(group=self.process_group)
            self.process_group.check()
            self._met = True
        except (ElastaneError, RuntimeError) as error:
            self._world.lose(error)
            self._enter_next()

    def _log_digest(self) -> None:
        """Append the last step to the digest log, if this worker has to."""
        if self._digest_log is None:
            return
        cursor, tracked = self._open_feed.cursor, self._tracked
        self._digest_log.at(
            self.committed,
            (self.rank, self.world_size),
            lambda: {**self.mode.settings(), "data": cursor.described()},
            lambda: {name: state_digest(state) for name, state in tracked.state().items()},
        )

    def _rewind(self) -> None:
        """Deal the data again, for the current rank and world."""
        self.mode.insist_on_world(self.process_group.size())
        mesh = self._world.mesh
        rank = self.process_group.rank() if mesh is None else mesh.coordinate
        self._open_feed.rewind(rank, self.process_group.size())
        self.mode.restore_deal()


def _not_begun(step: Step) -> JobError:
    return JobError(
        f"the body of step {step.number} did not begin with it",
        expected="one `with step:` around each body",
        next_step="for step, batch in job.steps(...):  with step: ...",
        slug="job-steps",
    )
