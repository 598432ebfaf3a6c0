"""The history of a job, attempt by attempt, from its event log: the facts behind `explain`.

Pure: events in, a story out. The root cause of an attempt is the coordinator's finding, on its
single time line; the wall clocks of several hosts are displayed and never compared. Missing events
(a full disk, a host whose log is elsewhere) leave gaps, which the story names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from elastane.observe.events import TIME_MAX_S, LoggedEvent, iso_time
from elastane.observe.runs import RunTrack
from elastane.protocol.diagnosis import headline, is_signal_from_outside
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import NO_RANK
from elastane.protocol.patterns import Pattern, class_of

_NS = 1e9


class SeenFailure(msgspec.Struct, kw_only=True):
    """One worker's end. `stopped`: the agent stopped it, which is no failure.

    `output`: the message is only the end of its output. `rank` is None for a worker without one.
    `kind`, `outlook`, `clue` and `next_step`: its class, a stable word, whether another attempt may
    succeed, the line that tells it, and what a person can do; empty for a stopped one.
    """

    node: str
    rank: int | None
    local_rank: int
    pid: int
    exit: str
    exit_code: int
    time: str
    stopped: bool
    output: bool = False
    message: str = ""
    error_file: str = ""
    log_file: str = ""
    kind: str = ""
    outlook: str = ""
    clue: str = ""
    next_step: str = ""

    def classify(self, log: str = "", own: Sequence[Pattern] = ()) -> None:
        """Find its class, in its last output and in `log`, by the patterns of a user first."""
        if self.stopped:
            return
        explains = (
            not self.output or self.exit_code >= 0 or not is_signal_from_outside(self.exit_code)
        )
        said = self.message if explains else ""
        lines = (*log.splitlines(), *said.splitlines()) if explains else ()
        ends = (self.exit, headline(said)) if said else (self.exit,)
        found = class_of(ends, lines, own)
        self.kind, self.outlook = found.kind, found.outlook.value
        self.clue, self.next_step = found.line, found.next_step


class SeenStacks(msgspec.Struct, kw_only=True):
    """The stacks of a worker for which others waited, as the program `source` printed them."""

    time: str
    node: str
    rank: int | None
    pid: int
    source: str
    stacks: str


class SeenCulprit(msgspec.Struct, kw_only=True):
    """A worker for which others waited. `kind` and `outlook` are stable words.

    `ranks` is empty if no worker was behind. `certain`: the wait would never have ended. `ended` is
    when the workers made progress again; empty if they did not in this attempt.
    """

    time: str
    kind: str
    ranks: list[int]
    sentence: str
    outlook: str
    certain: bool
    still_s: float
    group: str = ""
    sequence: int = 0
    ended: str = ""


class SeenStraggler(msgspec.Struct, kw_only=True):
    """A rank that made the others wait in each step. `why` is a stable word.

    `ended` is empty if it was slow until the end of the attempt.
    """

    time: str
    rank: int
    why: str
    sentence: str
    own_s: float
    others_s: float
    ended: str = ""


class AttemptStory(msgspec.Struct, kw_only=True):
    """One start of the workers, as far as its events are in the log."""

    round: int
    attempt: int
    began: str = ""
    began_because: str = ""
    world_size: int = 0
    nodes: int = 0
    members: str = ""
    ended: str = ""
    ended_because: str = ""
    lasted_s: float | None = None
    root_cause: str = ""
    root_node: str = ""
    root_rank: int | None = None
    consequences: int = 0
    alike: int = 0
    failures: list[SeenFailure] = []
    differed: list[str] = []
    culprits: list[SeenCulprit] = []
    stacks: list[SeenStacks] = []
    stragglers: list[SeenStraggler] = []
    succeeded: int = 0

    def add(self, event: LoggedEvent) -> None:
        """Add an event of this attempt."""
        rule = _OF_ATTEMPT.get(event.kind)
        if rule is not None:
            rule(self, event)

    def begin(self, event: LoggedEvent) -> None:
        """Record the world in which the workers were started."""
        self.began = event.time
        self.began_because = event.reason
        self.world_size = event.number("world_size") or 0
        self.nodes = event.number("nodes") or 0
        self.members = event.text("members")

    def add_difference(self, event: LoggedEvent) -> None:
        """Record that replicas differed."""
        self.differed.append(f"{event.time}: {event.reason}")

    def add_culprit(self, event: LoggedEvent) -> None:
        """Record a worker for which others waited."""
        self.culprits.append(_culprit(event))

    def end_culprit(self, event: LoggedEvent) -> None:
        """Record that the workers make progress again."""
        if self.culprits:
            self.culprits[-1].ended = event.time

    def add_stacks(self, event: LoggedEvent) -> None:
        """Record the stacks of a worker for which others waited."""
        self.stacks.append(
            SeenStacks(
                time=event.time,
                node=event.node,
                rank=event.number("rank"),
                pid=event.number("pid") or 0,
                source=event.text("source"),
                stacks=event.text("stacks"),
            )
        )

    def add_straggler(self, event: LoggedEvent) -> None:
        """Record a rank that makes the others wait in each step."""
        self.stragglers.append(_straggler(event))

    def replace(self, event: LoggedEvent) -> None:
        """Record the cause of a replacement; without a rank, the world continues."""
        if self.ended:
            self.end(event)

    def end(self, event: LoggedEvent) -> None:
        """Record the cause of a restart or of the end of the job."""
        self.record_reason(event)
        self.root_cause = event.text("cause")
        self.root_node = event.text("cause_node")
        self.root_rank = event.number("cause_rank")
        self.consequences = event.number("consequences") or 0
        self.alike = event.number("alike") or 0

    def end_straggler(self, event: LoggedEvent) -> None:
        """Record that a rank is as fast as the others again."""
        rank = event.number("rank")
        for one in self.stragglers:
            if one.rank == rank and not one.ended:
                one.ended = event.time

    def last(self, began_s: float, ended_s: float) -> None:
        """Record how long it lasted, by the clock of the coordinator's host."""
        self.lasted_s = round(max(0.0, ended_s - began_s), 3)

    def record_reason(self, event: LoggedEvent) -> None:
        """Record the reason of its end; the first reason counts."""
        if not self.ended:
            self.ended = event.time
            self.ended_because = event.reason

    def add_exit(self, event: LoggedEvent) -> None:
        """Record the end of a worker."""
        code = event.number("exit_code")
        if code is None:
            self.succeeded += 1
            return
        rank = event.number("rank")
        age_s = event.data.get("age_s", 0.0)
        time_s = event.time_s - (float(age_s) if isinstance(age_s, int | float) else 0.0)
        self.failures.append(
            SeenFailure(
                node=event.node,
                rank=None if rank == NO_RANK else rank,
                local_rank=event.number("local_rank") or 0,
                pid=event.number("pid") or 0,
                exit=event.reason,
                exit_code=code,
                time=iso_time(int(min(max(time_s, 0.0), TIME_MAX_S) * _NS)),
                stopped=bool(event.data.get("stopped")),
                output=bool(event.data.get("output")),
                message=event.text("message"),
                error_file=event.text("error_file"),
                log_file=event.text("log_file"),
            )
        )


