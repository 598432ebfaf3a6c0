"""Runs a script that knows nothing of elastane, so that it survives the loss of other workers.

`python -m elastane.worker.unmodified [--ranks-may-change] SCRIPT ARG...` is how `elastane run
--in-place` starts it; `-m MODULE` runs a module. `init_process_group` then gives an `OrderedGroup`
(see `synchrony`), whose world shrinks beneath the script. Workers join such a world in place if the
script's loop runs through an `ElasticLoader`. Otherwise it grows by a restart of all workers, for
which this module reports the script's checkpoints and parks before a step.

An operation that cannot be kept is refused where the script calls it, with the reason, or restarts
all workers at the next fault. A restart ends this process: a framework could catch an exception,
and would continue with wrong values.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import multiprocessing
from torch.distributed import device_mesh, rpc
from torch.distributed.algorithms.join import Join

from elastane.comms.group import WorldGroup
from elastane.errors import ConfigurationError, ExitCode
from elastane.process import collectives
from elastane.process.control_socket import AssignedPlace, Doing, Wait
from elastane.process.program_end import below_frames_of, is_failure, leave_by, leave_error
from elastane.process.status_page import finish_before_park
from elastane.process.worker_environment import RANKS_MAY_CHANGE
from elastane.protocol.hangs import Activity
from elastane.protocol.model import Joining
from elastane.protocol.ring import Position
from elastane.protocol.words import OTHER_PROGRAM
from elastane.synchrony.ordered import OrderedGroup, watch_forwards, watch_futures
from elastane.synchrony.visible import VisibleWorld
from elastane.worker import drain, running_saves
from elastane.worker.control_socket import ControlSocket, doing
from elastane.worker.frameworks import Frameworks
from elastane.worker.progress_reporter import ProgressReporter
from elastane.worker.script_saves import ScriptSaves
from elastane.worker.world import warm_up, wiring_of

SLUG = "in-place-refused"
RESTART_SLUG = "in-place-restart"
STATE_LOST_SLUG = "job-state-lost"
# How often a worker that waits at a boundary reads its status page.
_POLL_S = 0.001
# What a person does about workers whose collectives differ.
_SAME_CALLS = "let all ranks call the same collectives in the same order, with equal sizes"
# The description of the group of all workers, as torch has it.
_GROUP = "0"
_BACKENDS = ("", "gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")


class UnmodifiedWorker:
    """One worker of an unmodified script: its control socket, its worlds, and its group."""

    def __init__(self, line: ControlSocket, saves: ScriptSaves, *, keeps_ranks: bool) -> None:
        self._line = line
        self._saves = saves
        self._visible = VisibleWorld(restart)
        self._frameworks = Frameworks(self._visible)
        self._progress = ProgressReporter()
        self._page = drain.take_page()
        self._place: AssignedPlace | None = None
        self._building: WorldGroup | None = None
        self.group = OrderedGroup(self, keeps_ranks=keeps_ranks)

    def join(self) -> None:
        """Enter the first world, as the script calls init_process_group."""
        self._progress.show_on(self._page)
        self.group.watch_optimizers()
        self.group.watch_variables()
        collectives.watch_groups(self._positions)
        self._frameworks.adopt()
        self._saves.watch_distributed()
        word = self._line.first()
        self._line.begin(self._end_world, self._doing)
        self._progress.at(Activity.BODY)
        if isinstance(word, Wait):
            rank, size = outside(word)
            self.group.begin_outside(rank, size)
            self.group.register()
            self.group.show_members(range(size))
            return
        self._place = word
        self.group.begin(self._build(word), word.local_rank)
        self.group.register()
        self._line.able(None, joining=Joining.NEVER)

    def leave(self) -> None:
        """Leave the job with the other members, at the end of the script."""
        self._progress.at(Activity.APART)
        if self.group.has_joined:
            self.group.leave()
            self._line.finished(program_ended=True)
        self._line.close()
        self._progress.close()
        self.group.close()

    @property
    def world_has_ended(self) -> bool:
        """Whether the agent has ended the world, or has sent a place in another."""
        return self._line.world_has_ended

    def enter(self, error: Exception | None) -> WorldGroup:
        """Report the loss, wait for a place in the next world, and build that."""
        if self._place is not None and not self._line.world_has_ended:
            self._line.lost(self._place.fence, error)
        self._place = self._line.next_place()
        return self._build(self._place)

    def restart(self, reason: str, *, state_lost: bool = False) -> NoReturn:
        """End this worker, so that all workers restart; `state_lost`: at no cost."""
        restart(reason, STATE_LOST_SLUG if state_lost else RESTART_SLUG)

    def left_out(self) -> NoReturn:
        """End this worker, which has not joined; its agent may start another."""
        _end("this worker ends: the others went on before it had joined")

    def destroyed(self) -> None:
        """Report that the script has destroyed its group, as it has on all workers.

        It may still save what no other worker does if its rank is 0, or its local rank: then its
        loss restarts all. Other workers are needed no more.
        """
        self._progress.at(Activity.APART)
        if self.group.has_joined:
            self._line.finished(program_ended=not self._may_save)

    @property
    def _may_save(self) -> bool:
        """Whether scripts let this worker save."""
        place = self._place
        local_rank = 0 if place is None else place.local_rank
        return 0 in (local_rank, self.group.rank_now, self._visible.first_rank)

    def shared(self) -> None:
        """Report that workers join this worker's world at boundaries, or that this one can."""
        if self._place is None:
            warm_up()
        self._line.able(None, joining=Joining.PLANNED)

    def _build(self, place: AssignedPlace) -> WorldGroup:
        world = self._building = WorldGroup(wiring_of(place))
        if self._line.world_has_ended:
            world.abort()  # The thread may have looked before this world was there.
        return world.build()

    def _end_world(self) -> None:
        """In the control socket's thread: end what waits in the current world.

        The world is read first: once the other thread has taken its next place, no world has ended,
        and the next world may be there.
        """
        building = self._building
        if self._line.world_has_ended and building is not None:
            with self._progress.aborting():
                building.abort()

    @property
    def follows(self) -> bool:
        """Whether the script uses a framework that adapts to each new rank and world size."""
        self._frameworks.adopt()
        return self._frameworks.in_use

    @property
    def has_own_loop(self) -> bool:
        """Whether the script has a loop of its own, though a framework follows changes."""
        return self._frameworks.leave_loop

    @property
    def saves_together(self) -> bool:
        """Whether the script saves by a framework of which another worker saves again."""
        return self._frameworks.save_together

    @property
    def has_resumed(self) -> bool:
        """Whether the script has read the state of an optimizer before its first step."""
        return self._saves.has_loaded

    def warn(self, text: str) -> None:
        """Write a warning to standard error."""
        _say(text)

    def show(self, rank: int, size: int) -> None:
        """Set the rank and world size where the script and its frameworks read them."""
        if self._place is not None:
            os.environ.update(self._place.env)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        self._frameworks.adopt()
        self._visible.show(rank, size)

    def stepped(self, steps: int) -> None:
        """In the delivering thread: note that `steps` steps are made, in the current world."""
        if self._page is not None and self._place is not None:
            self._page.be_in(self._place.fence.round)
        self._progress.beat()
        where = self._saves.whole_at(steps)
        if where is not None:
            self._line.saved(where, resumed=self._saves.has_loaded)

    def reach(self, number: int) -> None:
        """Reach the boundary of this number, or step: wait here if a drain has agreed on it.

        A parked worker is killed once all have parked, so it has nothing unsaved. If the drain is
        called off, or another world follows, it continues.
        """
        self._saves.watch_distributed()
        page = self._page
        if page is None or not page.reach(number):
            return
        while page.gated and not page.target > number:
            if page.stops:
                finish_before_park()
            is_parked = page.target > 0 and not self._saves.is_saving
            page.park(is_parked, saved=page.stops)
            self._progress.beat()
            time.sleep(_POLL_S)
        page.park(False)
        # The gate opens before the thread of the control socket has read the new place. A step made
        # meanwhile would leave newcomers out.
        while page.assigned_round > self._round and not self._line.world_has_ended:
            time.sleep(_POLL_S)

    @property
    def _round(self) -> int:
        return 0 if self._place is None else self._place.fence.round

    def _positions(self) -> dict[str, Position]:
        """In another thread: the operations of the group, which all members number alike."""
        return {_GROUP: Position(*self.group.counts)} if self.group.has_joined else {}

    def _doing(self) -> Doing:
        return doing(self.group.rank_now, self.group.in_flight, self.group.traffic)


