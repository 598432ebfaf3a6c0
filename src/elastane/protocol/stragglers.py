"""Finds the ranks that make the others wait in each step, the stragglers. Pure.

All workers of a data-parallel world take equally long for a step, since each waits for the slowest.
So the time of a step does not show a slow worker. Its own part of the step shows it: the share of
the step in which the worker did not wait in collectives. A straggler has a larger share than the
other ranks.

A `Pace` summarises the last WINDOW_STEPS steps of one worker. `StragglerRules` compares the paces
of all ranks whenever each has made new steps:

    share of a rank >= NAMED_RATIO x that of the others, beyond noise    it is named
    share of a named rank < ENDED_RATIO x that of the others             it is over

The share is taken in each step, so steps that are long for all ranks change nothing. Each rank
takes the median over the COUNTED_STEPS shortest steps of its window. These are the same steps on
all ranks, since a step is equally long for all. That leaves out single slow steps of any rank, such
as a save or an evaluation. "That of the others" is the lower median of the other ranks.

Noise is learned from the job: how much the shares of ranks differ at each comparison, in the median
over the ranks, so that one straggler does not count. In a world of two ranks either may be the
straggler, so the scatter of their shares over steps is the noise. A rank is not named within
NOISE_SIGMAS. It is not named either where single steps differ more than the rank from the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Annotated

import msgspec

from elastane.protocol.limits import COUNT_MAX
from elastane.protocol.model import Count

# The newest steps of a worker, and how many of them count.
WINDOW_STEPS = 16
COUNTED_STEPS = 10
NAMED_RATIO = 1.2
ENDED_RATIO = 1.1
# Ranks are compared once each has made this many new steps, ...
COMPARED_STEPS = 4
# ... and named from this comparison on, since the noise of a new world is not known before.
COMPARISONS_MIN = 5
# A rank is named beyond this multiple of the noise. It is high because neighbouring windows share
# steps: a job has fewer independent windows than comparisons.
NOISE_SIGMAS = 5.5
# A rank is named only where it differs by this multiple of the spread of single steps.
SPREAD_FACTOR = 1.5
# The weight of the newest comparison in the learned noise, after the first 1 / NOISE_NEWEST ones.
NOISE_NEWEST = 0.05
# A rank that is slower by less than this is not named: clock and interpreter have such noise.
EXCESS_MIN_S = 0.002
# A reason is given if it explains this share of the time by which a rank is slower.
REASON_SHARE = 0.5
# Workers of one node whose paces a heartbeat carries. A node with more sends none.
PACES_MAX = 64
# A whole slow node is named once for each of its ranks, up to this number.
NAMED_MAX = 8
# Own parts in a line of the event log: of all workers of a world of at most LISTED_MAX, otherwise
# of the slowest ones.
LISTED_MAX = 64
LISTED_SLOWEST = 10
# A part shorter than this is logged as this long.
_LEAST_MS = 0.01

# Half of all normal deviations are smaller than _MEDIAN_SIGMAS sigma. In a world of two, half of
# the shares are 1; three of four are within _QUARTILE_SIGMAS sigma of a worker's step of that.
_MEDIAN_SIGMAS, _QUARTILE, _QUARTILE_SIGMAS = 0.6745, 0.75, 0.74
# The standard deviation of the median of n values, as a multiple of that of their mean.
_MEDIAN_SCATTER = 1.2533
# A share smaller than this counts as this one, since its logarithm is taken.
_LEAST = 0.01

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class Why(StrEnum):
    """Why a straggler's own part is longer. The values are stable: events have them."""

    LOADER = "loader"
    CPU_SHARE = "cpu-share"
    COMPUTE = "compute"
    OTHER = "other"


