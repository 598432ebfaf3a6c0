"""Where the streams of each worker of a group go: as the plan says, or a LogsSpecs class.

Values only. A stream's path is empty for the console, `/dev/null` for nowhere.
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
    """One worker's: the path of each stream, which of them the console shows as well.

    `kept` are the files that get a copy of what goes to the console.
    """

    paths: Mapping[StreamChoice, str]
    tees: StreamChoice = StreamChoice.NONE
    error_file: str = ""
    # What the class that chose the files wants changed in the worker's environment.
    env: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[StreamChoice, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """All workers' by local rank, and the files that lines with certain texts are copied to."""

    workers: Mapping[int, WorkerFiles]
    filtered: Mapping[StreamChoice, str] = field(default_factory=dict)


# Asked anew for each attempt, with the environments of its workers by local rank.
ChooseFiles = Callable[[Mapping[int, Mapping[str, str]]], GroupFiles]


def filtered_name(std: StreamChoice, first_rank: int) -> str:
    """Return the name of a node's file of copied lines, in the attempt's folder.

    Other nodes than the first have their first rank in it: over a network file system, two hosts
    that append to one file overwrite each other.
    """
    return f"{_FILTERED[std]}.rank_{first_rank}.log" if first_rank else f"{_FILTERED[std]}.log"


def planned(plan: LogPlan, place: WorkerPlace, folder: Path | None, error_file: str) -> WorkerFiles:
    """Return what `plan` says for one worker, whose folder is None where there are no files."""
    nowhere = "" if plan.shows(place.local_rank) else os.devnull
    paths, tees = {}, StreamChoice.NONE
    for std, name in FILE_NAMES.items():
        asked = folder is not None and plan.keeps(place.local_rank, std)
        paths[std] = str(folder / name) if asked and folder is not None else nowhere
        if asked and plan.tees(place.local_rank, std):
            tees |= std
    kept = {std: str(folder / name) for std, name in FILE_NAMES.items() if folder is not None}
    return WorkerFiles(paths, tees, error_file, kept=kept)
