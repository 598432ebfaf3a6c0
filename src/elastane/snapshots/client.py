"""A worker's side of the snapshot server: short requests over a socket, memory by descriptors.

Calls block, but none waits for storage. Several threads may call. A forked child must connect for
itself. How it fails: ConnectionError if the server is gone (`connect` again; its snapshots are
lost), SnapshotServerSilentError if it does not answer for now (ask again later), OSError ENOMEM if
there is no memory for slots, TimeoutError if no slot becomes free, ValueError for a bad request.
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
from elastane.snapshots import messages
from elastane.snapshots.channel import SnapshotChannel, SnapshotStatusPage
from elastane.snapshots.limits import ANSWER_BYTES_MAX, ANSWER_S, SEND_S, SLOTS_S
from elastane.snapshots.messages import PersistRequest, Snapshot, SnapshotDescription, WriteProgress
from elastane.snapshots.startup import SERVER_VARIABLE, start_own_server

# The first and the longest pause between two polls.
_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.05
A = TypeVar("A")


class SnapshotServerSilentError(TimeoutError):
    """The server did not answer within the caller's timeout; its answer may still arrive."""


@dataclass(frozen=True)
class HeldSnapshot:
    """A whole snapshot, to be read from its pieces with preadv and then released.

    `pieces` are (first, end, descriptor): bytes `first` to `end` of the serialized layout are the
    first bytes of that descriptor. `words` describes the snapshot; see `SnapshotDescription`.
    """

    words: SnapshotDescription
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def key(self) -> Key:
        """Return the training position that the snapshot was made at."""
        return self.words.key

    @property
    def verified(self) -> bool:
        """Whether its digests were compared and match; see `SnapshotDescription`."""
        return self.words.verified


class _KnownStatus(NamedTuple):
    """The last status of the server: the page's number, and the fence the server had seen."""

    number: int
    fence: tuple[int, int]
    progress: WriteProgress


