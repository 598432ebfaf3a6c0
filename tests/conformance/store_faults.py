"""Runs clients of one store under faults from a seed, and checks their history.

Processes of `store_client.py` are killed, stopped and restarted, and the time of day of their hosts
is set. A bed makes faults of servers and
links. Then all faults end, the clients stop writing, and every watcher must see the last version.
`read_run` reads the history of a run from its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from etcd_server import _die_with_parent
from linearizability import Operation, Versioned, check
from store_beds import Bed
from store_connect import connect
from store_promises import Belief, SeenHolder, check_leases, check_watch
from timed_faults import End, carry_out

from elastane.errors import StoreError
from elastane.stores.protocol import Entry

SCRIPT = Path(__file__).with_name("store_client.py")
KEYS = ("job/a", "job/b")
CLIENTS = 3
CLIENT_FAULTS = ("kill-client", "stop-client")
JUMPING_CLOCK = Path(__file__).parents[1] / "hosts" / "programs" / "jumping_clock"
# The clock of one client is set by one of these with each fault. It does not go back by itself.
JUMPS_S = (0.0, 3600.0, -3600.0, 2.0, -2.0)
# Most stopped clients are stopped for longer than their lease.
FAULT_S = (0.1, 1.6)
HASTE = 0.3
# From the last fault to the last version seen. A watch reads again after 10 s of silence.
SETTLE_S = 30.0
# The time of operations after the last fault, since some faults show only later.
OPERATIONS_AFTER = 10
# A run with fewer writes proves nothing.
WRITES_MIN = 10


@dataclass(frozen=True, order=True)
class Fault:
    """A fault: its start, its duration, its kind, and the random number that selects its target."""

    at_s: float
    for_s: float
    kind: str
    draw: int

    def __str__(self) -> str:
        return f"{self.at_s:.2f} s: {self.kind} for {self.for_s:.2f} s (draw {self.draw})"


def plan(seed: int, kinds: tuple[str, ...], duration_s: float, pace: float = 1.0) -> list[Fault]:
    """Return the faults of a seed. One starts every 0.1 to 0.8 s, so several may overlap.

    Every second seed has shorter and more frequent faults.
    """
    draw = random.Random(seed)
    pace *= 1.0 if seed % 2 else HASTE
    faults, at_s = [], 0.0
    while (at_s := at_s + pace * draw.uniform(0.1, 0.8)) < duration_s:
        for_s = min(pace * draw.uniform(*FAULT_S), duration_s - at_s)
        faults.append(Fault(at_s, for_s, draw.choice(kinds), draw.randrange(1 << 30)))
    return faults


@dataclass
class _Client:
    """A client's process, and the file of its current history."""

    index: int
    lives: int = 0
    process: subprocess.Popen[bytes] | None = None
    file: Path = field(default_factory=Path)


