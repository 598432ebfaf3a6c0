"""The meeting of the nodes that `elastane doctor --nodes` checks, at the rendezvous endpoint.

The process on the endpoint's host serves a `MeetingBoard` there, which keeps one page of each node
for each phase. A node joins with its first page. The board closes the set when all have come, or
when the waiting time is over. Then each node posts two more pages: whether its connections to the
others open, and their bandwidth. A node that is silent for the phase's limit is left out.

The coordinator of a job listens at the same endpoint, so this also tries that. The board answers
any host without a secret: it has names, addresses and versions, for as long as the check takes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from elastane.doctor.facts import connection_outcome, resolved
from elastane.doctor.network_rules import (
    CONNECTED,
    FULL,
    LOST,
    REFUSED,
    STRANGER,
    TIMEOUT,
    MeetingFacts,
    NodePage,
    Reach,
    Speed,
    is_loopback,
    pairs_of_round,
    rounds_of,
)
from elastane.doctor.probes import (
    ANSWER_LIMIT_S,
    CONNECT_LIMIT_S,
    TRANSFER_S,
    ProbeServer,
    measure_reach,
    measure_speed,
)
from elastane.doctor.serving import ConnectionServer, receive_exactly
from elastane.process.endpoint import Endpoint, is_mine, listen
from elastane.protocol.unreadable import UNREADABLE

# Each pair of nodes makes its transfers in a round of its own: 63 rounds of a second.
NODES_MAX = 64
# A page of 64 nodes has 20 kB.
FRAME_BYTES_MAX = 4 << 20
KEY_BYTES = 8
# Facts, connections, transfers: a member has one page of each.
LAST_PHASE = 2
POLL_S = 0.1
# Connections to all others are made at once, and names are resolved meanwhile.
REACH_LIMIT_S = 60.0
# Longer than any phase: a node that has joined asks nothing while it measures.
SILENT_MAX_S = 900.0
_SIZE = struct.Struct("!I")


class PageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A node's request for the pages of `phase`. It posts its own `page` with the first one."""

    key: bytes
    phase: Annotated[int, msgspec.Meta(ge=0, le=LAST_PHASE)]
    page: NodePage | None = None


class PageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that `came`; their `keys`, `names` and `pages` once the phase is complete."""

    came: int
    keys: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    pages: tuple[NodePage | None, ...] | None = None
    is_full: bool = False


@dataclass
class _Member:
    pages: dict[int, NodePage] = field(default_factory=dict)
    has_read: int = 0


class MeetingBoard:
    """One page of each node for each phase; its methods may be called from any thread."""

    def __init__(self, wanted: int, wait_s: float, now_s: Callable[[], float]) -> None:
        self._wanted, self._now_s = wanted, now_s
        self._members: dict[bytes, _Member] = {}
        self._until_s = now_s() + wait_s  # the end of the phase that is not complete yet
        self._phase = 0
        self._reached_at = ""
        self._lock = threading.Condition()

    def answer(self, ask: PageRequest, reached_at: str) -> PageAnswer:
        """Take the page of a node, which reached this host at `reached_at`."""
        with self._lock:
            self._advance()
            if ask.key not in self._members and (self._phase or len(self._members) >= self._wanted):
                return PageAnswer(came=len(self._members), is_full=True)
            member = self._members.setdefault(ask.key, _Member())
            if ask.page is not None:
                member.pages.setdefault(ask.phase, ask.page)
            self._name_own(reached_at)
            self._advance()
            return self._answered(ask, member)

    def wait_read(self, phase: int, limit_s: float) -> None:
        """Wait until all nodes have read the pages of a phase, or the limit."""
        with self._lock:
            self._lock.wait_for(
                lambda: all(one.has_read >= phase for one in self._members.values()), limit_s
            )

    def _answered(self, ask: PageRequest, member: _Member) -> PageAnswer:
        if self._phase <= ask.phase:
            return PageAnswer(came=len(self._members))
        if ask.phase:
            member.has_read = max(member.has_read, ask.phase)
            self._lock.notify_all()
        pages = [one.pages.get(ask.phase) for one in self._members.values()]
        names = [one.pages[0].name for one in self._members.values()]
        keys = tuple(self._members)
        return PageAnswer(came=len(keys), keys=keys, names=tuple(names), pages=tuple(pages))

    def _advance(self) -> None:
        """Complete the phase when all have posted, or its time is over."""
        posted = sum(self._phase in one.pages for one in self._members.values())
        expected = len(self._members) if self._phase else self._wanted
        if posted < expected and (self._now_s() < self._until_s or not posted):
            return
        if self._phase == 0:
            self._members = {key: one for key, one in self._members.items() if 0 in one.pages}
        self._phase += 1
        self._until_s = self._now_s() + phase_limit_s(self._phase, len(self._members))

    def _name_own(self, reached_at: str) -> None:
        """Give this host's page the address at which another node reached it."""
        if not is_loopback(reached_at):
            self._reached_at = reached_at
        for one in self._members.values():
            page = one.pages.get(0)
            if self._reached_at and page is not None and is_loopback(page.address):
                one.pages[0] = msgspec.structs.replace(page, address=self._reached_at)


