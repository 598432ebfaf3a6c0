"""The status page: memory that an agent and one worker share, with calls, progress and the gate.

This module owns the layout. The page is a memfd that the agent makes, so it needs no name and no
clean-up, and outlives the worker. Each 64-byte line has one writer. A descriptor in
ELASTANE_STATUS_PAGE_FD that is no page of this version raises ValueError.

Memory order: the worker stores its call number, then loads the gate; the agent stores the gate,
then loads the call number. If both loads came before the other side's store became visible, a call
would pass the gate uncounted. Every field is an aligned 8-byte word, which x86-64 and aarch64 store
and load whole, but both let a load pass an earlier store.

The agent gates rarely, so it pays for both sides: membarrier(2) imposes a full barrier on every
worker that opened its page, between the agent's store and its load. The worker's hot path then
needs none. After the barrier, either the worker sees the gate, or the agent sees the call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Mapping

from elastane.process.kernel import accept_barriers, impose_barrier
from elastane.protocol.limits import COUNT_MAX
from elastane.protocol.model import CheckpointUse
from elastane.protocol.ring import RING_BYTES, Ring, read_ring

PAGE_FD_VARIABLE = "ELASTANE_STATUS_PAGE_FD"
# One page of words, then room for the names of about 1,500 modules.
_NAMES_AT, _NAMES_END = 4096, 64 << 10
# Then the ring of the worker's collectives.
PAGE_BYTES = _NAMES_END + RING_BYTES
MAGIC = int.from_bytes(b"ELASTPG1", "little")
VERSION = 13
# Word numbers, of 8 bytes each, little-endian.
_MAGIC, _VERSION, _RECORDS = 0, 1, 2  # line 0: the agent, once
_CALLS, _PARKED, _OWNER = 8, 9, 10  # line 1: the worker
_GATE, _TARGET, _STOPS, _UNTIL_NS, _ASSIGNED = 16, 17, 18, 19, 20  # line 2: the agent
_MARK, _STEPS, _ROUND, _ABORTS = 24, 25, 26, 27  # line 3: the worker
_NAMES_BYTES, _ERROR_NS = 32, 33  # line 4: the worker
_HEAD, _LOADING, _LOADS, _BEATS, _BOARDS = 40, 41, 42, 43, 44  # line 5: the worker, of its ring
# Line 7: the worker's pauses: the kind of the one that lasts, since when, and the nanoseconds of
# those that have ended, by kind.
_PAUSE, _PAUSE_NS, _PAUSED, _PAUSES_END = 56, 57, 57, 61
# Line 7, too: whether it is seen what the worker does with checkpoints; whether it has read one, or
# written one.
_WATCHED, _READ, _WRITTEN = 61, 62, 63
# The worker's last steps: their count in line 6, and records from line 16 on of four words each:
# number, and nanoseconds of the step, of its waits for others and for data.
_STEPS_TIMED, _TIMES, _TIME_WORDS, TIMES_MAX = 48, 128, 4, 32
# The states of a worker that waits at the target.
_WAITS, _HAS_SAVED = 1, 2
# The interval at which a worker past its deadline checks for a new one.
_OVERDUE_POLL_S = 0.05
# A mark counts signs of progress; its lowest bits hold the current activity.
_ACTIVITY_BITS = 8
_MARK_MAX = 1 << 63
# A worker that has come to a standstill writes nothing; one that has not is not judged.
_COPIES_MAX = 4


class _Words:
    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory
        self._words = memoryview(memory).cast("Q")

    def close(self) -> None:
        """Unmap, and close the descriptor."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)


