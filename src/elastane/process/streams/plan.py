"""The plan for worker output: its options, the destination of each stream, the console's prefix.

Pure: this module parses and names, and touches no file. The plan or a LogsSpecs class chooses the
destinations; an empty path is the console, and `/dev/null` discards. It fails with `UsageError`,
which names the value and the valid choices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from string import Template

from elastane.errors import UsageError
from elastane.process.files import safe_name
from elastane.protocol.model import Fence

# torchrun's is "[${role_name}${rank}]:". Ranks change here, so the prefix adds node and round.
DEFAULT_PREFIX_TEMPLATE = "[${role_name}${rank} ${node} r${round}.${attempt}]: "
PREFIX_TEMPLATE_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
# torchrun's values for no files at all.
NO_FILES = ("", "/dev/null")

_STD_MAP = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
_RANK_DIR = re.compile(r"round_(\d+)/attempt_(\d+)/rank_(\d+)")


class StreamChoice(IntFlag):
    """A set of a worker's standard streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


StdMap = dict[int, StreamChoice]


def parse_std_map(text: str, local_world_size: int, *, option: str = "--redirects") -> StdMap:
    """Return for each local rank the streams that `text` selects, in torchrun's syntax.

    `text` is one value for all local ranks, `3`, or a map, `0:3,1:2`. A local rank that is missing
    in the map has none. A local rank that this node lacks has no effect, because nodes may differ.
    Unlike in torchrun, a local rank may have several digits.
    """
    text = text.strip()
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(local_world_size), StreamChoice(int(text)))
    if not _STD_MAP.fullmatch(text):
        raise UsageError(
            f"{option}: {text!r} names no streams",
            slug="std-streams",
            expected="0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks",
            next_step=f"{option} 3, or {option} 0:3,10:1",
        )
    named = dict(pair.split(":") for pair in text.split(","))
    by_rank = {int(rank): StreamChoice(int(value)) for rank, value in named.items()}
    return {rank: by_rank.get(rank, StreamChoice.NONE) for rank in range(local_world_size)}


def parse_ranks(text: str, *, option: str = "--local-ranks-filter") -> frozenset[int]:
    """Return the ranks of a list such as `0,2,10-12`; empty text gives none."""
    ranks: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(
                f"{option}: {part!r} of {text!r} is no rank",
                slug="rank-list",
                expected="ranks from 0 with commas between them, or spans of them",
                next_step=f"{option} 0,2 or {option} 0-3",
            )
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def parse_needles(text: str) -> tuple[str, ...]:
    """Return the texts of a list such as `loss,a,,b`, in which two commas are one literal comma.

    An empty text would match every line, so it is left out.
    """
    items = text.replace(",,", "\0").split(",")
    return tuple(item.replace("\0", ",") for item in items if item)


def prefix_template(environ: Mapping[str, str]) -> str:
    """Return the console's prefix template: the environment's, or else elastane's."""
    return environ.get(PREFIX_TEMPLATE_ENV) or DEFAULT_PREFIX_TEMPLATE


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The identity of a worker, for its folder and its prefix."""

    fence: Fence
    local_rank: int
    rank: int
    role: str
    node: str


@dataclass(frozen=True)
class LogPlan:
    """The plan of `--log-dir`, `--redirects`, `--tee` and `--local-ranks-filter` for one node.

    `base_dir` empty or `/dev/null`: no files, all output goes to the console, as in torchrun.
    `console_ranks`: the local ranks that the console displays; empty means all. `needles`: the
    texts of --duplicate-stdout-filters and --duplicate-stderr-filters.
    """

    base_dir: str
    redirects: StdMap = field(default_factory=dict)
    tee: StdMap = field(default_factory=dict)
    console_ranks: frozenset[int] = frozenset()
    prefix: str = DEFAULT_PREFIX_TEMPLATE
    needles: Mapping[StreamChoice, tuple[str, ...]] = field(default_factory=dict)

    @property
    def has_files(self) -> bool:
        """Whether there is a folder to write to."""
        return self.base_dir not in NO_FILES

    def keeps(self, local_rank: int, std: StreamChoice) -> bool:
        """Return whether this stream goes to a file (tee implies it)."""
        asked = self.redirects.get(local_rank, StreamChoice.NONE) | self.tee.get(
            local_rank, StreamChoice.NONE
        )
        return self.has_files and std in asked

    def shows(self, local_rank: int) -> bool:
        """Return whether the console may display this local rank."""
        return not self.console_ranks or local_rank in self.console_ranks

    def tees(self, local_rank: int, std: StreamChoice) -> bool:
        """Return whether the console displays the file of this stream."""
        asked = self.tee.get(local_rank, StreamChoice.NONE)
        return self.has_files and std in asked and self.shows(local_rank)

    def job_dir(self, job: str) -> Path:
        """Return the folder of all output of `job`."""
        return Path(self.base_dir) / safe_name(job)

    def attempt_dir(self, job: str, fence: Fence) -> Path:
        """Return the folder of one attempt; on shared storage, all nodes share it."""
        return self.job_dir(job) / f"round_{fence.round}" / f"attempt_{fence.attempt}"

    def rank_dir(self, job: str, fence: Fence, rank: int) -> Path:
        """Return the folder of one worker in one attempt; the global rank makes it unique."""
        return self.attempt_dir(job, fence) / f"rank_{rank}"

    def line_prefix(self, place: WorkerPlace) -> bytes:
        """Return the prefix of each console line of this worker."""
        text = Template(self.prefix).safe_substitute(
            role_name=place.role,
            rank=place.rank,
            local_rank=place.local_rank,
            node=place.node,
            round=place.fence.round,
            attempt=place.fence.attempt,
        )
        return text.encode("utf-8", "replace")


def parse_rank_dir(relative: str) -> tuple[Fence, int] | None:
    """Return fence and rank of a folder below the job's, or None if it is not a worker's."""
    match = _RANK_DIR.fullmatch(relative)
    if match is None:
        return None
    return Fence(int(match[1]), int(match[2])), int(match[3])


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
