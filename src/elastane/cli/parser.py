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