# Most events of a log are of other kinds, so the kind is tested first.
_OF_ATTEMPT: dict[str, Callable[[AttemptStory, LoggedEvent], None]] = {
    EventKind.ROUND_SETTLED: AttemptStory.begin,
    EventKind.WORKER_EXITED: AttemptStory.add_exit,
    EventKind.REPLICA_DIFFERED: AttemptStory.add_difference,
    EventKind.CULPRIT: AttemptStory.add_culprit,
    EventKind.CULPRIT_ENDED: AttemptStory.end_culprit,
    EventKind.STACKS: AttemptStory.add_stacks,
    EventKind.STRAGGLER: AttemptStory.add_straggler,
    EventKind.STRAGGLER_ENDED: AttemptStory.end_straggler,
    EventKind.INCIDENT: AttemptStory.record_reason,
    EventKind.DRAIN_STARTED: AttemptStory.record_reason,
    EventKind.REPLACEMENT: AttemptStory.replace,
    EventKind.RESTART: AttemptStory.end,
    EventKind.JOB_ENDED: AttemptStory.end,
}


def _notice_line(event: LoggedEvent) -> str:
    within_s = event.data.get("within_s")
    known = isinstance(within_s, int | float)
    leaves = "the node leaves" if event.data.get("drains") else "the node stays"
    deadline = f", {within_s:g} s before its end" if known and event.data.get("drains") else ""
    return f"{event.time} {event.node} ({event.text('source')}): {event.reason}: {leaves}{deadline}"


