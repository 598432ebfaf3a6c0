"""A worker's side of its keeper: short questions over a socket, and memory by descriptors.

Blocking, and quick: nothing waits for storage. May be called from several threads. A child that
was forked must not use its parent's. How it fails: ConnectionError where the keeper is no more
(then `connect` again; what it held is lost), KeeperSilentError where it does not answer for now
(ask again later), OSError ENOMEM for slots that the memory has no room for, TimeoutError for a
grant that does not come, ValueError for what is asked wrongly.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from elastane.process import environment
from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import (
    KEEPER_ANSWER_BYTES_MAX,
    KEEPER_ANSWER_S,
    KEEPER_SAY_S,
    KEEPER_SLOTS_S,
)
from elastane.snapshots import messages
from elastane.snapshots.channel import SnapshotChannel
from elastane.snapshots.messages import HeldWords, PersistRequest, Snapshot, WriteProgress
from elastane.snapshots.startup import KEEPER_VARIABLE, start_own_keeper
from elastane.snapshots.status_page import SnapshotStatusPage

# Between two looks at what one waits for: the first, and the longest.
_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.05
A = TypeVar("A")


class KeeperSilentError(TimeoutError):
    """The keeper has not answered within a caller's patience; its answer may come yet."""


@dataclass(frozen=True)
class HeldSnapshot:
    """A whole snapshot, to be read from its pieces by preadv and then released.

    `pieces` are (first, end, descriptor): the bytes from `first` to `end` of the image are the
    first of that descriptor. For `verified` see `HeldWords`; `words` has all the rest.
    """

    words: HeldWords
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def key(self) -> Key:
        """Return when it was."""
        return self.words.key

    @property
    def verified(self) -> bool:
        """Whether it has the digest that was taken when it became whole."""
        return self.words.verified


class _Stands(NamedTuple):
    """What the keeper said, which knows of this fence; the page had that number."""

    number: int
    fence: tuple[int, int]
    progress: WriteProgress


