"""The exception tree and the exit codes.

Every error that a person can meet is made of the same parts: what is wrong (with the value and
its name), where, what was expected, one next step that can be copied, and a slug that is a
heading in docs/errors.md. This module imports nothing of elastane.
"""

from __future__ import annotations

import copyreg
import sys
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit status of a launcher, by which a scheduler decides."""

    DONE = 0
    WORKER_FAILED = 1
    USAGE = 2
    NODE_UNFIT = 69  # sysexits EX_UNAVAILABLE: another node may do better
    TRY_AGAIN = 75  # sysexits EX_TEMPFAIL
    CONFIGURATION = 78  # sysexits EX_CONFIG
    DRAINED = 143  # 128 + SIGTERM: stopped in order, on request


class ElastaneError(Exception):
    """Base of every error whose cause is the environment or the user, not a bug of elastane."""

    exit_code: ExitCode = ExitCode.WORKER_FAILED

    def __init__(
        self, what: str, *, slug: str, where: str = "", expected: str = "", next_step: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.slug = slug
        self.where = where
        self.expected = expected
        self.next_step = next_step

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle, by which pools of processes pass errors on."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    @property
    def line(self) -> str:
        """The first line of the error: its text and its slug."""
        return f"{self.what} [{self.slug}]"

    def __str__(self) -> str:
        lines = [self.line]
        for label, text in (
            ("where", self.where),
            ("expected", self.expected),
            ("next", self.next_step),
        ):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


class UsageError(ElastaneError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class ConfigurationError(ElastaneError):
    """The job, the environment or a file is configured in a way that cannot work."""

    exit_code = ExitCode.CONFIGURATION


def missing_extra(what: str, extra: str, expected: str = "") -> ConfigurationError:
    """Return the error of a feature whose optional packages are not installed.

    `what` says which feature lacks which package, `extra` is the extra of elastane that has it, and
    `expected` the version or the alternative, if there is one to name.
    """
    return ConfigurationError(
        what,
        slug="extra-missing",
        where=sys.executable,
        expected=expected or f"the packages of elastane's extra `{extra}`",
        next_step=f"pip install 'elastane[{extra}]'",
    )


class NodeUnfitError(ElastaneError):
    """This node cannot take part; another may."""

    exit_code = ExitCode.NODE_UNFIT


class MembershipError(ElastaneError):
    """The nodes could not agree on a membership."""

    exit_code = ExitCode.TRY_AGAIN


class JoinTimeoutError(MembershipError):
    """Too few nodes came within the time that was allowed."""


class RendezvousRefusedError(MembershipError):
    """The coordinator refused to admit this agent."""

    exit_code = ExitCode.CONFIGURATION


class JobClosedError(MembershipError):
    """The job has already ended."""

    exit_code = ExitCode.CONFIGURATION


class WireError(ElastaneError):
    """A peer sent bytes that are not a frame of ours, or proved no knowledge of the secret."""


class StoreError(ElastaneError):
    """The store cannot be reached or answers against its protocol."""

    exit_code = ExitCode.TRY_AGAIN


class LeaseLostError(StoreError):
    """A lease was lost: its former holder must stop deciding."""


class WorkerFailedError(ElastaneError):
    """Workers failed more often than the restart budget allows."""


class PeerLostError(ElastaneError):
    """A member of the world was lost, or the world was ended: its open operations are void."""


class JobError(ElastaneError):
    """The library inside a worker is used in a way that cannot work, or is on its own."""


class StateError(ElastaneError):
    """A state cannot be encoded, or did not arrive whole."""


class CheckpointError(ElastaneError):
    """A checkpoint cannot be written, found or read."""


class StorageError(ElastaneError):
    """The checkpoint storage cannot be reached, or refuses a write."""

    exit_code = ExitCode.TRY_AGAIN


class FencedError(CheckpointError):
    """A process of a later round has published: a save by this one would be outdated.

    `newer` is the era, round, attempt and step of the newest checkpoint.
    """

    def __init__(
        self, what: str, *, newer: tuple[int, int, int, int] = (0, 0, 0, 0), **parts: str
    ) -> None:
        super().__init__(what, **parts)
        self.newer = newer
