"""The parser of most verbs: argparse with elastane's errors."""

from __future__ import annotations

import argparse
from typing import Any

from elastane.errors import UsageError


class VerbParser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are UsageErrors that name the nearest option."""

    def error(self, message: str) -> Any:
        """Raise UsageError instead of exiting."""
        raise UsageError(
            message,
            slug="unknown-option" if "unrecognized" in message else "usage",
            expected=self._nearest(message),
            next_step=f"{self.prog} --help",
        )

    def _nearest(self, message: str) -> str:
        import difflib

        known = list(self._option_string_actions)
        for word in message.split():
            if word.startswith("-"):
                name = word.rstrip(":,").partition("=")[0]
                near = difflib.get_close_matches(name, known, n=1)
                if near and near[0] != name:
                    return f"did you mean {near[0]}?"
        return ""


def add_job_options(
    parser: argparse.ArgumentParser, about: str = "name of the job, or its log folder", **more: Any
) -> None:
    """Add the job that a verb is about, by name or log folder, and where its logs are.

    `about` is the help of the job, `more` are arguments of `add_argument` for it.
    """
    parser.add_argument("job", metavar="JOB_OR_DIR", help=about, **more)
    text = "the --log-dir of elastane run"
    parser.add_argument("--log-dir", metavar="DIR", default="", help=text)