class StatusPage(_Words):
    """The agent's side. The worker inherits `fd`, whose number is in ELASTANE_STATUS_PAGE_FD."""

    @classmethod
    def create(cls, *, records: bool = True) -> StatusPage:
        """Make a page of zeros; raises OSError. `records`: the worker records its collectives."""
        fd = os.memfd_create("elastane-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd, mmap.mmap(fd, PAGE_BYTES))
        page._words[_VERSION] = VERSION
        page._words[_RECORDS] = records
        page._words[_MAGIC] = MAGIC
        return page

    @property
    def moves(self) -> tuple[int, ...]:
        """Numbers of which one changes whenever the worker's collectives or its loader move."""
        words = self._words
        return words[_HEAD], words[_BOARDS], words[_LOADS], words[_LOADING]

    @property
    def beats(self) -> int:
        """How often a thread beside the script ran; 0: the worker has none."""
        return int(self._words[_BEATS])

    @property
    def steps_timed(self) -> int:
        """How many steps of this worker were timed."""
        return min(int(self._words[_STEPS_TIMED]), COUNT_MAX - 1)

    def step_times(self, count: int) -> list[tuple[int, int, int]]:
        """Return the nanoseconds of the last steps: the whole step, waits for others, for data."""
        last = self.steps_timed
        found = []
        for number in range(max(1, last - min(count, TIMES_MAX) + 1), last + 1):
            at = _TIMES + number % TIMES_MAX * _TIME_WORDS
            record = self._words[at : at + _TIME_WORDS].tolist()
            if record[0] == number:
                found.append((record[1], record[2], record[3]))
        return found

    def pauses_ns(self, now_ns: int) -> tuple[int, ...]:
        """Return for how many nanoseconds the worker has paused so far, by kind.

        A pause that is ending is left out, so a time may be too short for one look.
        """
        words = self._words[_PAUSE:_PAUSES_END].tolist()
        kind, since_ns, ended_ns = words[0], words[1], words[2:]
        if 0 < kind <= len(ended_ns) and words == self._words[_PAUSE:_PAUSES_END].tolist():
            ended_ns[kind - 1] += max(0, now_ns - since_ns)
        return tuple(min(each, COUNT_MAX - 1) for each in ended_ns)

    @property
    def checkpoint_use(self) -> CheckpointUse | None:
        """What the worker has done with checkpoints; None if it was not watched."""
        watched, read, written = map(bool, self._words[_WATCHED : _WRITTEN + 1])
        return CheckpointUse(read, written) if watched else None

    @property
    def is_loading(self) -> bool:
        """Whether the script waits for its data loader."""
        return bool(self._words[_LOADING])

    def ring(self) -> Ring:
        """Return what the worker's ring shows, as soon as two copies of it are equal."""
        copies = b"", self._copy_ring()
        for _ in range(_COPIES_MAX):
            copies = copies[1], self._copy_ring()
            if copies[0] == copies[1]:
                break
        return read_ring(copies[1], min(int(self._words[_HEAD]), COUNT_MAX - 1))

    def _copy_ring(self) -> bytes:
        return self._memory[_NAMES_END:PAGE_BYTES]

    @property
    def calls(self) -> int:
        """The number of calls that the worker has made; final only while the gate is set.

        The value is bounded, since a faulty worker may write any number, and it is sent and added
        to.
        """
        return min(int(self._words[_CALLS]), COUNT_MAX - 1)

    @property
    def is_parked(self) -> bool:
        """Whether the worker has reached or passed the target and waits."""
        return bool(self._words[_PARKED])

    @property
    def has_saved(self) -> bool:
        """Whether the worker is parked and has checkpointed, so that it may be stopped."""
        return bool(self._words[_PARKED] == _HAS_SAVED)

    @property
    def mark(self) -> int:
        """A number that changes with every sign of progress; 0: this worker reports none."""
        return int(self._words[_MARK])

    @property
    def activity(self) -> int:
        """The number of the worker's current activity."""
        return int(self._words[_MARK]) % (1 << _ACTIVITY_BITS)

    @property
    def steps(self) -> int:
        """The number of steps that this worker process reports."""
        return min(int(self._words[_STEPS]), COUNT_MAX - 1)

    @property
    def round(self) -> int:
        """The round of the last world whose members this worker has joined; 0: none."""
        return min(int(self._words[_ROUND]), COUNT_MAX - 1)

    @property
    def aborts(self) -> bool:
        """Whether the worker is in an abort of its process group, which has not returned yet."""
        return bool(self._words[_ABORTS])

    @property
    def error_ns(self) -> int:
        """When an error ended the worker's program, by the monotonic clock; 0: none has."""
        return int(self._words[_ERROR_NS])

    @property
    def imports(self) -> tuple[str, ...]:
        """The modules that the worker reports to have imported, in order."""
        end = _NAMES_AT + min(int(self._words[_NAMES_BYTES]), _NAMES_END - _NAMES_AT)
        names = self._memory[_NAMES_AT:end].decode("ascii", "replace").split("\n")
        return tuple(name for name in names if all(map(str.isidentifier, name.split("."))))

    def gate(self) -> None:
        """Make the worker wait in its next call; once this returns, `calls` is final."""
        self._words[_TARGET] = self._words[_STOPS] = 0
        self._words[_GATE] = 1
        impose_barrier()

    def aim(self, calls: int, *, stops: bool = True) -> None:
        """Set the call at which the worker checkpoints; it does not wait in earlier calls.

        `stops`: the worker is stopped there. Otherwise a worker that recovers in place only waits
        there.
        """
        assert calls > 0, "the target is past a call that was counted"
        self._words[_STOPS] = stops
        self._words[_TARGET] = calls

    def allow_until(self, boot_ns: int) -> None:
        """Let the worker pass boundaries until this time of CLOCK_BOOTTIME; 0: without a limit."""
        self._words[_UNTIL_NS] = boot_ns

    def assign(self, of_round: int) -> None:
        """Store the round of the world that the worker enters next, and clear gate and target.

        A worker whose gate opens waits for its place if a later round than its own is stored. If
        none is, the drain was called off, and no place follows.
        """
        self._words[_ASSIGNED] = of_round
        self.release()

    def release(self) -> None:
        """Clear gate and target, so that the worker continues."""
        self._words[_GATE] = 0
        self._words[_TARGET] = self._words[_STOPS] = 0


class StepRecords:
    """The worker's side of its step times."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def add(self, whole_ns: int, waits_ns: int, loads_ns: int) -> None:
        """Add the next step."""
        words = self._words
        number = words[_STEPS_TIMED] + 1
        at = _TIMES + number % TIMES_MAX * _TIME_WORDS
        words[at] = 0  # A reader that comes in between leaves it out.
        words[at + 1], words[at + 2], words[at + 3] = whole_ns, waits_ns, loads_ns
        words[at] = words[_STEPS_TIMED] = number

    def forget(self) -> None:
        """Forget the steps so far: those that follow are of another kind."""
        for slot in range(TIMES_MAX):
            self._words[_TIMES + slot * _TIME_WORDS] = 0


class PauseWords:
    """The worker's side of its pauses."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def watch(self) -> None:
        """Store that what the worker does with checkpoints is seen."""
        self._words[_WATCHED] = 1

    def note_checkpoint(self, *, written: bool) -> None:
        """Store that the worker has read, or written, what may be a checkpoint."""
        self._words[_WRITTEN if written else _READ] = 1

    def begin(self, kind: int, since_ns: int) -> None:
        """Store that a pause of this kind lasts since a time of the monotonic clock."""
        self._words[_PAUSE_NS] = since_ns
        self._words[_PAUSE] = kind

    def end(self, kind: int, took_ns: int) -> None:
        """Store that no pause lasts, and add the time of one that has ended."""
        self._words[_PAUSE] = 0
        self._words[_PAUSED + kind] += max(0, took_ns)


class WorkerPage(_Words):
    """The worker's side of the status page."""

    @classmethod
    def open(cls, fd: int) -> WorkerPage:
        """Map the page that the agent passed as `fd`; raises OSError, or ValueError for no page."""
        if os.fstat(fd).st_size != PAGE_BYTES:
            raise ValueError(f"descriptor {fd} is no page")
        page = cls(fd, mmap.mmap(fd, PAGE_BYTES))
        words = page._words
        if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
            words.release()
            raise ValueError(f"descriptor {fd} is no page of version {VERSION}")
        accept_barriers()
        return page

    @property
    def records(self) -> bool:
        """Whether the worker is to record its collectives."""
        return bool(self._words[_RECORDS])

    @property
    def ring_words(self) -> memoryview:
        """The words that count what moves: head, loading, loads, beats, boards."""
        return self._words[_HEAD : _BOARDS + 1]

    @property
    def ring_memory(self) -> memoryview:
        """The memory of the ring of collectives, in bytes."""
        return memoryview(self._memory)[_NAMES_END:]

    def step_records(self) -> StepRecords:
        """Return where this worker writes its step times."""
        return StepRecords(self._words)

    def pause_words(self) -> PauseWords:
        """Return where this worker counts its pauses."""
        return PauseWords(self._words)

    def claim(self, pid: int) -> bool:
        """Become the one process that writes the page; False if another process has claimed it."""
        if self._words[_OWNER] == 0:
            self._words[_OWNER] = pid
        return bool(self._words[_OWNER] == pid)

    def count(self) -> tuple[int, int]:
        """Count one call; return its number and the gate. The store comes before the load.

        Blocks while the deadline has passed, as `reach` does.
        """
        words = self._words
        calls = words[_CALLS] + 1
        words[_CALLS] = calls
        self._await_authority()
        return calls, words[_GATE]

    def reach(self, number: int) -> int:
        """Store the number of the boundary that was reached, which is a call's; return the gate."""
        words = self._words
        words[_CALLS] = number
        self._await_authority()
        return words[_GATE]

    def _await_authority(self) -> None:
        """Block while the deadline has passed, because another world may be training by then.

        The orphan reaper kills the workers of a blocked agent. If the orphan reaper is blocked too,
        a worker that asks here begins no further step.
        """
        while 0 < self._words[_UNTIL_NS] < time.clock_gettime_ns(time.CLOCK_BOOTTIME):
            time.sleep(_OVERDUE_POLL_S)

    def meet(self, number: int, of_round: int) -> None:
        """Store the round of the world whose members the worker has joined, and its boundary."""
        self._words[_CALLS], self._words[_ROUND] = number, of_round

    def be_in(self, of_round: int) -> None:
        """Store the round of the world that the worker is in; its boundary stays as it is."""
        self._words[_ROUND] = of_round

    def be_at(self, activity: int) -> None:
        """Report progress and the worker's activity from now on."""
        words = self._words
        count = (words[_MARK] >> _ACTIVITY_BITS) + 1
        words[_MARK] = (count << _ACTIVITY_BITS | activity) % _MARK_MAX

    def beat(self) -> None:
        """Report progress."""
        words = self._words
        words[_MARK] = (words[_MARK] + (1 << _ACTIVITY_BITS)) % _MARK_MAX

    def abort(self, in_it: bool) -> None:
        """Store whether this worker is in an abort of its process group."""
        self._words[_ABORTS] = in_it

    def note_error(self, now_ns: int) -> None:
        """Store when an error ended the worker's program; its process may live on for a while."""
        self._words[_ERROR_NS] = self._words[_ERROR_NS] or now_ns

    def note_import(self, name: str) -> bool:
        """Add a module to the reported imports; False if the page has no room left."""
        used, data = self._words[_NAMES_BYTES], name.encode("ascii", "replace") + b"\n"
        begin, end = _NAMES_AT + used, _NAMES_AT + used + len(data)
        if end > _NAMES_END:
            return False
        self._memory[begin:end] = data
        self._words[_NAMES_BYTES] = used + len(data)
        return True

    def step_made(self) -> None:
        """Count a step of this process."""
        self._words[_STEPS] += 1

    @property
    def gated(self) -> bool:
        """Whether the agent drains."""
        return bool(self._words[_GATE])

    @property
    def assigned_round(self) -> int:
        """The round of the last world after the first in which this worker has a place; 0: none."""
        return int(self._words[_ASSIGNED])

    @property
    def target(self) -> int:
        """The call at which to checkpoint; 0 while none is set."""
        return int(self._words[_TARGET])

    @property
    def stops(self) -> bool:
        """Whether all workers are stopped at the target."""
        return bool(self._words[_STOPS])

    def park(self, parked: bool, *, saved: bool = True) -> None:
        """Set whether the worker waits at the target, and whether it has checkpointed."""
        self._words[_PARKED] = (_HAS_SAVED if saved else _WAITS) if parked else 0


def report_error(environ: Mapping[str, str]) -> None:
    """Store on this worker's page that an error has ended its program; nothing without a page."""
    with contextlib.suppress(KeyError, ValueError, OverflowError, OSError):
        page = WorkerPage.open(int(environ[PAGE_FD_VARIABLE]))
        page.note_error(time.monotonic_ns())


_before_park: list[Callable[[], None]] = []


def before_park(finish: Callable[[], None]) -> Callable[[], None]:
    """Register `finish` to be called before this worker parks; return a function that cancels it.

    The agent may kill a parked worker at once. Background work, such as the copy of a snapshot,
    must be complete by then.
    """
    _before_park.append(finish)

    def cancel() -> None:
        with contextlib.suppress(ValueError):
            _before_park.remove(finish)

    return cancel


def finish_before_park() -> None:
    """Complete the registered background work. Call it before `WorkerPage.park(True)`."""
    for finish in list(_before_park):
        finish()
