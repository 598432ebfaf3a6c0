"""Records the collectives of a script that knows nothing of elastane, in the ring of its page.

torch's public collectives share one decorator, which calls the function in one of its cells. That
cell is replaced, so `torch.distributed.all_reduce` stays the same object for everything that holds
or compares it, torch.compile included. What torch calls from C++, as the reducer of
DistributedDataParallel does, passes no function of Python. A thread beside the script therefore
reads torch's own counts of each group four times a second, and writes them to the board. Once
nothing has moved for some seconds it adds torch's last records of each group, and the line where
the main thread is. The records also say which collectives are complete. torch's count of these may
stay too small, since two threads of gloo may complete in one order and count in the other.

Nothing here changes what a collective does or raises. A torch without these names is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from elastane.process import pauses, step_meter
from elastane.process.collective_ring import CallSites, write_board
from elastane.process.frames import described, is_debugged, main_frames
from elastane.process.status_page import WorkerPage
from elastane.process.step_meter import Loading, StepMark, StepMeter
from elastane.protocol.limits import COUNT_MAX
from elastane.protocol.ring import (
    CALLS_MAX,
    GROUP_MASK,
    GROUP_SHIFT,
    GROUPS_MAX,
    OPERATIONS,
    RECORD,
    RECORDS,
    SITE_SHIFT,
    WORLD_SHIFT,
    Board,
    GroupBoard,
    GroupCall,
    Position,
    spans,
)

# How often the thread beside the script looks; each look costs some 20 us.
BEAT_S = 0.25
# torch's records are read once nothing has moved for this long, ...
STILL_S = 1.0
# ... and for this multiple of the usual time without a move, since it takes 60 ms of a processor to
# read 2,000 of them; but no later than this, before an agent asks.
STILL_FACTOR, STILL_MAX_S = 4.0, 10.0
# The share of the newest time in the usual one: one evaluation does not change it much.
_NEWEST = 0.1
# Words of a record and of the page, see `protocol.ring` and `process.status_page`.
_RETURNED_AT = 5
_HEAD, _LOADING, _LOADS, _BEATS, _BOARDS = range(5)
_C10D = "torch.distributed.distributed_c10d"
_NATIVE = "torch._C._distributed_c10d"
_LOADER = "torch.utils.data.dataloader"
_DDP = "torch.nn.parallel.distributed"
# Where each operation has its tensor and its group among its positional arguments.
_TENSOR_SECOND = frozenset(
    ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
)
# These call others of these functions, which are then not recorded.
_NESTS = frozenset(
    (
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
        *("send_object_list", "recv_object_list", "monitored_barrier"),
    )
)
_NO_TENSOR = frozenset(("barrier", "monitored_barrier", "all_to_all"))
_GROUP_AT = {
    "barrier": 0,
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "all_to_all": 2,
    "all_reduce_coalesced": 2,
    "all_gather_coalesced": 2,
    "send": 2,
    "recv": 2,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "gather": 3,
    "scatter": 3,
    "gather_object": 3,
    "scatter_object_list": 3,
    "all_to_all_single": 4,
}


class CollectiveRecorder:
    """Records the collectives of this process on its page."""

    def __init__(self, page: WorkerPage, meter: StepMeter) -> None:
        self.memory = page.ring_memory
        self.words = page.ring_words
        self.record_words = self.memory.cast("Q")
        self.sites = CallSites(self.memory)
        self.numbers = itertools.count(1)
        # Threads that are in a collective: those that it calls itself are not recorded.
        self.inside: set[int] = set()
        # By the identity of the group: a digest of its name, shifted to its place, and its calls.
        default = [0, 0]
        self.groups: dict[int, list[int]] = {id(None): default}
        self.default = default
        # What each record needs, in one tuple: an attribute costs as much as all of it.
        self.hot = (
            *(self.inside, self.groups, self.sites.known, self.numbers),
            *(self.memory, self.words, self.record_words, meter, meter.thread),
        )

    def add_group(self, group: Any) -> list[int]:
        """Return the entry of a group that is used for the first time."""
        module: Any = sys.modules.get(_C10D)
        is_default = module is not None and group is module.GroupMember.WORLD
        entry = self.default if is_default else [_digest(group) << GROUP_SHIFT, 0]
        self.groups[id(group)] = entry
        return entry

    def begin_world(self, number: int) -> None:
        """Restart the count of calls of each group at the number of the world."""
        for entry in self.groups.values():
            entry[1] = number << WORLD_SHIFT


def _digest(group: Any) -> int:
    """Return a number of 24 bits for a group, equal on all of its members; never 0."""
    name = str(getattr(group, "group_name", ""))
    return (zlib.crc32(name.encode()) & GROUP_MASK) or 1


class _State:
    """The recorder of this process, if it has one; forks of it have none."""

    def __init__(self) -> None:
        self.recorder: CollectiveRecorder | None = None
        self.watch: _Watch | None = None

    def forget(self) -> None:
        """Record nothing in a forked child, such as a DataLoader's."""
        self.recorder = self.watch = None