class SnapshotClient:
    """A connection to the snapshot server of this node, or to one that this process started.

    `id` names the server: workers with the same id share its memory. `survives` is true if the
    server outlives this process for as long as an agent does. `replica_address` is where it accepts
    replicas from other nodes, as in `SnapshotWelcome`. A request waits `timeout_s` for its
    answer and then raises SnapshotServerSilentError. Until that answer has arrived, further
    requests raise it at once. After ANSWER_S of silence the connection is closed.
    """

    def __init__(
        self,
        channel: SnapshotChannel,
        welcome: messages.SnapshotWelcome,
        page: SnapshotStatusPage,
        timeout_s: float = ANSWER_S,
    ) -> None:
        self.id = welcome.id
        self.survives = welcome.survives
        self.replica_address = welcome.replica_address
        self._channel = channel
        self._page = page
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._lost = ""
        self._slots: tuple[int, ...] = ()
        self._owed = 0  # Answers that were not waited for, or not for long enough.
        self._silent_s: float | None = None  # When the wait for the first of them began.
        self._spare: int | None = None  # The slot that came with the answer to the last `keep`.
        self._status: _KnownStatus | None = None

    @classmethod
    def connect(
        cls, group: str = "", *, own: bool = False, timeout_s: float = ANSWER_S
    ) -> SnapshotClient:
        """Connect to the agent's snapshot server if there is one, else start a server.

        Workers with the same `group` keep the pieces of one state, and see no snapshots of other
        groups; the checkpoint folder is a good name. With `own`, always start a server: for a state
        that must not mix with the job's snapshots. Connecting may take ANSWER_S.
        """
        path = "" if own else environment.get(SERVER_VARIABLE)
        end = connected(path) if path else start_own_server(environment.snapshot())
        channel = SnapshotChannel(end, say_s=SEND_S)
        try:
            welcome, page = _greet(channel, group)
        except BaseException:
            channel.close()
            raise
        return cls(channel, welcome, page, timeout_s)

    def close(self) -> None:
        """Close the connection; the server still writes what it was asked to write."""
        with self._lock:
            self._lost = self._lost or "it was closed"
            self._channel.close()
            self._page.close()

    def slots(self, count: int, slot_bytes: int) -> list[int]:
        """Return descriptors of at least `count` slots of this size; the caller owns them.

        The list holds all of this worker's slots, including earlier ones. It is longer than `count`
        if the worker inherits more from a dead one. Slots of another size are freed once no
        snapshot needs them.
        """
        request = messages.Slots(count, slot_bytes)
        with self._lock:
            # Allocating may take long, so first detect a server that does not answer at all.
            self._request(messages.WriteStatusQuery())
            answer, descriptors = self._exchange(request, SLOTS_S)
            self._slots = _as(answer, messages.SlotNumbers).slots
            self._spare = None
        return descriptors

    def grant(self, timeout_s: float, together: str = "") -> int:
        """Return the slot to fill now, as an index into the result of `slots`.

        It returns the same slot until that was kept. `together` is the nonce of the last save that
        all nodes kept; the server keeps that one. Raises TimeoutError if all other slots are being
        written or read, or hold the newest snapshot.
        """
        slot = self._take_spare()
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
        self, digest: str, files: Mapping[str, bytes], flush: PersistRequest | None = None
    ) -> None:
        """Give the server the files that snapshots name by this digest, before the first of them.

        `flush` says what the final flush writes of such a snapshot; a later call replaces it.
        """
        self._ask(messages.LayoutFiles(digest, dict(files), flush), messages.Done)

    def keep(self, slot: int, snapshot: Snapshot, *, heard: bool = False) -> None:
        """Tell the server what the granted slot holds; returns once that is sent, or acknowledged.

        With `heard`, wait for the acknowledgement. From then on the server owns the piece, even if
        this process dies. Otherwise the next call receives the answer, and raises ValueError if the
        piece was refused: a round trip to a sleeping process takes some tenths of a millisecond.
        """
        with self._lock:
            self._receive_owed()
            self._send(messages.Keep(self._slots[slot], snapshot))
            self._spare = None
            self._owed += 1
            if heard:
                with contextlib.suppress(SnapshotServerSilentError):
                    self._receive_owed()

    def progress(self, fence: tuple[int, int] = (0, 0)) -> WriteProgress:
        """Return the status of writing, from the server's status page or by asking.

        `fence` is the round and attempt of this worker. The server then waits no longer than it
        must for writes of an older one.
        """
        with self._lock:
            self._receive_owed()
            known = self._status
            # A channel that is not quiet has ended, and asking raises that error.
            is_current = known is not None and fence <= known.fence and self._channel.is_quiet
            if known is None or not is_current:
                known = self._ask_status(fence)
            elif known.number != (number := self._number()):
                known = self._read_page(number, known.fence) or self._ask_status(known.fence)
            self._status = known
            return known.progress

    def wait(self, key: Key, timeout_s: float) -> WriteProgress:
        """Wait until `key` or a newer checkpoint is durable, or its write has failed.

        `WriteProgress.failure_of(key)` says which. After a failure it waits for a newer one that is
        written in its place. Raises TimeoutError after `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        pause_s = _PAUSE_S
        while True:
            with contextlib.suppress(SnapshotServerSilentError):
                progress = self.progress()
                durable = progress.published is not None and progress.published >= key
                has_failed = progress.failure_of(key) is not None
                if durable or (has_failed and not progress.may_follow(key)):
                    return progress
            if time.monotonic() >= until_s:
                raise TimeoutError(f"step {key.step} was not written within {timeout_s:g} s")
            time.sleep(max(0.0, min(pause_s, until_s - time.monotonic())))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def held(self) -> list[HeldSnapshot]:
        """Return the whole snapshots, newest first; each is unchanged until it is released.

        The newest was compared with its digest, and is left out if they differ.
        """
        with self._lock:
            answer, descriptors = self._exchange(messages.Read(), ANSWER_S)
        found, rest = [], iter(descriptors)
        for words in _as(answer, messages.HeldSnapshots).held:
            pieces = [(piece.first, piece.end, next(rest)) for piece in words.pieces]
            found.append(HeldSnapshot(words, tuple(pieces)))
        return found

    def release(self, held: HeldSnapshot) -> None:
        """Release a snapshot and close its descriptors."""
        for _, _, descriptor in held.pieces:
            os.close(descriptor)
        self._notify(messages.ReleaseSnapshot(held.key, held.words.nonce))

    def report_restored(self, key: Key, place: str, why: str = "") -> None:
        """Report to the event log from where this node's workers were restored, and why."""
        self._notify(messages.RestoreReport(key, place[:4096], why[:1000]))

    def _ask(self, request: messages.Request, kind: type[A]) -> A:
        with self._lock:
            return _as(self._request(request), kind)

    def _request(self, request: messages.Request) -> messages.Answer:
        """Send a request and return its answer; the caller holds the lock.

        After SnapshotServerSilentError the answer is still owed.
        """
        self._receive_owed()
        self._send(request)
        self._owed += 1
        return self._owed_answer()

    def _notify(self, request: messages.Request) -> None:
        """Send a request whose answer carries nothing; a silent server receives it later."""
        with self._lock:
            with contextlib.suppress(SnapshotServerSilentError):
                self._receive_owed()
            self._send(request)
            self._owed += 1
            with contextlib.suppress(SnapshotServerSilentError):
                self._receive_owed()

    def _exchange(
        self, request: messages.Request, timeout_s: float
    ) -> tuple[messages.Answer, list[int]]:
        """Send a request, wait for its answer and descriptors; the caller holds the lock."""
        self._receive_owed()
        self._send(request)
        return self._receive(timeout_s)

    def _number(self) -> int:
        return -1 if self._lost else self._page.number()

    def _ask_status(self, fence: tuple[int, int]) -> _KnownStatus:
        """Ask for the status; the caller holds the lock."""
        number = self._number()  # Read first, since the answer may be newer.
        answer = self._request(messages.WriteStatusQuery(fence))
        return _KnownStatus(number, fence, _as(answer, messages.WriteStatus).progress)

    def _read_page(self, number: int, fence: tuple[int, int]) -> _KnownStatus | None:
        """Return the status on the page under this number, or None if it must be asked for."""
        words = self._page.words(number) if not self._lost else None
        with contextlib.suppress(ValueError):
            match messages.answer_of(words or b""):
                case messages.WriteStatus(progress):
                    return _KnownStatus(number, fence, progress)
        return None

    def _take_spare(self) -> int | None:
        """Return, once, the slot that came with the answer to the last `keep`."""
        with self._lock:
            self._receive_owed()
            slot, self._spare = self._spare, None
            return slot

    def _receive_owed(self) -> None:
        """Receive the answers that were not waited for; the caller holds the lock."""
        while self._owed:
            match self._owed_answer():
                case messages.Granted(slot=slot):
                    self._spare = slot
                case messages.Done() | messages.WriteStatus():
                    pass
                case answer:
                    raise ConnectionError(f"the snapshot server answered {type(answer).__name__}")

    def _owed_answer(self) -> messages.Answer:
        """Return the next owed answer, if it arrives in time; the caller holds the lock."""
        began_s = time.monotonic()
        with self._guarded():
            is_there = self._channel.is_ready(0.0 if self._silent_s else self._timeout_s)
            self._silent_s = None if is_there else self._silent_s or began_s
            if self._silent_s and time.monotonic() - self._silent_s >= ANSWER_S:
                raise ConnectionError(f"it did not answer within {ANSWER_S:g} s")
        if not is_there:
            raise SnapshotServerSilentError(
                "the snapshot server does not answer: it is stopped, or its host is swapping"
            )
        self._owed -= 1  # Also if the request is refused.
        return self._receive(ANSWER_S)[0]

    def _send(self, request: messages.Request) -> None:
        assert os.getpid() == self._pid, "connections are not inherited by fork: connect() again"
        if self._lost:
            raise ConnectionError(f"the snapshot server is gone: {self._lost}")
        with self._guarded():
            self._channel.send(messages.encode(request))

    def _receive(self, timeout_s: float) -> tuple[messages.Answer, list[int]]:
        """Return the next answer and its descriptors; the caller holds the lock."""
        with self._guarded():
            answer, descriptors = _received(self._channel, timeout_s)
        if isinstance(answer, messages.SnapshotRefused):
            raise _refusal(answer)
        return answer, descriptors

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Close the connection if a request or its answer is interrupted."""
        try:
            yield
        except (OSError, EOFError, ValueError) as error:
            self._lost = str(error) or "it ended"
            raise _lost(error) from error
        except BaseException:
            self._lost = "it was interrupted while it was asked"
            raise
        finally:
            if self._lost:
                # A late answer would be taken for that of the next request.
                self._channel.close()
                self._owed = 0


def _greet(
    channel: SnapshotChannel, group: str
) -> tuple[messages.SnapshotWelcome, SnapshotStatusPage]:
    """Exchange the first messages of a connection; both sides refuse another version."""
    try:
        channel.send(messages.encode(messages.Hello(messages.VERSION, group)))
        answer, pages = _received(channel, ANSWER_S)
    except (OSError, EOFError, ValueError) as error:
        raise _lost(error) from error
    if isinstance(answer, messages.SnapshotRefused):
        raise _refusal(answer)
    welcome = _as(answer, messages.SnapshotWelcome)
    if welcome.version != messages.VERSION:
        raise ConnectionError(
            f"the snapshot server speaks version {welcome.version}, this worker"
            f" {messages.VERSION}: agent and worker are of two installations of elastane"
        )
    return welcome, SnapshotStatusPage(*pages)


def _received(channel: SnapshotChannel, timeout_s: float) -> tuple[messages.Answer, list[int]]:
    answer = messages.answer_of(channel.receive(ANSWER_BYTES_MAX, timeout_s))
    return answer, channel.receive_descriptors(_descriptor_count(answer))


def _refusal(answer: messages.SnapshotRefused) -> OSError | ValueError:
    return OSError(answer.errno, answer.reason) if answer.errno else ValueError(answer.reason)


def _lost(error: BaseException) -> ConnectionError:
    return ConnectionError(
        f"the connection to the snapshot server is lost: {str(error) or 'it ended'}"
    )


def _descriptor_count(answer: messages.Answer) -> int:
    match answer:
        case messages.SnapshotWelcome(version=messages.VERSION):
            return 1
        case messages.SlotNumbers(slots=slots):
            return len(slots)
        case messages.HeldSnapshots(held=held):
            return sum(len(words.pieces) for words in held)
    return 0


def _as(answer: messages.Answer, kind: type[A]) -> A:
    if not isinstance(answer, kind):
        raise ConnectionError(f"the snapshot server answered {type(answer).__name__}")
    return answer


def connected(path: str) -> socket.socket:
    """Connect to a Unix socket by its path, of any length."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        # sun_path holds 107 bytes. The path by way of a descriptor is short.
        folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        end.settimeout(ANSWER_S)
        end.connect(f"/proc/self/fd/{folder}/{Path(path).name}")
    except OSError as error:
        end.close()
        raise ConnectionError(
            f"no snapshot server at {path}: {error.strerror or error}; has its agent ended?"
        ) from error
    finally:
        if folder >= 0:
            with contextlib.suppress(OSError):
                os.close(folder)
    return end
