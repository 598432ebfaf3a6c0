"""The findings about a set of nodes that met: can each reach each other one, and how fast.

Pure: `meeting` and `probes` measure, and this judges what all nodes posted. Each node has the same
pages, so each prints the same findings. A fault keeps a job of these nodes from starting or from
training; a warning makes it slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from itertools import groupby
from statistics import median
from typing import Annotated

import msgspec

from elastane.doctor.rules import Finding, Level
from elastane.protocol.model import Versions
from elastane.protocol.words import counted

# What a node could do at an address of another one; any other text is the error of the system.
CONNECTED, REFUSED, TIMEOUT, STRANGER = "connected", "refused", "timeout", "stranger"
# The meeting has all its nodes, or its host was lost after this node had joined.
FULL, LOST = "full", "lost"
# Clocks that are kept by NTP differ by milliseconds; the events of a job follow each other by less.
CLOCK_WARNING_S = 0.5
# A link of 1 Gbit/s carries 119 MB/s of data.
BANDWIDTH_WARNING = 100e6
# A pair is slow beside the others of its set below and above these multiples of their median.
BANDWIDTH_SHARE, LATENCY_FACTOR = 0.5, 5.0
LATENCY_WARNING_S = 0.002
LISTED_MAX = 8
# Of a host, as DNS has it.
NAME_MAX = 255
# Other hosts write it, and a connection to a larger number raises no OSError.
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class GlooPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where gloo would listen in a worker of a node. `error`: why there is no such place.

    `chosen_by`: a variable with its value, or the host's name.
    """

    chosen_by: str
    address: str = ""
    port: Port = 0
    error: str = ""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a node's connections to the node of number `to`.

    `offset_s`: how far the other clock is ahead. `name`: what the other host's name resolves to.
    """

    to: int
    outcome: str
    gloo: str = CONNECTED
    latency_s: float = 0.0
    offset_s: float = 0.0
    name: tuple[str, ...] = ()


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second to the node of number `to`, and from it."""

    to: int
    sent: float
    received: float


class NodePage(msgspec.Struct, frozen=True, kw_only=True):
    """The facts and results that one node posts for the others.

    `address`: where others reach it; `ports`: those that its kernel selects for listeners.
    `endpoint`: the addresses that the endpoint's host has there.
    """

    name: Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
    versions: Versions
    address: str
    probe_port: Port
    gloo: GlooPlace
    interfaces: tuple[tuple[str, tuple[str, ...]], ...]
    ports: tuple[int, int]
    endpoint: tuple[str, ...]
    reaches: tuple[Reach, ...] = ()
    speeds: tuple[Speed, ...] = ()


class MeetingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A meeting as one node saw it. `error`: why this node could not take part.

    `resolved`: the addresses of the endpoint's host here. `pages`: those of the nodes that met,
    by their numbers; None: that node ended before its results were there.
    """

    endpoint: str
    wanted: int
    waited_s: float
    resolved: tuple[str, ...] = ()
    error: str = ""
    names: tuple[str, ...] = ()
    pages: tuple[NodePage | None, ...] = ()


def judge_nodes(facts: MeetingFacts) -> list[Finding]:
    """Return all findings about the nodes that met."""
    if facts.error:
        return [_not_met(facts)]
    pages = {
        number: _within(page, len(facts.pages))
        for number, page in enumerate(facts.pages)
        if page is not None
    }
    if len(pages) < 2:
        return [_meeting(facts)]
    named = _NamedPages(facts.names, pages)
    return [_meeting(facts), *(one for rule in _RULES for one in rule(named))]


def is_loopback(address: str) -> bool:
    """Return whether no other host can mean this one by the address."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def pairs_of_round(count: int, number: int) -> dict[int, int]:
    """Return the partner of each node in one of `rounds_of(count)` rounds; each pair meets once.

    This is the circle method of tournaments: the first node stays, and the others move on by one.
    """
    seats = count + count % 2
    ring = [0, *((number + at) % (seats - 1) + 1 for at in range(seats - 1))]
    found = {}
    for at in range(seats // 2):
        one, other = ring[at], ring[seats - 1 - at]
        if one < count and other < count:
            found[one], found[other] = other, one
    return found


def rounds_of(count: int) -> int:
    """Return how many rounds there are for this many nodes."""
    return count + count % 2 - 1


def _within(page: NodePage, count: int) -> NodePage:
    """Return a page whose results are of nodes that there are: other hosts write it."""
    return msgspec.structs.replace(
        page,
        reaches=tuple(one for one in page.reaches if 0 <= one.to < count),
        speeds=tuple(one for one in page.speeds if 0 <= one.to < count),
    )


class _NamedPages:
    """The pages by number, and the names of their nodes; equal names get the number too."""

    def __init__(self, names: Sequence[str], pages: dict[int, NodePage]) -> None:
        self.pages = pages
        self.all = [
            name if names.count(name) == 1 else f"{name} (number {number})"
            for number, name in enumerate(names)
        ]

    def __getitem__(self, number: int) -> str:
        return self.all[number]

    def list(self, numbers: Sequence[int]) -> str:
        """Return the names of some nodes, the first ones of many."""
        shown = [self.all[number] for number in numbers[:LISTED_MAX]]
        more = len(numbers) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _not_met(facts: MeetingFacts) -> Finding:
    host, _, port = facts.endpoint.rpartition(":")
    where = f"{facts.endpoint} is {', '.join(facts.resolved)}" if facts.resolved else facts.endpoint
    whys = {
        REFUSED: (
            "no process listens there: elastane doctor does not run on that host, or the address"
            " is another host's",
            "start elastane doctor --nodes on the endpoint's host too, and within --timeout",
        ),
        TIMEOUT: (
            "a firewall drops what is sent there, the host is off, or the address is another"
            " network's",
            f"open the port for this node; try nc -vz {host.strip('[]')} {port}",
        ),
        STRANGER: (
            "another program answers there, such as the coordinator of a job that runs",
            "name a free port of that host in --rdzv-endpoint, the same on all nodes",
        ),
        FULL: (
            "all nodes of the meeting are there without this one: it was started again alone, or"
            " --nodes is another number there",
            "start it again on all nodes, with the same --nodes",
        ),
        LOST: (
            "the process on the endpoint's host ended, or the connection to it broke",
            "run it again on all nodes; read what it printed on the endpoint's host",
        ),
        "": (
            "this node cannot find the host at which the nodes meet",
            "a name that DNS or /etc/hosts of every node knows, or an address",
        ),
    }
    why, next_step = whys.get(facts.error if facts.resolved else "", whys[TIMEOUT])
    said = {
        REFUSED: "connections are refused",
        TIMEOUT: "no answer",
        STRANGER: "another program answers",
    }
    said |= {FULL: "has all its nodes", LOST: "was lost after this node had joined"}
    text = f"{where}: {said.get(facts.error, facts.error)}"
    if facts.error in (REFUSED, TIMEOUT):  # the others are known at once
        text += f" for {facts.waited_s:.0f} s"
    return Finding("meeting", Level.FAULT, text, why, next_step)


def _meeting(facts: MeetingFacts) -> Finding:
    came = len(facts.names)
    text = f"{came} of {facts.wanted} nodes met at {facts.endpoint}"
    if came == facts.wanted and None not in facts.pages:
        return Finding("meeting", Level.GOOD, text)
    if None in facts.pages:
        ended = [name for name, page in zip(facts.names, facts.pages, strict=True) if page is None]
        return Finding(
            "meeting",
            Level.FAULT,
            f"{text}, and {', '.join(ended[:LISTED_MAX])} did not finish",
            "the process ended there, or lost its connection to the endpoint",
            "run it again on all nodes; read what it printed there",
        )
    text += f" within {facts.waited_s:.0f} s: {', '.join(facts.names[:LISTED_MAX])}"
    if came == 1 and all(is_loopback(address) for address in facts.resolved):
        return Finding(
            "meeting",
            Level.FAULT,
            f"{text}; the endpoint is {', '.join(facts.resolved)} here",
            "a loopback address is another host on each node, so each one waits for itself",
            "give the endpoint's host its network address in /etc/hosts of all nodes, or name the"
            " address in --rdzv-endpoint",
        )
    return Finding(
        "meeting",
        Level.FAULT,
        text,
        "the others were not started in time, cannot reach the endpoint, or were given another one",
        "read what elastane doctor prints on the missing nodes; --timeout waits longer",
    )


def _versions(nodes: _NamedPages) -> Iterator[Finding]:
    sides: dict[Versions, list[int]] = {}
    for number, page in nodes.pages.items():
        sides.setdefault(page.versions, []).append(number)
    if len(sides) <= 1:
        for versions in sides:
            yield Finding("versions", Level.GOOD, f"{_versions_text(versions)} on all nodes")
        return
    for field in Versions.__struct_fields__:
        values: dict[str, list[int]] = {}
        for number, page in nodes.pages.items():
            values.setdefault(getattr(page.versions, field) or "none", []).append(number)
        if len(values) > 1:
            said = "; ".join(f"{value} on {nodes.list(of)}" for value, of in values.items())
            yield Finding(
                "versions",
                Level.FAULT,
                f"{field}: {said}",
                "a job takes the versions of its first node, and refuses nodes with others"
                " [version-skew]",
                "install the same environment on all nodes, or use one image",
            )


def _versions_text(versions: Versions) -> str:
    fields = {name: getattr(versions, name) for name in Versions.__struct_fields__}
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value)


