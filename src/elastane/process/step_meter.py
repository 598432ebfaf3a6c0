"""Measures the steps of this worker: how long each takes, and how long it waits meanwhile.

Owns this worker's step times on its status page, from which its agent finds stragglers
(`protocol.stragglers`). Only the main thread is measured, since it makes the steps. It never fails;
without a page it measures nothing, and a fork of the worker has none.

A step ends at a mark. The best kind of mark that a script makes counts: its steps of elastane, else
the backward passes of its DistributedDataParallel, else the batches of its data loader. Of several
models or loaders one counts, until another has made AWAY_MARKS marks alone.
"""

from __future__ import annotations

import os
import threading
import time
from enum import IntEnum

from elastane.process import pauses
from elastane.process.status_page import StepRecords, WorkerPage

# A script that trains another model, or reads another loader, from some step on.
AWAY_MARKS = 64


class StepMark(IntEnum):
    """The kinds of marks that end a step, the better ones later."""

    BATCH = 1
    BACKWARD = 2
    STEP = 3


class StepMeter:
    """The meter of one worker; `waits_ns` and `loads_ns` only grow."""

    def __init__(self, records: StepRecords) -> None:
        self._records = records
        self.thread = threading.main_thread().ident
        self.waits_ns = self.loads_ns = 0
        self._kind = 0
        self._marker = 0
        self._away = 0
        self._begun: tuple[int, int, int] | None = None

    def mark(self, kind: StepMark, marker: int = 0) -> None:
        """End a step, and begin the next one; `marker` names the model or loader."""
        if kind < self._kind or threading.get_ident() != self.thread:
            return
        if kind > self._kind:
            self._change(kind, marker)
        elif marker != self._marker:
            self._away += 1
            if self._away < AWAY_MARKS:
                return
            self._change(kind, marker)
        now = time.monotonic_ns(), self.waits_ns, self.loads_ns
        if self._begun is not None:
            self._records.add(*(new - old for new, old in zip(now, self._begun, strict=True)))
        self._begun, self._away = now, 0
        if kind > StepMark.BATCH:
            pauses.step_ended()

    def _change(self, kind: StepMark, marker: int) -> None:
        self._kind, self._marker, self._begun = kind, marker, None
        self._records.forget()


class _OfProcess:
    def __init__(self) -> None:
        self.meter: StepMeter | None = None

    def forget(self) -> None:
        """Measure nothing in a forked child."""
        self.meter = None


_process = _OfProcess()
os.register_at_fork(after_in_child=_process.forget)


def begin(page: WorkerPage) -> StepMeter:
    """Measure the steps of this process on `page`."""
    _process.meter = StepMeter(page.step_records())
    return _process.meter


def mark(kind: StepMark, marker: int = 0) -> None:
    """End a step of this process, if it is measured."""
    if _process.meter is not None:
        _process.meter.mark(kind, marker)


class _Span:
    """Time in which the main thread waits; an outer span includes inner ones.

    Spans may also overlap: two models in one backward pass begin and end theirs in one order. A
    span never takes back what another one has counted, so the times only grow.
    """

    def __enter__(self) -> None:
        meter = _process.meter
        self._meter = meter if meter and threading.get_ident() == meter.thread else None
        if self._meter is not None:
            self._before = self._meter.waits_ns, self._meter.loads_ns
            self._begun_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            self._count(self._meter, time.monotonic_ns() - self._begun_ns)

    def _count(self, meter: StepMeter, took_ns: int) -> None:
        raise NotImplementedError


class Waiting(_Span):
    """`with Waiting():` around a wait for other workers."""

    def _count(self, meter: StepMeter, took_ns: int) -> None:
        meter.waits_ns = max(meter.waits_ns, self._before[0] + took_ns)
        meter.loads_ns = self._before[1]


class Loading(_Span):
    """`with Loading():` around a wait for data; waits for other workers in it are left out."""

    def _count(self, meter: StepMeter, took_ns: int) -> None:
        waited_ns = meter.waits_ns - self._before[0]
        meter.loads_ns = self._before[1] + max(0, took_ns - waited_ns)