def phase_limit_s(phase: int, nodes: int) -> float:
    """Return for how long a phase waits for the slowest node."""
    return REACH_LIMIT_S if phase == 1 else rounds_of(nodes) * (ANSWER_LIMIT_S + 3 * TRANSFER_S)


class BoardServer:
    """Serves a board at a listening socket until closed."""

    def __init__(self, listener: socket.socket, board: MeetingBoard) -> None:
        self.board = board
        self._server = ConnectionServer([listener], self._serve)

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """Stop accepting."""
        self._server.close()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, *UNREADABLE):
            sock.settimeout(ANSWER_LIMIT_S)
            while True:
                ask = msgspec.json.decode(_receive(sock), type=PageRequest)
                _send(sock, self.board.answer(ask, _address_of(sock.getsockname())))
                sock.settimeout(SILENT_MAX_S)  # a node asks nothing while it measures


@dataclass(frozen=True, kw_only=True)
class MeetingRequest:
    """One node's request to meet the others; the ports of its page are not known yet."""

    endpoint: Endpoint
    wanted: int
    wait_s: float
    local_addr: str
    page: NodePage


def meet(request: MeetingRequest, tell: Callable[[str], None]) -> MeetingFacts:
    """Meet the other nodes and measure; `tell` gets a line on what is waited for."""
    found = resolved(request.endpoint.host)
    facts = MeetingFacts(
        endpoint=str(request.endpoint),
        wanted=request.wanted,
        waited_s=request.wait_s,
        resolved=found,
    )
    server = _board(request) if found and is_mine(found) else None
    key = os.urandom(KEY_BYTES)
    gloo = request.page.gloo.address
    probes = ProbeServer(key, ("", gloo) if gloo else ("",))
    probes.start()
    try:
        return _Visit(request, facts, probes).run(tell)
    finally:
        if server is not None:
            server.board.wait_read(LAST_PHASE, CONNECT_LIMIT_S)
            server.close()
        probes.close()


def _board(request: MeetingRequest) -> BoardServer | None:
    """Serve the board if no other process does."""
    listener = listen(request.endpoint.host, request.endpoint.port)
    if listener is None:
        return None
    server = BoardServer(listener, MeetingBoard(request.wanted, request.wait_s, time.monotonic))
    server.start()
    return server


