"""What a job promises, as checks of what its workers noted and its event log tells. Pure.

A worker notes the body of each step before it makes it, and the commit after it. `check_job` takes
these notes with the worlds, charges and ends of the event log. It raises BrokenJobError, which
names what cannot be right together. All times are in seconds of one clock, so the hosts of a
history are on one machine.

The weights are exact: the digest after a step depends on its number alone, and a step has the same
samples in every world. So a sample that was lost or used twice changes all later digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

FenceOf = tuple[int, int]


class BrokenJobError(AssertionError):
    """A promise of docs/guarantees.md that did not hold in a history."""


@dataclass(frozen=True)
class Body:
    """One body of one step in one worker process, and its commit where there was one.

    `process` is unique in a history, also where a host uses a process number again. `step` counts
    from 0. `before` and `after` are digests of the weights; `after` and `committed_s` are None
    where the process noted no commit.
    """

    process: str
    node: str
    fence: FenceOf
    rank: int
    size: int
    step: int
    samples: tuple[int, ...]
    before: str
    begun_s: float
    after: str | None = None
    committed_s: float | None = None

    def __str__(self) -> str:
        end = "no commit" if self.committed_s is None else f"committed at {self.committed_s:.3f}"
        return (
            f"step {self.step} in {self.fence}, rank {self.rank} of {self.size} ({self.process}):"
            f" begun at {self.begun_s:.3f}, {end}"
        )


@dataclass(frozen=True)
class SettledWorld:
    """A world as the event log has it: nodes in the order of their ranks, and when it began."""

    fence: FenceOf
    nodes: tuple[str, ...]
    size: int
    at_s: float


@dataclass(frozen=True)
class DurableState:
    """A checkpoint: how many steps it holds, when its save began, and by when it was durable."""

    steps: int
    began_s: float
    at_s: float


@dataclass(frozen=True)
class ExactStep:
    """What a step must be: its samples in ascending order, the digests before and after it."""

    samples: tuple[int, ...]
    before: str
    after: str


@dataclass(frozen=True)
class SeenJob:
    """All that was seen of a job.

    `started`: node and process number of each worker of the event log. `charged`: restarts used, by
    the event log. `codes`: exit codes of the agents that were there at the end. `is_ok`: whether
    the event log has the end of the job, and it was a good one.
    """

    bodies: Sequence[Body]
    worlds: Sequence[SettledWorld]
    saves: Sequence[DurableState]
    started: frozenset[tuple[str, int]]
    charged: int
    codes: Sequence[tuple[str, int]]
    is_ok: bool


@dataclass(frozen=True)
class Promised:
    """What the history allows: sizes of worlds, harmed workers, and what each step must be."""

    size_min: int
    size_max: int
    harmed_workers: int
    steps: Sequence[ExactStep]


def check_job(seen: SeenJob, promised: Promised) -> dict[str, int]:
    """Check all that a job promises, and return how much was seen."""
    worlds: dict[FenceOf, list[Body]] = defaultdict(list)
    for body in seen.bodies:
        worlds[body.fence].append(body)
    for fence in sorted(worlds):
        check_places(worlds[fence], promised)
        check_commits(worlds[fence], promised)
    check_one_side(seen.bodies)
    check_processes(seen.bodies)
    check_surviving_history(seen.bodies)
    check_saves(seen)
    check_events(seen)
    check_charges(seen, promised)
    check_end(seen)
    return counts(seen)


def counts(seen: SeenJob) -> dict[str, int]:
    """How much of everything was seen."""
    committed = [body for body in seen.bodies if body.committed_s is not None]
    return {
        "worlds": len({body.fence for body in committed}),
        "processes": len({body.process for body in seen.bodies}),
        "steps": len({body.step for body in committed}),
        "bodies without commit": len(seen.bodies) - len(committed),
        "charged": seen.charged,
    }


def check_places(bodies: Iterable[Body], promised: Promised) -> None:
    """Check that the processes of one world have distinct ranks, and agree about its size."""
    of_rank: dict[int, Body] = {}
    of_process: dict[str, Body] = {}
    for body in bodies:
        for other in (
            of_rank.setdefault(body.rank, body),
            of_process.setdefault(body.process, body),
        ):
            if (other.process, other.rank, other.size) != (body.process, body.rank, body.size):
                raise BrokenJobError(f"two places in one world do not agree:\n  {other}\n  {body}")
        if not 0 <= body.rank < body.size:
            raise BrokenJobError(f"a rank is outside of its world:\n  {body}")
        if not promised.size_min <= body.size <= promised.size_max:
            bounds = f"{promised.size_min} to {promised.size_max}"
            raise BrokenJobError(f"a world of {body.size} workers, not {bounds}:\n  {body}")


def check_commits(bodies: Iterable[Body], promised: Promised) -> None:
    """Check each committed step of one world: all members made it, from and to the right state."""
    of_step: dict[int, list[Body]] = defaultdict(list)
    for body in bodies:
        of_step[body.step].append(body)
    for step, members in of_step.items():
        committed = [body for body in members if body.committed_s is not None]
        if not committed:
            continue
        exact = promised.steps[step]
        for body in committed:
            if body.after != exact.after:
                raise BrokenJobError(f"wrong weights after a committed step:\n  {body}")
        ranks = sorted(body.rank for body in members)
        if ranks != list(range(committed[0].size)):
            raise BrokenJobError(f"ranks {ranks} alone made a committed step:\n  {committed[0]}")
        for body in members:
            if body.before != exact.before:
                raise BrokenJobError(f"wrong weights before a committed step:\n  {body}")
        samples = sorted(sample for body in members for sample in body.samples)
        if samples != list(exact.samples):
            lacking, more = _apart(exact.samples, samples)
            raise BrokenJobError(
                f"samples {lacking} are lacking and {more} are too many:\n  {committed[0]}"
            )


def _apart(expected: Sequence[int], found: Sequence[int]) -> tuple[list[int], list[int]]:
    lacking, more = list(expected), []
    for sample in found:
        if sample in lacking:
            lacking.remove(sample)
        else:
            more.append(sample)
    return lacking, more


def check_one_side(bodies: Iterable[Body]) -> None:
    """Check that no world makes a step once a later world has committed one.

    A member that was cut off may hear of a commit late, so what counts is when a step began: it
    cannot be made before the last member has begun it.
    """
    begun: dict[tuple[FenceOf, int], Body] = {}
    first: dict[FenceOf, Body] = {}
    committed: set[tuple[FenceOf, int]] = set()
    for body in bodies:
        key = body.fence, body.step
        if key not in begun or body.begun_s > begun[key].begun_s:
            begun[key] = body
        if body.committed_s is not None:
            committed.add(key)
            earliest = first.setdefault(body.fence, body)
            if body.committed_s < (earliest.committed_s or 0.0):
                first[body.fence] = body
    later: Body | None = None
    for fence in sorted(first, reverse=True):
        for key in committed:
            if later is not None and key[0] == fence and begun[key].begun_s > _at_s(later):
                raise BrokenJobError(
                    f"two worlds train at the same time:\n  {begun[key]}\n  {later}"
                )
        if later is None or _at_s(first[fence]) < _at_s(later):
            later = first[fence]


def _at_s(body: Body) -> float:
    assert body.committed_s is not None
    return body.committed_s


def check_processes(bodies: Iterable[Body]) -> None:
    """Check that each process goes forward: in worlds, and in the steps that it commits.

    All members make a committed step, so no step that a survivor has committed comes again.
    """
    of_process: dict[str, list[Body]] = defaultdict(list)
    for body in bodies:
        of_process[body.process].append(body)
    for own in of_process.values():
        for earlier, later in pairwise(own):
            is_again = earlier.committed_s is not None and later.step <= earlier.step
            if later.fence < earlier.fence or is_again or later.step < earlier.step:
                raise BrokenJobError(f"a worker went back:\n  {earlier}\n  {later}")


def check_surviving_history(bodies: Iterable[Body]) -> None:
    """Check that each step up to the last is in the surviving history.

    A world that continues at a step makes all commits from there on in earlier worlds void.
    """
    steps: dict[FenceOf, set[int]] = defaultdict(set)
    for body in bodies:
        if body.committed_s is not None:
            steps[body.fence].add(body.step)
    if not steps:
        raise BrokenJobError("no step was committed")
    surviving: dict[int, FenceOf] = {}
    for fence in sorted(steps):
        begins = min(steps[fence])
        surviving = {step: of for step, of in surviving.items() if step < begins}
        surviving |= dict.fromkeys(steps[fence], fence)
    lacking = sorted(set(range(max(surviving) + 1)) - set(surviving))
    if lacking:
        raise BrokenJobError(f"steps {lacking} of {max(surviving) + 1} are in no surviving world")


def check_saves(seen: SeenJob) -> None:
    """Check that no world begins at an earlier step than a checkpoint that was durable before it.

    If the checkpoint was not durable yet, such a world makes it void.
    """
    first: dict[FenceOf, Body] = {}
    for body in seen.bodies:
        known = first.get(body.fence)
        if body.committed_s is not None and (known is None or body.step < known.step):
            first[body.fence] = body
    began_s = {world.fence: world.at_s for world in seen.worlds}
    for save in seen.saves:
        saved = _saved_by(save, seen.bodies)
        behind = [f for f in sorted(first) if f > saved and first[f].step < save.steps]
        if behind and began_s.get(behind[0], 0.0) > save.at_s:
            raise BrokenJobError(
                f"a world begins with an earlier step than a checkpoint of {saved}:\n"
                f"  {save}\n  {first[behind[0]]}"
            )


def _saved_by(save: DurableState, bodies: Iterable[Body]) -> FenceOf:
    """Return the world whose last step the checkpoint holds."""
    worlds = [
        body.fence
        for body in bodies
        if body.step == save.steps - 1
        and body.committed_s is not None
        and body.committed_s <= save.began_s
    ]
    if not worlds:
        raise BrokenJobError(f"a checkpoint holds a step that was not committed before: {save}")
    return max(worlds)


def check_events(seen: SeenJob) -> None:
    """Check that the event log has each world that stepped, and each process that did."""
    of_round: dict[int, SettledWorld] = {}
    of_fence: dict[FenceOf, SettledWorld] = {}
    for world in seen.worlds:
        other = of_round.setdefault(world.fence[0], world)
        if set(other.nodes) != set(world.nodes):
            raise BrokenJobError(f"two memberships in one round:\n  {other}\n  {world}")
        again = of_fence.setdefault(world.fence, world)
        if (again.nodes, again.size) != (world.nodes, world.size):
            raise BrokenJobError(f"one fence of two worlds:\n  {again}\n  {world}")
    for body in seen.bodies:
        if body.fence not in of_fence:
            raise BrokenJobError(f"the event log does not tell of its world:\n  {body}")
        world = of_fence[body.fence]
        if body.node not in world.nodes or body.size != world.size:
            raise BrokenJobError(f"a worker is not of its world {world}:\n  {body}")
        pid = int(body.process.split(".")[1])
        if (body.node, pid) not in seen.started:
            raise BrokenJobError(f"the event log does not tell of its start:\n  {body}")


def check_charges(seen: SeenJob, promised: Promised) -> None:
    """Check that faults of hosts, agents and stores used no restart."""
    if seen.charged > promised.harmed_workers:
        raise BrokenJobError(
            f"{seen.charged} restarts were charged, and {promised.harmed_workers} workers harmed"
        )


def check_end(seen: SeenJob) -> None:
    """Check that the job ended well, and each agent that was there."""
    if not seen.is_ok:
        raise BrokenJobError("the event log tells of no good end")
    if wrong := [(node, code) for node, code in seen.codes if code]:
        raise BrokenJobError(f"agents ended with {wrong}, and the job ended well")