def _keeps_out(event: LoggedEvent) -> bool:
    """Whether a health check failed before its node joined; a later one is logged as a notice."""
    return event.text("when") == "join" and not event.data.get("ok")


def _culprit(event: LoggedEvent) -> SeenCulprit:
    still_s = event.data.get("still_s", 0.0)
    return SeenCulprit(
        time=event.time,
        kind=event.text("class"),
        ranks=[int(word) for word in event.text("ranks").split(",") if word.isdecimal()],
        sentence=event.reason,
        outlook=event.text("outlook"),
        certain=bool(event.data.get("certain")),
        still_s=float(still_s) if isinstance(still_s, int | float) else 0.0,
        group=event.text("group"),
        sequence=event.number("sequence") or 0,
    )


def _straggler(event: LoggedEvent) -> SeenStraggler:
    return SeenStraggler(
        time=event.time,
        rank=event.number("rank") or 0,
        why=event.text("why"),
        sentence=event.reason,
        own_s=event.measure("own_s"),
        others_s=event.measure("others_s"),
    )


class JobStory(msgspec.Struct, kw_only=True):
    """All attempts of a job's newest run in order, and how it ended; `ended` is empty until then.

    `earlier_runs`: the runs of jobs of this name that the log has before it.
    `restarts_used` is the use of the restart budget, which covers restarts of all workers and
    `replacements` of lost ones. `agents_left`: how each agent that stopped has ended.
    `agents_here`: the number of agents that have not stopped. `injected`: faults that were injected
    into the job. `notices`: announcements about nodes. `outages`: when no coordinator could decide.
    """

    job: str
    log_dir: str
    ended: str = ""
    ok: bool = False
    reason: str = ""
    next_step: str = ""
    exit_code: int | None = None
    restarts_used: int = 0
    replacements: int = 0
    agents_left: list[str] = []
    agents_here: int = 0
    attempts: list[AttemptStory] = []
    departures: list[str] = []
    outages: list[str] = []
    injected: list[str] = []
    notices: list[str] = []
    last_event: str = ""
    earlier_runs: int = 0
    version: int = 1

    def add(self, event: LoggedEvent, here: set[tuple[str, int]]) -> None:
        """Add an event of the job, of any attempt; `here`: the agents that run."""
        self.job = event.job or self.job
        rule = _OF_JOB.get(event.kind)
        if rule is not None:
            rule(self, event)
        elif event.kind in (EventKind.AGENT_STARTED, EventKind.AGENT_STOPPED):
            self._add_agent(here, event)

    def complete(
        self, attempts: list[AttemptStory], agents_here: int, last: LoggedEvent | None
    ) -> None:
        """Record the attempts and the last event, once all events were added."""
        self.attempts = attempts
        self.agents_here = agents_here
        if last is not None:
            self.last_event = f"{last.time} {last.kind}: {last.reason}"

    def end(self, event: LoggedEvent) -> None:
        """Record the end of the job."""
        self.ended = event.time
        self.reason = event.reason
        self.next_step = event.text("next_step")
        self.ok = bool(event.data.get("ok"))
        self.exit_code = event.number("exit_code")

    def charge(self, event: LoggedEvent) -> None:
        """Record the use of the restart budget."""
        self.restarts_used = event.number("used") or self.restarts_used
        self.replacements += event.kind == EventKind.REPLACEMENT

    def add_departure(self, event: LoggedEvent) -> None:
        """Record a node that left."""
        self.departures.append(f"{event.time} {event.node}: {event.reason}")

    def add_outage(self, event: LoggedEvent) -> None:
        """Record that the coordinator may not decide, or that one may again."""
        if event.kind == EventKind.AUTHORITY_LOST:
            self.outages.append(f"{event.time} {event.node}: {event.reason}")
        elif self.outages and " until " not in self.outages[-1]:
            self.outages[-1] += f", until {event.time}"

    def add_injected(self, event: LoggedEvent) -> None:
        """Record an injected fault."""
        self.injected.append(f"{event.time} {event.reason}")

    def add_notice(self, event: LoggedEvent) -> None:
        """Record an announcement about a node, such as a preemption."""
        self.notices.append(_notice_line(event))

    def add_health_check(self, event: LoggedEvent) -> None:
        """Record a failed health check that keeps a node from joining."""
        if _keeps_out(event):
            line = f"{event.time} {event.node}: {event.reason}: the node does not join"
            self.notices.append(line)

    def _add_agent(self, here: set[tuple[str, int]], event: LoggedEvent) -> None:
        """Record the agents whose ends are in the log."""
        agent = event.host, event.pid
        if event.kind == EventKind.AGENT_STOPPED:
            here.discard(agent)
            code = event.number("exit_code")
            self.agents_left.append(f"{event.time} {event.node}: exit code {code}: {event.reason}")
        elif event.kind == EventKind.AGENT_STARTED:
            here.add(agent)