class _Visit:
    """One node at the meeting."""

    def __init__(self, request: MeetingRequest, facts: MeetingFacts, probes: ProbeServer) -> None:
        self._request, self._facts, self._probes = request, facts, probes
        self._has_joined = False

    def run(self, tell: Callable[[str], None]) -> MeetingFacts:
        """Meet, measure, and return what all have posted."""
        sock = self._connected()
        if isinstance(sock, str):
            return msgspec.structs.replace(self._facts, error=sock)
        with sock:
            try:
                return self._measured(sock, tell)
            except (OSError, *UNREADABLE):
                error = LOST if self._has_joined else STRANGER
                return msgspec.structs.replace(self._facts, error=error)

    def _connected(self) -> socket.socket | str:
        """Return a connection to the board, or why there is none."""
        at, until_s = self._request.endpoint, time.monotonic() + self._request.wait_s
        while True:
            try:
                return socket.create_connection((at.host, at.port), CONNECT_LIMIT_S)
            except OSError as error:
                outcome = connection_outcome(error)
                if time.monotonic() >= until_s or outcome not in (REFUSED, TIMEOUT):
                    return outcome
            time.sleep(POLL_S)

    def _measured(self, sock: socket.socket, tell: Callable[[str], None]) -> MeetingFacts:
        request, key = self._request, self._probes.key
        port, *gloo_port = self._probes.ports
        page = msgspec.structs.replace(
            request.page,
            address=request.local_addr or _address_of(sock.getsockname()),
            probe_port=port,
            gloo=msgspec.structs.replace(request.page.gloo, port=gloo_port[0] if gloo_port else 0),
        )
        first = _posted(
            sock,
            PageRequest(key=key, phase=0, page=page),
            lambda came: self._wait(came, tell),
        )
        self._has_joined = True
        if first.is_full:
            return msgspec.structs.replace(self._facts, error=FULL)
        here = first.keys.index(key)
        pages = [one for one in first.pages or () if one is not None]
        reaches = self._reaches(pages, first.keys, here)
        page = msgspec.structs.replace(pages[here], reaches=tuple(reaches))
        second = _posted(
            sock,
            PageRequest(key=key, phase=1, page=page),
            lambda _: tell("nodes connect to each other"),
        )
        tell("each pair of nodes measures its bandwidth")
        speeds = self._speeds(second.pages or (), here)
        page = msgspec.structs.replace(page, speeds=tuple(speeds))
        last = _posted(
            sock,
            PageRequest(key=key, phase=LAST_PHASE, page=page),
            lambda _: tell("other pairs still measure"),
        )
        pages_of_all = last.pages or ()
        if not len(first.names) == len(first.keys) == len(pages_of_all):
            raise ValueError("an answer of another program")
        return msgspec.structs.replace(self._facts, names=first.names, pages=pages_of_all)

    def _wait(self, came: int, tell: Callable[[str], None]) -> None:
        """Note that the board answers, and tell what is waited for."""
        self._has_joined = True
        tell(f"{came} of {self._request.wanted} nodes are here")

    def _reaches(self, pages: Sequence[NodePage], keys: Sequence[bytes], here: int) -> list[Reach]:
        others = [number for number in range(len(pages)) if number != here]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return [*pool.map(lambda to: measure_reach(pages[to], keys[to], here, to), others)]

    def _speeds(self, pages: Sequence[NodePage | None], here: int) -> list[Speed]:
        """Make the transfers round by round; the lower number of each pair begins them."""
        found = []
        for number in range(rounds_of(len(pages))):
            other = pairs_of_round(len(pages), number).get(here)
            page = None if other is None else pages[min(here, other)]
            if other is None or page is None or not _reaches_to(page, max(here, other)):
                continue
            to = pages[other]
            if here > other:
                self._probes.wait_given(other, ANSWER_LIMIT_S)
            elif to is not None and (speed := measure_speed(to, here, other)) is not None:
                found.append(speed)
        return found


def _reaches_to(page: NodePage, to: int) -> bool:
    return any(reach.to == to and reach.outcome == CONNECTED for reach in page.reaches)


def _posted(sock: socket.socket, ask: PageRequest, tell: Callable[[int], None]) -> PageAnswer:
    """Post a page and wait until the phase is complete; the board ends each phase in time."""
    sock.settimeout(ANSWER_LIMIT_S)
    while True:
        _send(sock, ask)
        answer = msgspec.json.decode(_receive(sock), type=PageAnswer)
        if answer.is_full or answer.pages is not None:
            return answer
        tell(answer.came)
        ask = msgspec.structs.replace(ask, page=None)
        time.sleep(POLL_S)


def _send(sock: socket.socket, message: PageRequest | PageAnswer) -> None:
    raw = msgspec.json.encode(message)
    sock.sendall(_SIZE.pack(len(raw)) + raw)


def _receive(sock: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(receive_exactly(sock, _SIZE.size))
    if size > FRAME_BYTES_MAX:
        raise OSError(f"a frame of {size} bytes")
    return receive_exactly(sock, size)


def _address_of(name: tuple[object, ...]) -> str:
    """Return the address of a socket's name; an IPv4 one of a socket for both as IPv4."""
    return str(name[0]).removeprefix("::ffff:")
