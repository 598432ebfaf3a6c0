"""The switch between hosts: a program that carries every frame, and can lose it.

It runs in a network namespace of its own, whose interfaces are the far ends of the hosts' cables.
A line of JSON on stdin is a command, a line on stdout the answer. It uses neither netem nor
netfilter, so that a kernel needs no more than namespaces, veth and packet sockets.

A rule is of one direction between two hosts: `drop`, `loss` (share), `duplicate` (share),
`delay_s`, `jitter_s` (which reorders), `bytes_per_s`. With `port` it is of frames from or to that
TCP port alone. Chance comes from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

SOL_PACKET, VNET_HEADER, IGNORE_OUTGOING = 263, 15, 23
HEADER_BYTES = 10  # struct virtio_net_hdr: checksums and segmentation are still to be done
ETH_P_ALL = 3
FRAME_BYTES = 1 << 17
# What a throttled direction keeps waiting before it loses frames, as a router's queue does.
QUEUE_S = 1.0


@dataclass
class Cable:
    """The switch's end of a host's cable: its network and the host's name."""

    host: str
    network: str
    sock: socket.socket


@dataclass
class Rule:
    drop: bool = False
    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    port: int = 0
    free_at_s: float = 0.0

    def send_at_s(self, size: int, now_s: float) -> float | None:
        """Return when a frame of this size leaves; None if the queue is full."""
        if not self.bytes_per_s:
            return now_s
        if self.free_at_s - now_s > QUEUE_S:
            return None
        self.free_at_s = max(self.free_at_s, now_s) + size / self.bytes_per_s
        return self.free_at_s


@dataclass
class Switch:
    cables: list[Cable] = field(default_factory=list)
    known: dict[tuple[str, bytes], Cable] = field(default_factory=dict)
    rules: dict[tuple[str, str], list[Rule]] = field(default_factory=dict)
    queue: list[tuple[float, int, Cable, bytes]] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    counts: dict[str, int] = field(default_factory=dict)
    order: itertools.count[int] = field(default_factory=itertools.count)

    def plug(self, device: str, host: str, network: str) -> Cable:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        sock.setsockopt(SOL_PACKET, VNET_HEADER, 1)
        sock.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        sock.bind((device, ETH_P_ALL))
        sock.setblocking(False)
        self.cables.append(Cable(host, network, sock))
        return self.cables[-1]

    def carry(self, cable: Cable) -> None:
        """Receive the waiting frames, and forward each one."""
        for _ in range(64):
            try:
                frame = cable.sock.recv(FRAME_BYTES)
            except OSError:  # nothing (more), or the interface was taken down
                return
            to, source = frame[HEADER_BYTES:][:6], frame[HEADER_BYTES + 6 :][:6]
            self.known[cable.network, source] = cable
            goal = self.known.get((cable.network, to))
            goals = self.cables if goal is None or to[0] & 1 else [goal]
            for other in goals:
                if other is not cable and other.network == cable.network:
                    self.pass_on(frame, cable, other)

    def pass_on(self, frame: bytes, cable: Cable, goal: Cable) -> None:
        now_s = time.monotonic()
        at_s, copies = now_s, 1
        for rule in self.rules.get((cable.host, goal.host), ()):
            if rule.port and rule.port not in ports(frame):
                continue
            leaves_s = rule.send_at_s(len(frame), now_s)
            if rule.drop or leaves_s is None or self.chance.random() < rule.loss:
                self.count("lost")
                return
            copies += self.chance.random() < rule.duplicate
            jitter_s = rule.jitter_s * self.chance.random()
            at_s = max(at_s, leaves_s) + rule.delay_s + jitter_s
        self.count("carried")
        for copy in range(copies):
            self.count("repeated", copy)
            if at_s <= now_s:
                self.send(goal, frame)
            else:
                self.count("held")
                heapq.heappush(self.queue, (at_s, next(self.order), goal, frame))

    def send(self, goal: Cable, frame: bytes) -> None:
        try:
            goal.sock.send(frame)
        except OSError:  # its queue is full, or it is gone: a frame is lost
            self.count("unsent")

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def send_due(self) -> float | None:
        """Send the frames that are due; return the seconds until the next one."""
        while self.queue:
            wait_s = self.queue[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, goal, frame = heapq.heappop(self.queue)
            self.send(goal, frame)
        return None

    def obey(self, command: dict, watch) -> object:
        what = command.pop("do")
        if what == "plug":
            device, peer, pid = (command[k] for k in ("device", "peer", "pid"))
            ip("link", "add", device, "type", "veth", "peer", "name", peer, "netns", str(pid))
            ip("link", "set", device, "up")
            cable = self.plug(device, command["host"], command["network"])
            watch.register(cable.sock, selectors.EVENT_READ, cable)
        elif what == "unplug":
            for cable in [c for c in self.cables if c.host == command["host"]]:
                self.cables.remove(cable)
                watch.unregister(cable.sock)
                cable.sock.close()
            self.known = {k: c for k, c in self.known.items() if c.host != command["host"]}
            self.rules = {k: r for k, r in self.rules.items() if command["host"] not in k}
        elif what == "rule":
            pair = command.pop("from"), command.pop("to")
            self.rules.setdefault(pair, []).append(Rule(**command))
        elif what == "heal":
            self.rules.clear()
        return self.counts


def ports(frame: bytes) -> tuple[int, ...]:
    """Return the TCP ports of a frame; none for another kind of frame."""
    kind, rest = frame[HEADER_BYTES + 12 :][:2], frame[HEADER_BYTES + 14 :]
    if kind == b"\x08\x00" and rest[9] == 6:
        rest = rest[(rest[0] & 15) * 4 :]
    elif kind == b"\x86\xdd" and rest[6] == 6:
        rest = rest[40:]
    else:
        return ()
    return int.from_bytes(rest[:2], "big"), int.from_bytes(rest[2:4], "big")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def main() -> None:
    switch, watch = Switch(), selectors.DefaultSelector()
    watch.register(sys.stdin.buffer, selectors.EVENT_READ, None)
    while True:
        for key, _ in watch.select(switch.send_due()):
            if key.data is not None:
                switch.carry(key.data)
                continue
            line = sys.stdin.buffer.readline()
            if not line:
                return
            try:
                answer = {"ok": switch.obey(json.loads(line), watch)}
            except Exception as error:  # to be raised by who asked
                answer = {"error": repr(error)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


main()