class FaultRun:
    """One run. Its folder has the history, with a file for each process of a client."""

    def __init__(self, bed: Bed, folder: Path, seed: int, duration_s: float) -> None:
        self.bed = bed
        self.folder = folder
        self.seed = seed
        self.duration_s = duration_s
        self.faults = plan(seed, (*bed.faults, *CLIENT_FAULTS), duration_s, bed.pace)
        self._clients = [_Client(index) for index in range(bed.clients)]

    def run(self) -> None:
        """Run the clients and all faults, then wait until each watcher has seen the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "faults").write_text("\n".join(map(str, self.faults)) + "\n")
        try:
            for client in self._clients:
                self._start(client)
            self._until(lambda: all(map(self._is_started, self._clients)), "all clients start")
            carry_out(self.faults, self._begin)
            self._settle()
        finally:
            for client in self._clients:
                self._kill(client)

    def _begin(self, fault: Fault) -> End:
        self._set_clock(random.Random(f"clock {fault.draw}"))
        draw = random.Random(fault.draw)
        if fault.kind not in CLIENT_FAULTS:
            return self.bed.begin(fault.kind, draw)
        client = draw.choice(self._clients)
        if fault.kind == "kill-client":
            self._kill(client)
            # After half of the kills, the lease has to expire.
            dead_term = _last_term(client.file) if draw.random() < 0.5 else 0
            return lambda: self._start(client, dead_term)
        self._send(client, signal.SIGSTOP)
        return lambda: self._send(client, signal.SIGCONT)

    def _set_clock(self, draw: random.Random) -> None:
        """Set the time of day of one client."""
        clock = self._clock(draw.choice(self._clients))
        new = clock.with_suffix(".new")
        new.write_text(str(draw.choice(JUMPS_S)))
        new.replace(clock)

    def _clock(self, client: _Client) -> Path:
        return self.folder / f"c{client.index}.clock"

    def _start(self, client: _Client, dead_term: int = 0) -> None:
        if client.process is not None:  # The end of another fault has started it.
            return
        name = f"c{client.index}.{client.lives}"
        client.lives += 1
        client.file = self.folder / f"{name}.history"
        words = [self.bed.specification(client.index), client.file, name, f"{self.seed}-{name}"]
        with (self.folder / "errors").open("ab") as errors:
            client.process = subprocess.Popen(
                [sys.executable, SCRIPT, *words, ",".join(KEYS), str(dead_term)],
                stderr=errors,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join([str(JUMPING_CLOCK), *sys.path]),
                    "JUMPING_CLOCK": str(self._clock(client)),
                },
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )

    def _kill(self, client: _Client) -> None:
        if client.process is not None:
            client.process.kill()
            client.process.wait(10)
            client.process = None
            with client.file.open("a") as file:  # after a line that may be torn
                file.write("\n" + json.dumps({"what": "given up", "at_s": time.monotonic()}) + "\n")

    def _send(self, client: _Client, signum: int) -> None:
        if client.process is not None:
            client.process.send_signal(signum)

    def _is_started(self, client: _Client) -> bool:
        assert client.process is not None
        assert client.process.poll() is None, (self.folder / "errors").read_text()[-2000:]
        return any(line["what"] == "started" for line in read_lines(client.file))

    # ---- the end

    def _settle(self) -> None:
        self._until(lambda: all(map(self._is_started, self._clients)), "all clients start again")
        done = {client.index: _answers(client.file) for client in self._clients}
        self._until(
            lambda: all(
                _answers(client.file) >= done[client.index] + OPERATIONS_AFTER
                for client in self._clients
            ),
            "all clients do some more operations",
        )
        self._until(lambda: is_enough(read_run(self.folder)), "enough of each kind was seen")
        for client in self._clients:
            self._send(client, signal.SIGUSR1)
        self._until(lambda: all(map(self._is_quiet, self._clients)), "all clients are quiet")
        last = asyncio.run(self._read())
        for client in self._clients:
            self._until(
                lambda client=client: self._seen_last(client) == last,
                f"client {client.index} sees {last} by its watches",
            )

    def _is_quiet(self, client: _Client) -> bool:
        return any(line["what"] in ("quiet", "error") for line in read_lines(client.file))

    def _seen_last(self, client: _Client) -> dict[str, int | None]:
        seen: dict[str, int | None] = dict.fromkeys(KEYS)
        for line in read_lines(client.file):
            if line["what"] == "watched":
                seen[line["key"]] = line["answer"][0] if line["answer"] else None
        return seen

    async def _read(self) -> dict[str, int | None]:
        """Read each key after all faults, as operations of a client `end`."""
        store = connect(self.bed.direct())
        found = {}
        with (self.folder / "end.history").open("w") as file:
            for number, key in enumerate(KEYS):
                begin_s = time.monotonic()
                entry = await self._get(store, key, begin_s + SETTLE_S)
                asked = {"kind": "get", "key": key, "number": number, "expected": 0, "value": ""}
                answer = [entry.version, entry.value.decode()] if entry else None
                ended = {"number": number, "at_s": time.monotonic(), "outcome": "ok"}
                for line in (
                    {"what": "begin", "at_s": begin_s, **asked},
                    {"what": "end", "answer": answer, **ended},
                ):
                    file.write(json.dumps(line) + "\n")
                found[key] = entry.version if entry else None
        await store.close()
        return found

    async def _get(self, store: object, key: str, deadline_s: float) -> Entry | None:
        while True:
            try:
                return await store.get(key)
            except StoreError:
                assert time.monotonic() < deadline_s, f"{key} cannot be read:\n{self.bed.story()}"
                await asyncio.sleep(0.05)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while not condition():
            story = (self.folder / "errors").read_text()[-2000:] + self.bed.story()
            assert time.monotonic() < deadline_s, f"never came: {what}\n{story}"
            time.sleep(0.02)


def read_lines(file: Path) -> Iterator[dict]:
    """Yield the observations in a file, without an incomplete last line of a killed client."""
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _last_term(file: Path) -> int:
    return max((line["term"] for line in read_lines(file) if line["what"] == "holds"), default=0)


def _answers(file: Path) -> int:
    return sum(line.get("outcome") in ("ok", "conflict") for line in read_lines(file))


@dataclass
class Seen:
    """The observations of all clients of a run."""

    operations: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    beliefs: list[Belief] = field(default_factory=list)
    holders: list[SeenHolder] = field(default_factory=list)
    watched: dict[tuple[str, str], list[int | None]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def counts(self) -> dict[str, int]:
        """Return the number of each kind and outcome. An unsure get is an entry of a watch."""
        counts: dict[str, int] = defaultdict(int)
        for one in itertools.chain.from_iterable(self.operations.values()):
            counts[f"{one.kind} {one.outcome}"] += 1
        counts["terms"] = len({belief.term for belief in self.beliefs})
        return dict(counts)


def read_run(folder: Path) -> Seen:
    """Read the history of a run."""
    seen = Seen()
    for file in sorted(folder.glob("*.history")):
        add_life(seen, file.stem, read_lines(file))
    return seen


def add_life(seen: Seen, client: str, lines: Iterable[dict]) -> None:
    """Add the observations of one process of a client."""
    begun, beliefs = {}, []
    for line in lines:
        match line["what"]:
            case "begin":
                begun[line["number"]] = line
            case "end":
                _add(seen, client, begun.pop(line["number"]), line)
            case "holds":
                times = (line["asked_s"], line["since_s"], line["until_s"])
                beliefs.append(Belief(client, line["term"], *times))
            case "given up":
                end_s = line["at_s"]
                beliefs = [replace(one, until_s=min(one.until_s, end_s)) for one in beliefs]
            case "holder":
                seen.holders.append(SeenHolder(client, line["term"], line["asked_s"]))
            case "watched":
                _add_watched(seen, client, line)
            case "error":
                raise AssertionError(f"{client}: {line['text']}")
    for line in begun.values():  # The client was killed before the answer.
        outcome = "unreachable" if line["kind"] == "get" else "unsure"
        _add(seen, client, line, {"at_s": math.inf, "answer": None, "outcome": outcome})
    seen.beliefs += beliefs


def _add_watched(seen: Seen, client: str, line: dict) -> None:
    answer = Versioned(*line["answer"]) if line["answer"] else None
    seen.watched[client, line["key"]].append(answer.version if answer else None)
    if answer:
        shown = Operation(client, "get", line["at_s"], line["at_s"], "unsure", answer=answer)
        seen.operations[line["key"]].append(shown)


def _add(seen: Seen, client: str, begun: dict, ended: dict) -> None:
    one = Operation(
        client,
        begun["kind"],
        begun["at_s"],
        ended["at_s"],
        ended["outcome"],
        expected=begun["expected"],
        value=begun["value"],
        answer=Versioned(*ended["answer"]) if ended["answer"] else None,
        ttl_s=begun.get("ttl_s"),
    )
    seen.operations[begun["key"]].append(one)


def check_seen(seen: Seen) -> dict[str, int]:
    """Check all promises of a store; return the number of each kind of operation."""
    for operations in seen.operations.values():
        check(operations)
    check_leases(seen.beliefs, seen.holders)
    for (client, key), versions in seen.watched.items():
        check_watch(f"{client}'s watch of {key}", versions)
    assert is_enough(seen), seen.counts()
    return seen.counts()


def is_enough(seen: Seen) -> bool:
    """Return whether there were writes, a lease and a watch to check."""
    counts = defaultdict(int, seen.counts())
    return counts["compare_and_set ok"] >= WRITES_MIN and bool(
        counts["terms"] * counts["get unsure"]
    )