_OF_JOB: dict[str, Callable[[JobStory, LoggedEvent], None]] = {
    EventKind.JOB_ENDED: JobStory.end,
    EventKind.RESTART: JobStory.charge,
    EventKind.REPLACEMENT: JobStory.charge,
    EventKind.NODE_DEPARTED: JobStory.add_departure,
    EventKind.AUTHORITY_LOST: JobStory.add_outage,
    EventKind.AUTHORITY_REGAINED: JobStory.add_outage,
    EventKind.COORDINATOR_STARTED: JobStory.add_outage,
    EventKind.FAULT_INJECTED: JobStory.add_injected,
    EventKind.NOTICE: JobStory.add_notice,
    EventKind.HEALTH_CHECK: JobStory.add_health_check,
}


# Events of these kinds change a story; of others it has only the last one.
_TOLD = frozenset({*_OF_JOB, *_OF_ATTEMPT, EventKind.AGENT_STARTED, EventKind.AGENT_STOPPED})


def story_of(job: str, log_dir: str, events: Iterable[LoggedEvent]) -> JobStory:
    """Return the story of the newest run in the events, which may come in any order of hosts."""
    story = JobStory(job=job, log_dir=log_dir)
    table: dict[tuple[int, int], AttemptStory] = {}
    began_s: dict[tuple[int, int], float] = {}
    here: set[tuple[str, int]] = set()
    runs = RunTrack()
    event: LoggedEvent | None = None
    for event in events:
        if event.kind not in _TOLD and (event.round, event.attempt) in table:
            continue
        runs, is_first = runs.after(event, is_over=bool(story.ended))
        if is_first:
            story = JobStory(job=job, log_dir=log_dir, earlier_runs=story.earlier_runs + 1)
            table, began_s = {}, {}
        story.add(event, here)
        if event.round is None or event.attempt is None:
            continue
        fence = event.round, event.attempt
        attempt = table.get(fence)
        if attempt is None:
            attempt = table[fence] = AttemptStory(round=fence[0], attempt=fence[1])
        attempt.add(event)
        if event.kind == EventKind.ROUND_SETTLED:
            began_s[fence] = event.time_s
        elif attempt.ended == event.time and fence in began_s:
            attempt.last(began_s[fence], event.time_s)
    story.complete([table[fence] for fence in sorted(table)], len(here), event)
    return story