class Keeper:
    """A connection to the keeper of this node, or to one of this process's own.

    `id` is the keeper's: who sees the same shares its memory. `survives`: it outlives this process
    for as long as an agent does. `door` is where it takes copies from other nodes' keepers, as
    `SnapshotWelcome` has it. A question waits `patience_s` for its answer, once for each silence:
    then it raises KeeperSilentError, and so do further ones, at once, until the answer
    has come. After KEEPER_ANSWER_S the connection is given up.
    """

    def __init__(self, channel: SnapshotChannel, patience_s: float = KEEPER_ANSWER_S) -> None:
        self._channel, self._patience_s = channel, patience_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._lost = ""
        self._slots: tuple[int, ...] = ()
        self._owed = 0  # answers that were not waited for, or not for long enough
        self._silent_s: float | None = None  # since when the first of them is waited for
        self._spare: int | None = None  # the slot that came with the last `keep`'s
        self._page: SnapshotStatusPage | None = None
        self._stands: _Stands | None = None
        self.id = self.door = ""
        self.survives = False

    @classmethod
    def connect(
        cls, group: str = "", *, own: bool = False, patience_s: float = KEEPER_ANSWER_S
    ) -> Keeper:
        """Return a connection: to the agent's keeper where there is one, else to a new one.

        Workers that name the same `group` keep the pieces of one state, and see nothing of the
        snapshots of others: where checkpoints go is a good name. `own`: to a new keeper in any
        case, for a state that has no place among the job's snapshots. Connecting itself may
        take KEEPER_ANSWER_S.
        """
        path = "" if own else environment.get(KEEPER_VARIABLE)
        end = connected(path) if path else start_own_keeper(environment.snapshot())
        keeper = cls(SnapshotChannel(end, say_s=KEEPER_SAY_S), patience_s)
        try:
            hello = messages.Hello(messages.VERSION, group)
            with keeper._lock:
                answer, pages = keeper._exchange(hello, KEEPER_ANSWER_S)
            welcome = _as(answer, messages.SnapshotWelcome)
            if welcome.version != messages.VERSION:
                raise ConnectionError(
                    f"the keeper of snapshots speaks version {welcome.version}, this worker"
                    f" {messages.VERSION}: agent and worker are of two installations of elastane"
                )
            keeper._page = SnapshotStatusPage(*pages)
        except BaseException:
            keeper.close()
            raise
        keeper.id, keeper.survives = welcome.id, welcome.survives
        keeper.door = welcome.door
        return keeper

    def close(self) -> None:
        """Let go; what was kept, and asked to be written, is seen to by the keeper."""
        with self._lock:
            self._lost = self._lost or "it was closed"
            self._channel.close()
            if self._page is not None:
                self._page.close()

    def slots(self, count: int, slot_bytes: int) -> list[int]:
        """Return the descriptors of at least `count` slots of this size, which are the caller's.

        All of them, also those that were given before; more than `count` where a worker that is
        gone had more. What has another size goes, once no snapshot needs it any more.
        """
        request = messages.Slots(count, slot_bytes)
        with self._lock:
            # Memory may take long, so a keeper that does not answer at all is found before.
            self._asked_now(messages.WriteStatusQuery())
            answer, descriptors = self._exchange(request, KEEPER_SLOTS_S)
            self._slots, self._spare = _as(answer, messages.HasSlots).slots, None
        return descriptors

    def grant(self, timeout_s: float, together: str = "") -> int:
        """Return which slot to fill now, by its place in what `slots` returned.

        The same one again until it was kept. `together` names the last save that all nodes have
        kept: it stays. TimeoutError where all others are being written, read, or hold the newest.
        """
        slot = self._granted_with_the_last()
        if slot is not None:
            return self._slots.index(slot)
        until_s = time.monotonic() + timeout_s
        pause_s = _PAUSE_S
        while True:
            overdue = time.monotonic() >= until_s
            slot = self._ask(messages.SlotGrant(overdue, together), messages.Granted).slot
            if slot is not None:
                return self._slots.index(slot)
            if overdue:
                raise TimeoutError(f"no slot became free within {timeout_s:g} s")
            time.sleep(max(0.0, min(pause_s, until_s - time.monotonic())))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def layout(
        self, digest: str, files: Mapping[str, bytes], gasp: PersistRequest | None = None
    ) -> None:
        """Give what snapshots refer to by this digest, before the first that does.

        `gasp`: what is to be written of such a snapshot when nobody is left to ask for it; given
        again, it replaces the one before.
        """
        self._ask(messages.LayoutFiles(digest, dict(files), gasp), messages.Done)

    def keep(self, slot: int, snapshot: Snapshot, *, heard: bool = False) -> None:
        """Say what the granted slot now holds; returns once that is said, or `heard`.

        From then on the keeper has it, also if this process dies. What it answers is taken by the
        next call, which raises ValueError where it was refused: a round trip to a process that
        slept takes some tenths of a millisecond.
        """
        with self._lock:
            self._settle()
            self._say(messages.Keep(self._slots[slot], snapshot))
            self._spare = None
            self._owed += 1
            if heard:
                with contextlib.suppress(KeeperSilentError):
                    self._settle()

    def progress(self, fence: tuple[int, int] = (0, 0)) -> WriteProgress:
        """Return how the writing stands: what the keeper says of it in memory, or answers.

        `fence` is the round and attempt of the worker: what an older one writes is then waited for
        no longer than it has to be.
        """
        with self._lock:
            self._settle()
            known = self._stands
            # A channel that is not quiet has ended: then that is told, by asking.
            is_told = known is not None and fence <= known.fence and self._channel.is_quiet
            if known is None or not is_told:
                known = self._asked(fence)
            elif known.number != (number := self._number()):
                known = self._read(number, known.fence) or self._asked(known.fence)
            self._stands = known
            return known.progress

    def wait(self, key: Key, timeout_s: float) -> WriteProgress:
        """Return once `key`, or a newer one, is durable, or its writing has failed.

        `WriteProgress.failure_of(key)` tells which. TimeoutError after `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        pause_s = _PAUSE_S
        while True:
            with contextlib.suppress(KeeperSilentError):
                progress = self.progress()
                durable = progress.published is not None and progress.published >= key
                if durable or progress.failure_of(key) is not None:
                    return progress
            if time.monotonic() >= until_s:
                raise TimeoutError(f"step {key.step} was not written within {timeout_s:g} s")
            time.sleep(max(0.0, min(pause_s, until_s - time.monotonic())))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def held(self) -> list[HeldSnapshot]:
        """Return the whole snapshots, newest first; each stays as it is until it is released.

        The newest was checked against its digest, and is not there where it does not pass.
        """
        with self._lock:
            answer, descriptors = self._exchange(messages.Read(), KEEPER_ANSWER_S)
        found, rest = [], iter(descriptors)
        for words in _as(answer, messages.Given).held:
            pieces = [(piece.first, piece.end, next(rest)) for piece in words.pieces]
            found.append(HeldSnapshot(words, tuple(pieces)))
        return found

    def release(self, held: HeldSnapshot) -> None:
        """Let go of a snapshot; its descriptors are closed here."""
        for _, _, descriptor in held.pieces:
            os.close(descriptor)
        self._tell(messages.ReleaseSnapshot(held.key, held.words.nonce))

    def went_on(self, key: Key, place: str, why: str = "") -> None:
        """Say from where the workers of this node go on, and why, for the event log."""
        self._tell(messages.WentOn(key, place[:4096], why[:1000]))

    def _ask(self, request: messages.Request, kind: type[A]) -> A:
        with self._lock:
            return _as(self._asked_now(request), kind)

    def _asked_now(self, request: messages.Request) -> messages.Answer:
        """Ask, and return the answer; KeeperSilentError leaves it owed. The lock is held."""
        self._settle()
        self._say(request)
        self._owed += 1
        return self._owed_answer()

    def _tell(self, request: messages.Request) -> None:
        """Say what has no answer but that it is done; a keeper that is silent hears it later."""
        with self._lock:
            with contextlib.suppress(KeeperSilentError):
                self._settle()
            self._say(request)
            self._owed += 1
            with contextlib.suppress(KeeperSilentError):
                self._settle()

    def _exchange(
        self, request: messages.Request, timeout_s: float
    ) -> tuple[messages.Answer, list[int]]:
        """Ask, and wait for the answer and what comes beside it; the lock is held."""
        self._settle()
        self._say(request)
        return self._heard(timeout_s)

    def _number(self) -> int:
        assert self._page is not None, "it came with the welcome"
        return -1 if self._lost else self._page.number()

    def _asked(self, fence: tuple[int, int]) -> _Stands:
        """Ask how it stands; the lock is held."""
        number = self._number()  # Before the answer, which may be newer.
        answer = self._asked_now(messages.WriteStatusQuery(fence))
        return _Stands(number, fence, _as(answer, messages.Stands).progress)

    def _read(self, number: int, fence: tuple[int, int]) -> _Stands | None:
        """Return what the page says under this number; None where it has to be asked for."""
        words = self._page.words(number) if self._page is not None and not self._lost else None
        with contextlib.suppress(ValueError):
            match messages.answer_of(words or b""):
                case messages.Stands(progress):
                    return _Stands(number, fence, progress)
        return None

    def _granted_with_the_last(self) -> int | None:
        """Return the slot that came with the answer to the last `keep`, once."""
        with self._lock:
            self._settle()
            slot, self._spare = self._spare, None
            return slot

    def _settle(self) -> None:
        """Take the answers that were not waited for; the lock is held."""
        while self._owed:
            match self._owed_answer():
                case messages.Granted(slot=slot):
                    self._spare = slot
                case messages.Done() | messages.Stands():
                    pass
                case answer:
                    raise ConnectionError(
                        f"the keeper of snapshots answered {type(answer).__name__}"
                    )

    def _owed_answer(self) -> messages.Answer:
        """Return the next answer that is owed, where it comes in time; the lock is held."""
        began_s = time.monotonic()
        with self._guarded():
            is_there = self._channel.is_ready(0.0 if self._silent_s else self._patience_s)
            self._silent_s = None if is_there else self._silent_s or began_s
            if self._silent_s and time.monotonic() - self._silent_s >= KEEPER_ANSWER_S:
                raise ConnectionError(f"it did not answer within {KEEPER_ANSWER_S:g} s")
        if not is_there:
            raise KeeperSilentError(
                "the keeper of snapshots does not answer: it stands still, or its host swaps"
            )
        self._owed -= 1  # also where it is refused
        return self._heard(KEEPER_ANSWER_S)[0]

    def _say(self, request: messages.Request) -> None:
        assert os.getpid() == self._pid, "a forked process has no keeper: connect() in it"
        if self._lost:
            raise ConnectionError(f"the keeper of snapshots is not there any more: {self._lost}")
        with self._guarded():
            self._channel.send(messages.encode(request))

    def _heard(self, timeout_s: float) -> tuple[messages.Answer, list[int]]:
        """Return the next answer and what came beside it; the lock is held."""
        with self._guarded():
            frame = self._channel.receive(KEEPER_ANSWER_BYTES_MAX, timeout_s)
            answer = messages.answer_of(frame)
            descriptors = self._channel.receive_descriptors(_beside(answer))
        if isinstance(answer, messages.SnapshotRefused):
            raise (
                OSError(answer.errno, answer.reason) if answer.errno else ValueError(answer.reason)
            )
        return answer, descriptors

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the connection at whatever interrupts a question or its answer."""
        try:
            yield
        except (OSError, EOFError, ValueError) as error:
            self._lost = str(error) or "it ended"
            raise ConnectionError(f"the keeper of snapshots is lost: {self._lost}") from error
        except BaseException:
            self._lost = "it was interrupted while it was asked"
            raise
        finally:
            if self._lost:
                # The answer may come yet, and would be taken for that of the next request.
                self._channel.close()
                self._owed = 0


def _beside(answer: messages.Answer) -> int:
    match answer:
        case messages.SnapshotWelcome(version=messages.VERSION):
            return 1
        case messages.HasSlots(slots=slots):
            return len(slots)
        case messages.Given(held=held):
            return sum(len(words.pieces) for words in held)
    return 0


def _as(answer: messages.Answer, kind: type[A]) -> A:
    if not isinstance(answer, kind):
        raise ConnectionError(f"the keeper of snapshots answered {type(answer).__name__}")
    return answer


def connected(path: str) -> socket.socket:
    """Connect to a socket's path, of whatever length, while its agent is there."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        # A path of more than 107 bytes is none for a socket; one by way of a descriptor is short.
        folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        end.settimeout(KEEPER_ANSWER_S)
        end.connect(f"/proc/self/fd/{folder}/{Path(path).name}")
    except OSError as error:
        end.close()
        raise ConnectionError(
            f"no keeper of snapshots at {path}: {error.strerror or error}; its agent is gone?"
        ) from error
    finally:
        if folder >= 0:
            with contextlib.suppress(OSError):
                os.close(folder)
    return end