def restart(reason: str, slug: str = RESTART_SLUG) -> NoReturn:
    """End this worker, so that all workers of the job restart from the script's checkpoint."""
    do = _SAME_CALLS if reason.startswith(OTHER_PROGRAM) else "nothing"
    _end(
        f"all workers restart: {reason}. Next step: {do}; they continue from the script's last"
        f" checkpoint, or from the start if it loads none [{slug}]"
    )


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.write(f"elastane: {words}\n")
        sys.stderr.flush()


def _end(words: str) -> NoReturn:
    _say(words)
    running_saves.of_process.finish()
    os._exit(ExitCode.TRY_AGAIN)


def outside(word: Wait) -> tuple[int, int]:
    """Return the rank and size that a script sees before its worker has joined the others.

    The rank is never 0: scripts let rank 0 write files, and another worker has that rank.
    """
    size = max(word.world_size, 2)
    return size - 1, size


def install(*, keeps_ranks: bool) -> None:
    """Let torch.distributed give the script a group that survives the loss of members.

    `keeps_ranks`: the script may keep a rank or a world size in a variable.
    """
    saves = ScriptSaves(_refusal)
    saves.watch()
    line = ControlSocket.inherited()
    if line is not None and (word := line.waits_first()) is not None:
        rank, size = outside(word)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        # It has an address once it joins; frameworks refuse to start without one.
        os.environ.setdefault("MASTER_ADDR", "localhost")
    make_group = _maker(line, saves, keeps_ranks=keeps_ranks)
    groups = _GroupsOfAll()
    modules: tuple[Any, ...] = (dist, c10d, device_mesh)
    for module in modules:
        module.init_process_group = make_group
        module.new_group = groups.new_group
        module.split_group = _refused("split_group")
    for module in modules[:2]:
        module.destroy_process_group = groups.destroy_process_group
        module.new_subgroups = _refused("new_subgroups")
    # Its processes have no agent, and would wait for a store that no process serves.
    processes: Any = multiprocessing
    processes.spawn = _refused(
        "torch.multiprocessing.spawn", "the workers of elastane run --nproc-per-node"
    )
    # A worker without further batches would make other collectives than the rest, and never vote.
    _refuse_joins()
    # Its agents stay connected to a lost worker, and each call to that worker waits in vain.
    calls: Any = rpc
    calls.init_rpc = _refused("torch.distributed.rpc.init_rpc")
    watch_forwards()
    watch_futures()


