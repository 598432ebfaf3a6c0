"""The only module that reads this process's environment variables.

All other modules receive a mapping, so that behaviour follows from arguments. It knows no
variable's meaning and cannot fail.
"""

from __future__ import annotations

import os


def snapshot() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def get(name: str, default: str = "") -> str:
    """Return one variable, or `default` if it is not set."""
    return os.environ.get(name, default)
