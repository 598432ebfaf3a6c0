"""The version of elastane, apart from the public names of the package: every room may import it."""

from __future__ import annotations

__version__ = "0.1.0"
