"""The worker's end of its control socket: the agent says which world it is in, and when that ends.

Owns the descriptor that the worker inherited and a thread that reads it. The thread ends the
current world as soon as the agent says so, also while the main thread waits in a collective. The
main thread then asks for its next place. If the agent stops a worker that waits for a place, the
thread ends the process, since a framework may swallow SIGTERM. A forked child, such as a
DataLoader's, has no control socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable

from elastane.errors import ElastaneError, ExitCode, JobError
from elastane.process import control_socket, frames
from elastane.process.control_socket import (
    AssignedPlace,
    CanRecoverInPlace,
    CheckpointWritten,
    Differed,
    Doing,
    End,
    FromWorker,
    InterruptWorker,
    PeerLost,
    Spare,
    SpareReady,
    StatusQuery,
    Wait,
    WorkerFinished,
)
from elastane.protocol.model import Fence, Joining, Sharding
from elastane.worker import running_saves

# The agent sends the first message before it starts the worker.
_FIRST_S = 60.0
# Ending a world, the longest that the thread does, takes milliseconds.
_JOIN_S = 5.0
_lines: list[ControlSocket] = []


class ControlSocket:
    """The control socket of one worker; `begin` starts the thread that reads it after `first`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._news = threading.Condition()
        self._place: AssignedPlace | None = None
        self._interrupted = ""
        self._waits = self._ends = False
        # Whether either side has closed it; whether this side has.
        self._closed = self._has_left = False
        self._thread: threading.Thread | None = None

    @classmethod
    def inherited(cls) -> ControlSocket | None:
        """Return the control socket of this worker; None if no agent gave it one.

        Raises JobError if another launcher started several workers: each would train alone.
        """
        number = os.environ.get(control_socket.CONTROL_FD_VARIABLE, "")
        if not number.isdecimal():
            _refuse_launcher(os.environ.get("WORLD_SIZE", ""))
            return None
        try:
            sock = socket.socket(fileno=int(number))
        except OSError:
            return None
        os.set_inheritable(sock.fileno(), False)
        line = cls(sock)
        _lines.append(line)
        return line

    def first(self) -> AssignedPlace | Wait:
        """Return the first place of this worker, or `Wait` if it has none yet."""
        self._socket.settimeout(_FIRST_S)
        try:
            word = control_socket.to_worker(self._socket.recv(control_socket.PACKET_BYTES_MAX))
            if isinstance(word, Spare):
                self._wait_as_spare()
                word = control_socket.to_worker(self._socket.recv(control_socket.PACKET_BYTES_MAX))
        except (OSError, ValueError) as error:
            raise _no_agent(str(error) or "it sent nothing") from error
        finally:
            self._socket.settimeout(None)
        if not isinstance(word, AssignedPlace | Wait):
            raise _no_agent("it ended a world before the first one")
        return word

    def waits_first(self) -> Wait | None:
        """Return the first message if this worker has no place; leave it for `first`."""
        self._socket.settimeout(_FIRST_S)
        try:
            packet = self._socket.recv(control_socket.PACKET_BYTES_MAX, socket.MSG_PEEK)
            word = control_socket.to_worker(packet)
        except (OSError, ValueError) as error:
            raise _no_agent(str(error) or "it sent nothing") from error
        finally:
            self._socket.settimeout(None)
        return word if isinstance(word, Wait) else None

    def begin(self, end_world: Callable[[], None], doing: Callable[[], Doing]) -> None:
        """Start the reading thread, which calls `end_world` when the current world ends.

        The thread also calls `doing`, when the agent asks what this worker does.
        """
        self._thread = threading.Thread(
            target=self._read, args=(end_world, doing), name="elastane-control", daemon=True
        )
        self._thread.start()

    @property
    def world_has_ended(self) -> bool:
        """Whether the current world has ended, or this worker has a place in another."""
        return bool(self._interrupted) or self._place is not None or self._closed

    def next_place(self) -> AssignedPlace:
        """Wait, without a limit, for a place in another world."""
        with self._news:
            self._waits = True
            self._end_if_waiting()
            self._news.wait_for(lambda: self._place is not None or self._closed)
            self._waits = False
            place = self._place
            self._place = None
            self._interrupted = ""
        if place is None:
            raise _no_agent("it closed the control socket")
        return place

    def able(self, sharding: Sharding | None, *, joining: Joining = Joining.ANYTIME) -> None:
        """Report that this worker can recover in place, and when others can join its world.

        The last report holds.
        """
        self._send(CanRecoverInPlace(sharding, joining))

    def saved(self, where: str, *, resumed: bool) -> None:
        """Report a checkpoint, once it is whole on storage; one worker of the world does.

        If workers are missing and no other can join in place, all may restart from it at once.
        `resumed`: this process has read one itself.
        """
        self._send(CheckpointWritten(where[-1000:], resumed))

    def finished(self, *, program_ended: bool = False) -> None:
        """Report that all steps are done; `program_ended`: the programs of all workers are too."""
        self._send(WorkerFinished(program_ended))

    def lost(self, fence: Fence, error: Exception | None) -> None:
        """Report that a peer was lost in the world of `fence`, as `error` says."""
        said = error.line if isinstance(error, ElastaneError) else str(error)
        self._send(PeerLost(fence, f"lost a peer: {said}"[:1000]))

    def differed(self, rank: int, steps: int, reason: str) -> None:
        """Report that this worker's replica differed from the majority after `steps` steps."""
        self._send(Differed(rank, steps, reason[:1000]))

    def close(self) -> None:
        """Close the socket and join the thread, so that it is not killed in the middle of torch."""
        self._closed = self._has_left = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def forget(self) -> None:
        """Close the copy that a forked child has: the socket is the parent's."""
        self._closed = True
        self._socket.close()

    def _wait_as_spare(self) -> None:
        """As a warm spare, wait without a limit, then become the worker that the agent names."""
        self._send(SpareReady())
        self._socket.settimeout(None)
        begin, stdout, stderr = control_socket.receive_begin(self._socket)
        self._socket.settimeout(_FIRST_S)
        for stream, fd, taken in ((sys.stdout, 1, stdout), (sys.stderr, 2, stderr)):
            if stream is not None:
                stream.flush()
            os.dup2(taken, fd)
            os.close(taken)
        os.environ.update(begin.env)

    def _send(self, message: FromWorker) -> None:
        with contextlib.suppress(OSError):  # Without its agent this worker is killed anyway.
            self._socket.send(control_socket.encode(message))

    def _read(self, end_world: Callable[[], None], doing: Callable[[], Doing]) -> None:
        while not self._closed:
            try:
                packet = self._socket.recv(control_socket.PACKET_BYTES_MAX)
                word = control_socket.to_worker(packet) if packet else None
            except (OSError, ValueError):
                word = None
            if isinstance(word, StatusQuery):
                self._send(doing())
                continue
            with self._news:
                if isinstance(word, AssignedPlace):
                    self._place = word
                elif isinstance(word, InterruptWorker):
                    self._place = None
                    self._interrupted = word.reason or "interrupted"
                elif isinstance(word, End):
                    self._ends = True
                    self._end_if_waiting()
                    continue
                elif word is None:
                    self._closed = True
                self._news.notify_all()
            if not self._has_left:
                end_world()

    def _end_if_waiting(self) -> None:
        """End this process if it waits for a place and is to be stopped; the lock is held.

        Its program may be saving meanwhile.
        """
        if self._waits and self._ends:
            running_saves.of_process.finish()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(ExitCode.DRAINED)


def doing(rank: int, waits: bool, traffic: int | None) -> Doing:
    """Return the answer to `StatusQuery`, with where the main thread is; from any thread."""
    found = frames.main_frames()
    return Doing(
        waits=waits,
        held=frames.is_debugged(found),
        rank=rank,
        where=frames.described(found),
        traffic=traffic,
    )


def _no_agent(why: str) -> JobError:
    return JobError(
        f"the agent of this worker does not answer: {why}",
        expected="an agent of the same version of elastane",
        next_step="start the script with elastane run of the environment that it imports",
        slug="no-agent",
    )


def _refuse_launcher(world_size: str) -> None:
    if world_size.isdecimal() and int(world_size) > 1:
        raise JobError(
            f"elastane.init() in a worker of another launcher: WORLD_SIZE={world_size}",
            where=f"RANK={os.environ.get('RANK', '')}",
            expected="a worker of elastane run, whose agent assigns it to worlds, or no launcher",
            next_step="start the script by elastane run, with the same options",
            slug="job-launcher",
        )


def _forget() -> None:
    while _lines:
        _lines.pop().forget()


os.register_at_fork(after_in_child=_forget)