_state = _State()
os.register_at_fork(after_in_child=_state.forget)


def watch_torch() -> None:
    """Let torch's collectives and data loaders be recorded, here and in forks of this process.

    Nothing is recorded until `begin`. Call it after torch is imported; a second call does nothing.
    """
    _watch_loaders()
    _watch_backwards()
    pauses.watch_torch()
    module: Any = sys.modules.get(_C10D)
    if module is None or getattr(module, "_elastane_records", False):
        return
    module._elastane_records = True
    for number, name in enumerate(OPERATIONS):
        cell = _cell(getattr(module, name, None)) if name else None
        if cell is not None:
            cell.cell_contents = _recording(cell.cell_contents, name, number)
    cell = _cell(getattr(module, "init_process_group", None))
    if cell is not None:
        cell.cell_contents = _watching(cell.cell_contents)


def begin_world(number: int) -> None:
    """Count collectives from here on as those of the world with this number, if they are recorded.

    All of its members call this between the same two collectives.
    """
    if _state.recorder is not None:
        _state.recorder.begin_world(number % (COUNT_MAX >> WORLD_SHIFT))


def begin(page: WorkerPage) -> None:
    """Record this process's collectives and steps on `page`, unless its agent wants none."""
    if page.records:
        _state.recorder = CollectiveRecorder(page, step_meter.begin(page))
        pauses.begin(page)


def watch_groups(positions: Callable[[], dict[str, Position]] | None = None) -> None:
    """Begin the thread that shows this process's groups; the script has made its first one.

    `positions` returns the position of each group by name; by default torch's counts are read.
    """
    recorder = _state.recorder
    if recorder is not None and _state.watch is None:
        _state.watch = _Watch(recorder, positions)
        _state.watch.start()


def _cell(function: Any) -> Any:
    """Return the cell that holds the function which torch's decorator calls; None without one."""
    code = getattr(function, "__code__", None)
    names = getattr(code, "co_freevars", ())
    if "func" not in names or not function.__closure__:
        return None
    cell = function.__closure__[names.index("func")]
    return cell if callable(cell.cell_contents) else None


# The waits of other threads. They are no part of a step, which the main thread makes.
_other_threads = SimpleNamespace(waits_ns=0)


def _recording(function: Callable[..., Any], name: str, operation: int) -> Callable[..., Any]:
    """Return the function with a record before and after; its calls stand two frames below."""
    tensor_at = -1 if name in _NO_TENSOR else int(name in _TENSOR_SECOND)
    group_at, nests = _GROUP_AT.get(name, 1 << 30), name in _NESTS
    state, get_ident, now_ns = _state, threading.get_ident, time.monotonic_ns
    get_frame, pack, none = sys._getframe, RECORD.pack_into, id(None)
    head, records, size, returned = _HEAD, RECORDS, RECORD.size, _RETURNED_AT

    def record(*args: Any, **kwargs: Any) -> Any:
        recorder = state.recorder
        if recorder is None:
            return function(*args, **kwargs)
        (inside, groups, known, numbers, memory, words, record_words, meter, main) = recorder.hot
        ident = get_ident()
        if inside and ident in inside:
            return function(*args, **kwargs)
        waits_ns, begun_ns = meter.waits_ns, now_ns()
        try:
            count = len(args)
            which = id(args[group_at]) if count > group_at else none
            if kwargs and which == none:
                which = id(kwargs.get("group"))
            entry = groups.get(which)
            if entry is None:
                entry = recorder.add_group(kwargs.get("group") or args[group_at])
            entry[1] += 1
            frame = get_frame(2)
            site = known.get((id(frame.f_code), frame.f_lasti))
            if site is None:
                site = recorder.sites.number(frame) << SITE_SHIFT
            nbytes = getattr(args[tensor_at], "nbytes", 0) if -1 < tensor_at < count else 0
            number = next(numbers)
            at = number % records * size
            pack(memory, at, number, entry[0] | site | operation, nbytes, entry[1], begun_ns, 0, 0,
                 number)  # fmt: skip
            words[head] = number
        except Exception:  # a group or tensor of a kind that is not known
            return function(*args, **kwargs)
        if nests:
            inside.add(ident)
        try:
            return function(*args, **kwargs)
        finally:
            if nests:
                inside.discard(ident)
            ended_ns = record_words[(at >> 3) + returned] = now_ns()
            waiter: Any = meter if ident == main else _other_threads
            waiter.waits_ns = waits_ns + ended_ns - begun_ns

    record.__name__ = record.__qualname__ = name
    record._torchdynamo_disable = True  # type: ignore[attr-defined]
    return record


