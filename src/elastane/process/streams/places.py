"""The destinations of each worker's streams, chosen by the plan or by a LogsSpecs class.

Values only. An empty path is the console, `/dev/null` discards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastane.process.streams.plan import LogPlan, StreamChoice, WorkerPlace

FILE_NAMES = {StreamChoice.OUT: "stdout.log", StreamChoice.ERR: "stderr.log"}
_FILTERED = {StreamChoice.OUT: "filtered_stdout", StreamChoice.ERR: "filtered_stderr"}


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """One worker's destinations: the path of each stream, and the streams displayed as well.

    `kept`: the files that get a copy of the streams that go to the console.
    """

    paths: Mapping[StreamChoice, str]
    tees: StreamChoice = StreamChoice.NONE
    error_file: str = ""
    # The changes to the worker's environment, by the class that chose the files.
    env: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[StreamChoice, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """The destinations of all workers by local rank, and the files for filtered lines."""

    workers: Mapping[int, WorkerFiles]
    filtered: Mapping[StreamChoice, str] = field(default_factory=dict)


# Called for each attempt, with the environments of its workers by local rank.
ChooseFiles = Callable[[Mapping[int, Mapping[str, str]]], GroupFiles]


def filtered_name(std: StreamChoice, first_rank: int) -> str:
    """Return the name of a node's file of filtered lines, in the attempt's folder.

    Nodes other than the first include their first rank: over a network file system, two hosts that
    append to one file overwrite each other.
    """
    return f"{_FILTERED[std]}.rank_{first_rank}.log" if first_rank else f"{_FILTERED[std]}.log"


def planned(plan: LogPlan, place: WorkerPlace, folder: Path | None, error_file: str) -> WorkerFiles:
    """Return the plan's destinations for one worker; `folder` is None if there are no files."""
    nowhere = "" if plan.shows(place.local_rank) else os.devnull
    paths, tees = {}, StreamChoice.NONE
    for std, name in FILE_NAMES.items():
        asked = folder is not None and plan.keeps(place.local_rank, std)
        paths[std] = str(folder / name) if asked and folder is not None else nowhere
        if asked and plan.tees(place.local_rank, std):
            tees |= std
    kept = {std: str(folder / name) for std, name in FILE_NAMES.items() if folder is not None}
    return WorkerFiles(paths, tees, error_file, kept=kept)