_WORDS = {
    Why.LOADER: "it waits longer for its data loader",
    Why.CPU_SHARE: "it waits for a processor that others use",
    Why.COMPUTE: "it computes longer",
    Why.OTHER: "it neither computes nor loads data then: it sleeps, is stopped, or waits for a"
    " device or a disk",
}


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """The last WINDOW_STEPS steps of one worker.

    `step` counts the steps that the worker has recorded. `share` is the median of its own part of a
    step, as a share of the step. Three of four shares are no further from it than `spread`.

    The rest is in seconds per step. `whole_s` is the median of the whole step, `loads_s` of the
    time in the data loader. `runs_s` and `queues_s` are means of the time in which the main thread
    ran, and in which it waited for a processor.
    """

    rank: Count
    step: Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    spread: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    whole_s: Seconds
    loads_s: Seconds
    runs_s: Seconds = 0.0
    queues_s: Seconds = 0.0


class StepTimes(msgspec.Struct, frozen=True):
    """One step of one worker in seconds: all of it, its waits in collectives and for its loader."""

    whole_s: float
    waits_s: float
    loads_s: float

    @property
    def share(self) -> float:
        """The worker's own part."""
        return min(1.0, max(0.0, 1.0 - self.waits_s / self.whole_s)) if self.whole_s > 0 else 1.0


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank for which the others wait in each step, and why."""

    rank: int
    why: Why
    own_s: float
    others_s: float

    @property
    def ratio(self) -> float:
        """The rank's own part of a step as a multiple of that of the others."""
        return self.own_s / self.others_s

    def sentence(self, node_id: str) -> str:
        """Return a sentence for people: the rank, its node, both times and the reason."""
        return (
            f"rank {self.rank} on node {node_id} makes the others wait in each step: its own part"
            f" takes {self.own_s:.3g} s, theirs {self.others_s:.3g} s ({self.ratio:.2f} times);"
            f" {_WORDS[self.why]}"
        )


def pace_of(
    rank: int, step: int, times: Sequence[StepTimes], runs_s: float = 0.0, queues_s: float = 0.0
) -> Pace:
    """Return the pace of a worker from its last WINDOW_STEPS steps."""
    counted = sorted(times, key=lambda each: each.whole_s)[:COUNTED_STEPS]
    shares = [each.share for each in counted]
    share = median(shares)
    return Pace(
        rank=rank,
        step=step,
        share=share,
        spread=sorted(abs(each - share) for each in shares)[int(_QUARTILE * len(shares))],
        whole_s=median(each.whole_s for each in counted),
        loads_s=median(each.loads_s for each in counted),
        runs_s=runs_s,
        queues_s=queues_s,
    )


class StragglerRules:
    """Finds the ranks of one world that are stragglers, from one comparison to the next."""

    def __init__(self) -> None:
        self.named: dict[int, Straggler] = {}
        self._compared: dict[int, int] = {}
        self._comparisons = 0
        self._noise = 0.0

    def look(
        self, paces: Mapping[int, Pace], world_size: int
    ) -> tuple[list[Straggler], list[Straggler]]:
        """Compare the ranks; return new stragglers, and those that are stragglers no longer.

        Ranks are compared only if all paces are known and each rank has made new steps.
        """
        if world_size < 2 or len(paces) != world_size or not self._has_news(paces):
            return [], []
        self._compared = {rank: pace.step for rank, pace in paces.items()}
        order = sorted(pace.share for pace in paces.values())
        others = {rank: max(_LEAST, _others(order, pace.share)) for rank, pace in paces.items()}
        self._learn(paces, others)
        spread = median(pace.spread / max(_LEAST, pace.share) for pace in paces.values())
        begun, ended = [], []
        for rank, pace in paces.items():
            if rank in self.named:
                if pace.share < ENDED_RATIO * others[rank]:
                    ended.append(self.named.pop(rank))
            elif len(self.named) < NAMED_MAX and self._is_slow(pace, others[rank], spread):
                self.named[rank] = _straggler(pace, paces, others[rank])
                begun.append(self.named[rank])
        return begun, ended

    def _is_slow(self, pace: Pace, others: float, spread: float) -> bool:
        noise = max(NOISE_SIGMAS * self._noise, SPREAD_FACTOR * spread)
        is_known = self._comparisons >= COMPARISONS_MIN
        is_beyond = math.log(max(_LEAST, pace.share) / others) >= max(math.log(NAMED_RATIO), noise)
        return is_known and is_beyond and (pace.share - others) * pace.whole_s >= EXCESS_MIN_S

    def _learn(self, paces: Mapping[int, Pace], others: Mapping[int, float]) -> None:
        """Learn how much ranks differ by chance, as the standard deviation of logarithms."""
        self._comparisons += 1
        if len(paces) == 2:
            noise = _scatter(paces.values())
        else:
            differences = (_difference(pace.share, others[rank]) for rank, pace in paces.items())
            noise = median(differences) / _MEDIAN_SIGMAS
        newest = max(NOISE_NEWEST, 1 / self._comparisons)
        self._noise += newest * (noise - self._noise)

    def _has_news(self, paces: Mapping[int, Pace]) -> bool:
        known = self._compared
        return all(
            pace.step < known.get(rank, 0) or pace.step - known.get(rank, 0) >= COMPARED_STEPS
            for rank, pace in paces.items()
        )


class ListedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The own parts of a step of some ranks at one time, as the event log has them.

    `own_ms`: a number for each of `ranks`, separated by commas. `median_ms`: over all ranks.
    """

    ranks: tuple[int, ...]
    own_ms: str
    median_ms: float


def listed_parts(paces: Mapping[int, Pace]) -> ListedParts:
    """Return the own parts of all ranks, or of the slowest of more than LISTED_MAX."""
    own_ms = {rank: 1000 * paces[rank].share * paces[rank].whole_s for rank in sorted(paces)}
    ranks = [*own_ms]
    if len(ranks) > LISTED_MAX:
        ranks = sorted(sorted(ranks, key=lambda rank: -own_ms[rank])[:LISTED_SLOWEST])
    return ListedParts(
        ranks=tuple(ranks),
        own_ms=",".join(_shown_ms(own_ms[rank]) for rank in ranks),
        median_ms=round(median(own_ms.values()), 3),
    )


def _shown_ms(own_ms: float) -> str:
    """Return a time in few characters, since one field has the times of all ranks."""
    return f"{own_ms:.0f}" if own_ms >= 1000 else f"{max(_LEAST_MS, own_ms):.3g}"


def _others(order: Sequence[float], share: float) -> float:
    """Return the lower median of all shares but this one; `order` has all of them, sorted."""
    at = (len(order) - 2) // 2
    return order[at + 1] if share <= order[at] else order[at]


def _difference(share: float, others: float) -> float:
    return abs(math.log(max(_LEAST, share) / others))


def _scatter(paces: Collection[Pace]) -> float:
    """Return the standard deviation of two medians' difference, from that of single steps."""
    spread = median(pace.spread / max(_LEAST, pace.share) for pace in paces)
    return spread / _QUARTILE_SIGMAS * _MEDIAN_SCATTER * math.sqrt(2 / COUNTED_STEPS)


def _straggler(pace: Pace, paces: Mapping[int, Pace], others: float) -> Straggler:
    return Straggler(
        rank=pace.rank,
        why=_why(pace, paces, (pace.share - others) * pace.whole_s),
        own_s=pace.share * pace.whole_s,
        others_s=others * pace.whole_s,
    )


def _why(pace: Pace, paces: Mapping[int, Pace], excess_s: float) -> Why:
    others = [each for each in paces.values() if each.rank != pace.rank]
    parts = (
        (Why.LOADER, pace.loads_s - median(each.loads_s for each in others)),
        (Why.CPU_SHARE, pace.queues_s - median(each.queues_s for each in others)),
        (Why.COMPUTE, pace.runs_s - median(each.runs_s for each in others)),
    )
    return next((why for why, more_s in parts if more_s >= REASON_SHARE * excess_s), Why.OTHER)