def _watching(function: Callable[..., Any]) -> Callable[..., Any]:
    def init(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        watch_groups()
        return made

    return init


def _watch_loaders() -> None:
    module: Any = sys.modules.get(_LOADER)
    kind: Any = getattr(module, "_BaseDataLoaderIter", None)
    if kind is None or getattr(kind, "_elastane_records", False):
        return
    kind._elastane_records = True
    load_next, state = kind.__next__, _state
    main, get_ident = threading.main_thread, threading.get_ident

    def __next__(self: Any) -> Any:  # noqa: N807 - it is the iterator's
        recorder = state.recorder
        if recorder is None or get_ident() != main().ident:
            return load_next(self)
        words = recorder.words
        words[_LOADING] = 1
        try:
            with Loading():
                return load_next(self)
        finally:
            words[_LOADING] = 0
            words[_LOADS] += 1
            step_meter.mark(StepMark.BATCH, id(getattr(self, "_dataset", None)))

    kind.__next__ = __next__


def _watch_backwards() -> None:
    """Measure how long each backward pass of a DDP waits for the other workers.

    Its reducer waits at the end of the pass, in C++, in a callback that it gives to autograd. One
    that is given earlier runs before it, and one that this gives in turn runs after it.
    """
    module: Any = sys.modules.get(_DDP)
    kind: Any = getattr(module, "DistributedDataParallel", None)
    if not hasattr(kind, "_post_forward") or getattr(kind, "_elastane_records", False):
        return
    kind._elastane_records = True
    torch, state, after = sys.modules["torch"], _state, kind._post_forward

    def post_forward(self: Any, output: Any) -> Any:
        if self._use_python_reducer:  # Compiled code without breaks makes its sums; none waits.
            return after(self, output)
        return watch(self, output)

    def watch(self: Any, output: Any) -> Any:
        made = after(self, output)
        if state.recorder is None or not self.require_backward_grad_sync:
            return made
        with contextlib.suppress(Exception):  # an output of a kind that is not known
            nodes = (each.grad_fn for each in module._find_tensors(made))
            node = next(filter(None, nodes), None)
            if node is not None:
                _time_waits(torch.autograd.Variable._execution_engine, node, id(self))
        return made

    watch._torchdynamo_disable = True  # type: ignore[attr-defined]
    kind._post_forward = post_forward


def _time_waits(engine: Any, node: Any, marker: int) -> None:
    """Count what the pass that runs `node` waits at its end, and end a step then."""
    wait = step_meter.Waiting()

    def begins(_grads: Any) -> None:
        engine.queue_callback(waits)

    def waits() -> None:
        wait.__enter__()
        engine.queue_callback(has_waited)

    def has_waited() -> None:
        wait.__exit__(None, None, None)
        step_meter.mark(StepMark.BACKWARD, marker)

    node.register_prehook(begins)


class _Watch:
    """The thread that writes the board: the groups' positions, and more at a standstill."""

    def __init__(
        self, recorder: CollectiveRecorder, positions: Callable[[], dict[str, Position]] | None
    ) -> None:
        self._recorder = recorder
        self._find_positions = positions or self._count
        native: Any = sys.modules.get(_NATIVE) if positions is None else None
        self._dump: Callable[..., bytes] | None = getattr(native, "_dump_fr_trace_json", None)
        self._positions: dict[str, Position] = {}
        self._names: dict[str, str] = {}
        self._moves: tuple[int, ...] = ()
        self._moved_s = 0.0
        self._usual_s = 0.0
        self._shown = Board()
        self._records: dict[str, GroupBoard] | None = None
        # Where the main thread was as the records were read.
        self._read_at = ""

    def start(self) -> None:
        """Begin, in a thread that does not keep the process from its end."""
        threading.Thread(target=self._run, name="elastane-ring", daemon=True).start()

    def _run(self) -> None:
        sleep, now_s = time.sleep, time.monotonic
        self._moved_s = now_s()
        # The script may end, or take torch apart, at any moment.
        with contextlib.suppress(Exception):
            while _state.watch is self:
                sleep(BEAT_S)
                self._look(now_s())

    def _look(self, now_s: float) -> None:
        words = self._recorder.words
        words[_BEATS] += 1
        positions = self._find_positions()
        moves = words[_HEAD], words[_LOADING], words[_LOADS]
        if positions != self._positions or moves != self._moves:
            self._usual_s += _NEWEST * (now_s - self._moved_s - self._usual_s)
            moved = positions != self._positions
            self._positions, self._moves, self._moved_s = positions, moves, now_s
            self._records = None
            if moved:
                words[_BOARDS] += 1
            self._show(self._boards())
        elif now_s - self._moved_s >= min(STILL_MAX_S, max(STILL_S, self._usual_s * STILL_FACTOR)):
            self._show_standstill()

    def _show_standstill(self) -> None:
        frames = main_frames()
        where = described(frames)
        if self._records is None or (where != self._read_at and self._is_open(self._records)):
            self._records, self._read_at = self._read_records(), where
        self._show(self._records, where, debugged=is_debugged(frames))

    def _is_open(self, groups: dict[str, GroupBoard]) -> bool:
        """Whether a collective was not complete; that it is by now may show in no count."""
        positions = (group.position for group in groups.values())
        return any(position.begun > position.completed for position in positions)

    def _show(
        self, groups: dict[str, GroupBoard], where: str = "", *, debugged: bool = False
    ) -> None:
        board = Board(groups=groups, where=where, debugged=debugged)
        if board != self._shown:
            self._shown = board
            write_board(self._recorder.memory, board)

    def _boards(self) -> dict[str, GroupBoard]:
        return {name: GroupBoard(position=at) for name, at in self._positions.items()}

    def _count(self) -> dict[str, Position]:
        """Return torch's counts of each group, by name."""
        if self._dump is None:
            return {}
        status = json.loads(self._dump(False, False)).get("pg_status", {})
        if status.keys() - self._names.keys():
            self._read_records()
        found: dict[str, Position] = {}
        # Of groups with one name, the newest; torch also counts those that were destroyed.
        for number, counts in sorted(status.items(), key=lambda item: int(item[0]))[-GROUPS_MAX:]:
            begun, completed = (
                max(0, int(counts[f"last_{state}_collective"]))
                for state in ("enqueued", "completed")
            )
            found[self._names.setdefault(number, f"#{number}")] = Position(begun, completed)
        return found

    def _read_records(self) -> dict[str, GroupBoard]:
        """Return torch's last records of each group, and learn the names of the groups."""
        calls: dict[str, dict[int, GroupCall]] = {}
        backends: dict[str, str] = {}
        over: dict[str, dict[int, bool]] = {}
        entries = json.loads(self._dump(True, False)).get("entries", []) if self._dump else []
        for entry in entries:
            name = str(entry["process_group"][0])
            self._names[str(entry["pg_id"])] = name
            if not entry.get("is_p2p"):
                call = _group_call(entry)
                calls.setdefault(name, {})[call.sequence] = call
                states = over.setdefault(name, {})
                states[call.sequence] = states.get(call.sequence, True) and entry["retired"]
                backends[name] = str(entry["profiling_name"]).partition(":")[0][:100]
        members = _members()
        return {
            name: GroupBoard(
                position=_position(position, over.get(name, {})),
                ranks=members.get(name, ""),
                backend=backends.get(name, ""),
                sends=name in calls and max(calls[name]) != position.begun,
                calls=tuple(calls.get(name, {}).values())[-CALLS_MAX:],
            )
            for name, position in self._positions.items()
        }


def _position(counted: Position, over: dict[int, bool]) -> Position:
    """Return the position of a group; `over`: whether each of its last collectives is complete."""
    if max(over, default=-1) < counted.begun:
        return counted  # Messages count too, or the records are those of other groups.
    first = min((number for number, is_over in over.items() if not is_over), default=None)
    return Position(counted.begun, counted.begun if first is None else first - 1)


def _group_call(entry: dict[str, Any]) -> GroupCall:
    sizes = entry.get("input_sizes") or []
    return GroupCall(
        sequence=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2][:100],
        elements=sum(math.prod(each) for each in sizes),
        dtype=",".join(sorted({str(each) for each in entry.get("input_dtypes") or []}))[:100],
    )


def _members() -> dict[str, str]:
    """Return the ranks of the members of each group by its name; of the default group nothing."""
    module: Any = sys.modules.get(_C10D)
    world = getattr(module, "_world", None)
    if world is None:
        return {}
    names, default = world.pg_names, world.default_pg
    return {
        str(names.get(group, "")): spans(ranks)
        for group, ranks in world.pg_group_ranks.items()
        if group is not default
    }