def _maker(
    line: ControlSocket | None, saves: ScriptSaves, *, keeps_ranks: bool
) -> Callable[..., None]:
    workers: list[UnmodifiedWorker] = []
    torchs: Callable[..., None] = c10d.init_process_group

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        store: Any = None,
        **_options: Any,
    ) -> None:
        """Enter the job's world; the agent decides rank, size and timeout."""
        if dist.is_initialized():
            torchs()  # raises, as without elastane
        _check(backend, init_method, store)
        if workers:
            raise _refusal(
                "init_process_group() was called after destroy_process_group()",
                "one process group, from its first use to the end of the script",
            )
        if line is None:
            raise _refusal("init_process_group() in a process without an agent", "a worker")
        worker = UnmodifiedWorker(line, saves, keeps_ranks=keeps_ranks)
        workers.append(worker)
        worker.join()
        atexit.register(_leave, worker)

    return init_process_group


def _check(backend: str | None, init_method: str | None, store: Any) -> None:
    if str(backend or "").lower() not in _BACKENDS:
        raise _refusal(f"init_process_group(backend={backend!r})", "gloo, or no backend")
    if store is not None or (init_method or "env://") != "env://":
        what = "a store" if store is not None else f"init_method={init_method!r}"
        raise _refusal(f"init_process_group() with {what}", 'init_method="env://", or none')


class _GroupsOfAll:
    """Groups of all workers that the script makes beside the default group: each is that group."""

    def __init__(self) -> None:
        self._destroy: Callable[..., None] = c10d.destroy_process_group
        self._made = 0

    def new_group(self, ranks: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        """Return the group of all workers again; refuse a group of some."""
        group = c10d._get_default_group()
        if ranks is None or sorted(ranks) == [*range(group.size())]:
            self._made += 1
            return group
        raise _refusal(f"new_group({ranks!r})", "collectives over all workers")

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy the default group, which stays if the script destroys one of its own."""
        if group is not None and self._made and group is c10d._get_default_group():
            self._made -= 1
            return
        self._destroy(group)


def _refused(name: str, expected: str = "collectives over all workers") -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _refusal(f"{name}()", expected)

    return refuse


def _refuse_joins() -> None:
    """Refuse the context in which workers with fewer batches wait for the others, if it is on."""
    join: Any = Join
    enter: Callable[..., None] = join.__enter__

    def refuse(self: Any) -> None:
        if self._enable:
            raise _refusal(
                "torch.distributed.algorithms.join, as model.join() makes it",
                "as many batches on each worker, such as by a DistributedSampler",
            )
        enter(self)

    join.__enter__ = refuse


def _refusal(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: not possible with --in-place",
        slug=SLUG,
        expected=expected,
        next_step="start the script without --in-place: then a fault restarts all workers",
    )


def _leave(worker: UnmodifiedWorker) -> None:
    """At the exit of the interpreter: leave with the others, unless the script failed."""
    if not _failure:
        worker.leave()


_failure: list[BaseException] = []


def main(argv: list[str]) -> None:
    """Run the script or module of `argv` as `__main__`, after the option of ours if it is there."""
    may_change = argv[0] == RANKS_MAY_CHANGE
    install(keeps_ranks=not may_change)
    argv = argv[may_change:]
    pid = os.getpid()
    try:
        _run(argv)
    except BaseException as error:
        if not is_failure(error):
            raise
        # The thread that delivers collectives still waits for the others. Once these are gone it
        # would call the interpreter in its teardown.
        _failure.append(error)
        below = below_frames_of(__file__, error.__traceback__)
        leave_error(error.with_traceback(below), pid, os.environ)
        leave_by(error)


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109 - as `python -m` does
        run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_as_main(argv[1])
        return
    path = argv[0] if argv[0].startswith("/") else f"{Path.cwd()}/{argv[0]}"
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    vars(main_module).update(__file__=path, __cached__=None, __loader__=loader)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, vars(main_module))


if __name__ == "__main__":
    main(sys.argv[1:])