def _connections(nodes: _NamedPages) -> Iterator[Finding]:
    """Judge the connections to ports that the kernel selects, in both directions."""
    count = 0
    for number, page in nodes.pages.items():
        closed = [reach for reach in page.reaches if reach.outcome != CONNECTED]
        count += len(page.reaches) - len(closed)
        closed.sort(key=lambda reach: reach.outcome)
        for outcome, alike in groupby(closed, lambda reach: reach.outcome):
            yield _closed(nodes, number, [reach.to for reach in alike], outcome)
    if count:
        yield Finding(
            "connections", Level.GOOD, f"{counted(count, 'direction')} open: {_addresses(nodes)}"
        )


def _addresses(nodes: _NamedPages) -> str:
    shown = [f"{nodes[number]} {page.address}" for number, page in nodes.pages.items()]
    more = len(shown) - LISTED_MAX
    return ", ".join(shown[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _closed(nodes: _NamedPages, number: int, to: Sequence[int], outcome: str) -> Finding:
    first = nodes.pages.get(to[0])
    where = f" ({first.address}:{first.probe_port})" if first is not None else ""
    said = {TIMEOUT: "no answer", STRANGER: "another host answers"}.get(outcome, outcome)
    text = f"{nodes[number]} to {nodes.list(to)}{where}: {said}"
    back = [one for one in to if _is_open(nodes, one, number)]
    text += f"; open from {nodes.list(back)} to {nodes[number]}" if back else ""
    if outcome == STRANGER:
        return Finding(
            "connections",
            Level.FAULT,
            text,
            "two hosts have the same address, or an address is translated on the way",
            f"ip address, on {nodes.list(to)}; name the right address there with --local-addr",
        )
    low, high = (0, 0) if first is None else first.ports
    return Finding(
        "connections",
        Level.FAULT,
        text,
        "agents and workers listen at ports that the kernel selects, and connect in both"
        " directions",
        f"open TCP ports {low} to {high} of {nodes.list(to)} for {nodes[number]}, or name another"
        " network card's address with --local-addr",
    )


def _is_open(nodes: _NamedPages, number: int, to: int) -> bool:
    page = nodes.pages.get(number)
    reaches = () if page is None else page.reaches
    return any(reach.to == to and reach.outcome == CONNECTED for reach in reaches)


def _gloo(nodes: _NamedPages) -> Iterator[Finding]:
    """Judge where gloo would listen on each node, by what the others could do there."""
    good = 0
    for number, page in nodes.pages.items():
        place = page.gloo
        if place.error:
            shown = ", ".join(name for name, _ in page.interfaces)
            yield Finding(
                "gloo",
                Level.FAULT,
                f"{nodes[number]}: {place.chosen_by}: {place.error}",
                f"workers of this node would fail to make a process group; it has {shown}",
                _card(page),
            )
            continue
        lost = [
            other
            for other, theirs in nodes.pages.items()
            for reach in theirs.reaches
            if reach.to == number and reach.outcome == CONNECTED and reach.gloo != CONNECTED
        ]
        good += not lost
        if lost:
            yield Finding(
                "gloo",
                Level.FAULT,
                f"{nodes[number]} would listen at {place.address} ({place.chosen_by}):"
                f" {nodes.list(lost)} cannot reach it there",
                "gloo listens there in scripts that call init_process_group themselves, and their"
                " process groups are never made",
                _card(page),
            )
    if good:
        yield Finding(
            "gloo", Level.GOOD, f"is reached where it would listen on {counted(good, 'node')}"
        )


def _card(page: NodePage) -> str:
    """Return the variable that names the network card at which others reach the node."""
    fit = (name for name, addresses in page.interfaces if page.address in addresses)
    return f"export GLOO_SOCKET_IFNAME={next(fit, 'CARD')} on {page.name}, before elastane run"


def _names(nodes: _NamedPages) -> Iterator[Finding]:
    """Judge what the nodes' names resolve to on the others; a name that does not is not used."""
    wrong: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for number, page in nodes.pages.items():
        for reach in page.reaches:
            other = nodes.pages.get(reach.to)
            if other is None or not reach.name or other.name == page.name:
                continue
            own = {other.address, *(one for _, found in other.interfaces for one in found)}
            own = {one for one in own if not is_loopback(one)}
            if own and not own & set(reach.name):
                wrong.setdefault((reach.to, reach.name), []).append(number)
    for (to, addresses), seen_by in wrong.items():
        page = nodes.pages[to]
        yield Finding(
            "names",
            Level.WARNING,
            f"{page.name} is {', '.join(addresses)} on {nodes.list(seen_by)}, and has"
            f" {page.address}",
            "elastane uses addresses; a script that connects to host names reaches another host",
            f"correct the entry of {page.name} in DNS, or in /etc/hosts of {nodes.list(seen_by)}",
        )
    endpoints = {page.endpoint for page in nodes.pages.values()}
    usable = {one for one in endpoints if not all(map(is_loopback, one))}
    if len(usable) > 1:
        said = "; ".join(
            f"{', '.join(page.endpoint)} on {nodes[number]}"
            for number, page in [*nodes.pages.items()][:LISTED_MAX]
        )
        yield Finding(
            "names",
            Level.WARNING,
            f"the endpoint's host is {said}",
            "nodes that find different hosts there form jobs of their own",
            "name an address in --rdzv-endpoint, or give the name one address everywhere",
        )


def _clocks(nodes: _NamedPages) -> Iterator[Finding]:
    offsets = [
        (abs(reach.offset_s), reach.offset_s, number, reach.to)
        for number, page in nodes.pages.items()
        for reach in page.reaches
        if reach.outcome == CONNECTED
    ]
    if not offsets:
        return
    size_s, offset_s, number, to = max(offsets)
    if size_s < CLOCK_WARNING_S:
        yield Finding("clocks", Level.GOOD, f"differ by at most {_duration(size_s)}")
        return
    word = "ahead of" if offset_s > 0 else "behind"
    yield Finding(
        "clocks",
        Level.WARNING,
        f"that of {nodes[to]} is {_duration(size_s)} {word} that of {nodes[number]}",
        f"events of several nodes are ordered by their times, which may differ by"
        f" {CLOCK_WARNING_S:g} s; membership does not depend on it",
        f"timedatectl set-ntp true, on {nodes[to]} and {nodes[number]}",
    )


def _latency(nodes: _NamedPages) -> Iterator[Finding]:
    found = sorted(
        (reach.latency_s, number, reach.to)
        for number, page in nodes.pages.items()
        for reach in page.reaches
        if reach.outcome == CONNECTED
    )
    if not found:
        return
    usual_s = median(one for one, _, _ in found)
    (low_s, *_), (high_s, number, to) = found[0], found[-1]
    text = f"{_duration(low_s)} to {_duration(high_s)} of round trip"
    if high_s >= LATENCY_WARNING_S and (len(nodes.pages) == 2 or high_s > LATENCY_FACTOR * usual_s):
        yield Finding(
            "latency",
            Level.WARNING,
            f"{_duration(high_s)} of round trip from {nodes[number]} to {nodes[to]};"
            f" {_duration(usual_s)} in the median",
            f"more than {_duration(LATENCY_WARNING_S)} is not one local network, or a busy one, and"
            " each collective takes several such times",
            f"traceroute to {nodes[to]}, on {nodes[number]}",
        )
    else:
        yield Finding("latency", Level.GOOD, text)


def _bandwidth(nodes: _NamedPages) -> Iterator[Finding]:
    found: list[tuple[float, int, int]] = []
    for number, page in nodes.pages.items():
        for speed in page.speeds:
            found += [(speed.sent, number, speed.to), (speed.received, speed.to, number)]
    if not found:
        return
    found.sort()
    usual, (low, number, to), (high, *_) = median(one for one, _, _ in found), found[0], found[-1]
    if low >= max(BANDWIDTH_WARNING, BANDWIDTH_SHARE * usual):
        yield Finding("bandwidth", Level.GOOD, f"{_rate(low)} to {_rate(high)} of one connection")
        return
    expected = _rate(max(BANDWIDTH_WARNING, BANDWIDTH_SHARE * usual))
    yield Finding(
        "bandwidth",
        Level.WARNING,
        f"{_rate(low)} from {nodes[number]} to {nodes[to]}; {_rate(usual)} in the median",
        f"less than {expected}: all workers wait for this link in each step, and a model of 100"
        f" million parameters sends {_duration(4e8 / max(1.0, low))} for its gradients",
        f"ethtool and the switch's port of {nodes[number]} and {nodes[to]}; iperf3 between them",
    )


_RULES: tuple[Callable[[_NamedPages], Iterator[Finding]], ...] = (
    _versions, _connections, _gloo, _names, _clocks, _latency, _bandwidth,
)  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1.0 else f"{seconds:,.3g} s"


def _rate(bytes_a_second: float) -> str:
    if bytes_a_second >= 1e9:
        return f"{bytes_a_second / 1e9:.2f} GB/s"
    return f"{bytes_a_second / 1e6:.3g} MB/s"
