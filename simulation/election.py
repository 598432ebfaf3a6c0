"""One node's candidacy in a job with a store: what `coordinator.election` does, in virtual time.

It takes the lease, checks that the job has not ended, rewrites the record under its own term, and
only then serves. It renews the lease and retries each write. It is a copy, since the real one waits
for tasks and sockets; `tests/unit` and `tests/conformance` test that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from elastane.protocol.limits import LEASE_MARGIN, SAVE_TIMEOUT_S, STORE_POLL_S, Timing
from elastane.protocol.model import JobRecord, Outcome
from simulation.clock import HostClock, Timer
from simulation.store import Published, SimulatedRecord, SimulatedStore

T = TypeVar("T")
# True: done. False: another node may decide. None: the store did not answer.
Answer = Callable[[bool | None], None]


class Candidate(Protocol):
    """The node that stands: see `node.SimulatedNode`."""

    name: str
    clock: HostClock
    alive: bool
    life: int
    refused_at: str

    def take_refusal(self) -> str:
        """Return the coordinator's host whose lease is to be ended, the first time."""


class SimulatedElection:
    """One candidacy of one agent; it ends with the life of the agent, or by `resign`.

    `on_host` performs an action on a host: later, while the host is paused.
    """

    def __init__(
        self,
        node: Candidate,
        store: SimulatedStore,
        timing: Timing,
        on_host: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._node, self._store, self._timing = node, store, timing
        self._perform, self.host = on_host, node.name
        self._life = node.life
        self._ttl_s = timing.lease_ttl_s
        self.over = False
        self.term = 0
        self.fenced_term = 0
        self.filed = SimulatedRecord()
        self.previous_holder = ""
        self.previous_refuses = False
        self._until_s = 0.0
        self._waiting: list[Answer] = []
        self._told_held = True
        self._end = Timer(lambda: None)
        self.on_authority: Callable[[bool, str], None] = lambda held, reason: None
        self.on_lost: Callable[[str], None] = lambda why: None

    def held(self) -> bool:
        """Whether this node may decide at this moment."""
        return (
            not self.over
            and self.term == self.fenced_term
            and self._node.clock.boot_s < self._until_s
        )

    def campaign(self, answer: Answer, closed: Callable[[Outcome], None]) -> None:
        """Try once; `closed` is called where the job has ended."""
        begun_s = self._node.clock.boot_s

        def leased(term: int | None) -> None:
            if not term:
                self._give_up(answer)
                return
            self.term, self._until_s = term, self._end_of(begun_s)
            self._ask(self._store.read, opened)

        def opened(filed: SimulatedRecord | None) -> None:
            if filed is None:
                self._give_up(answer)
            elif filed.record is not None and filed.record.outcome is not None:
                self.resign()
                closed(filed.record.outcome)
            else:
                self._fence(fenced)

        def fenced(done: bool | None) -> None:
            if done:
                self._ask(self._store.published, followed)
            else:
                self._give_up(answer)

        def followed(published: tuple[Published | None] | None) -> None:
            if published is None:
                self._give_up(answer)
                return
            self.previous_holder = published[0].host if published[0] else ""
            self.previous_refuses = self.previous_holder == self._node.refused_at != ""
            answer(True)

        self._take(leased)

    def keep(self) -> None:
        """Renew the lease until it is lost; tell when it runs out, and when it is held again."""
        self._renew(self._kept)
        self._mind_end()

    def publish(self) -> None:
        """Publish the address of this coordinator to all agents."""
        leader = Published(self.term, self.host)

        def published(done: bool | None) -> None:
            if done is None:
                self._later(STORE_POLL_S, self.publish)
            elif not done:
                self._lose("another coordinator is published")

        self._ask(lambda: self._store.publish(leader), published)

    def save(self, record: JobRecord, done: Callable[[str], None]) -> None:
        """Make `record` durable under the own term; `done` gets why it may not be, or nothing."""
        deadline_s = self._node.clock.now_s + SAVE_TIMEOUT_S

        def once() -> None:
            self._assure(lambda may: self._file(record, written) if may else written(may))

        def written(is_done: bool | None) -> None:
            if is_done is None and self._node.clock.now_s < deadline_s:
                self._later(STORE_POLL_S, once)
            elif is_done is None:
                done("its record could not be written in time")
            elif is_done:
                self._assure(lambda may: done("") if may else written(may))
            else:
                done("another coordinator has written")

        once()

    def resign(self) -> None:
        """Release the lease, if the request reaches the store."""
        self.over, term = True, self.term
        if term:
            store = self._store
            store.ask(self.host, lambda: store.release(term), lambda _: None)

    # Private.

    def _take(self, answer: Callable[[int | None], None]) -> None:
        """Take the lease if it is free, or once that of a coordinator that refuses is ended."""
        store, host, ttl_s = self._store, self.host, self._ttl_s

        def tried(term: int | None) -> None:
            refused = self._node.take_refusal() if term == 0 else ""
            if refused:
                self._ask(lambda: store.end_lease_of(refused), ended)
            else:
                answer(term)

        def ended(_: bool | None) -> None:
            self._ask(lambda: store.take(host, ttl_s), answer)

        self._ask(lambda: store.take(host, ttl_s), tried)

    def _file(self, record: JobRecord, answer: Answer) -> None:
        after = SimulatedRecord(self.fenced_term, record, self.filed.version)

        def written(result: tuple[bool, SimulatedRecord] | None) -> None:
            if result is None:
                answer(None)
                return
            is_done, self_or_other = result
            if is_done:
                self.filed = self_or_other
                answer(True)
            elif self_or_other.term == self.fenced_term:  # a write whose reply was lost
                self.filed = self_or_other
                self._file(record, answer)
            else:
                answer(False)

        self._ask(lambda: self._store.write(after), written)

    def _fence(self, answer: Answer) -> None:
        """Rewrite the record under this term: no predecessor's write succeeds after it."""

        def read(filed: SimulatedRecord | None) -> None:
            if filed is None:
                answer(None)
                return
            mine = (self.fenced_term, self.term)
            if filed.term > self.term or (self.fenced_term and filed.term not in mine):
                answer(False)
                return
            after = SimulatedRecord(self.term, filed.record, filed.version)
            self._ask(lambda: self._store.write(after), written)

        def written(result: tuple[bool, SimulatedRecord] | None) -> None:
            if result is None:
                answer(None)
            elif not result[0]:
                self._fence(answer)
            else:
                self.filed, self.fenced_term = result[1], self.term
                answer(True)

        self._ask(self._store.read, read)

    def _assure(self, answer: Answer) -> None:
        if self.held():
            answer(True)
        else:
            self._renew(answer)

    def _renew(self, answer: Answer) -> None:
        """Renew; who asks meanwhile gets the same answer."""
        self._waiting.append(answer)
        if len(self._waiting) > 1:
            return
        begun_s, host, term = self._node.clock.boot_s, self.host, self.term

        def renewed(found: int | None) -> None:
            if not found:
                reply(None if found is None else False)
                return
            self.term, self._until_s = found, self._end_of(begun_s)
            if self.term != self.fenced_term:  # taken again after it had run out
                self._fence(reply)
            else:
                reply(True)

        def reply(done: bool | None) -> None:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one(done)

        self._ask(lambda: self._store.renew(host, term, self._ttl_s), renewed)

    def _kept(self, done: bool | None) -> None:
        if done is False:
            self._lose("its lease was taken")
            return
        self._mind_end()
        pause_s = self._timing.lease_renew_s if done else STORE_POLL_S
        self._later(pause_s, lambda: self._renew(self._kept))

    def _mind_end(self) -> None:
        """Tell of the authority's end at the moment of it, and of its return."""
        held = self.held()
        if held != self._told_held and not self.over:
            self._told_held = held
            self.on_authority(held, "the lease is held again" if held else "the store is silent")
        self._end.cancel()
        if held:
            left_s = self._until_s - self._node.clock.boot_s
            self._end = self._later(max(0.001, left_s), self._mind_end)

    def _end_of(self, begun_s: float) -> float:
        return max(self._until_s, begun_s + self._ttl_s * (1 - LEASE_MARGIN))

    def _give_up(self, answer: Answer) -> None:
        self.resign()
        answer(False)

    def _lose(self, why: str) -> None:
        self.over = True
        self.on_lost(why)

    def _ask(self, deed: Callable[[], T], answer: Callable[[T | None], None]) -> None:
        def back(result: T | None) -> None:
            self._on_host(lambda: answer(result))

        self._store.ask(self.host, deed, back)

    def _later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        return self._node.clock.after(delay_s, lambda: self._on_host(act))

    def _on_host(self, act: Callable[[], None]) -> None:
        def if_it_lives() -> None:
            if not self.over and self._node.alive and self._node.life == self._life:
                act()

        self._perform(self.host, if_it_lives)
