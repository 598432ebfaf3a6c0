"""NumPy, an optional extra that only workers with elastic samplers need; fails by its name."""

from __future__ import annotations

from elastane.errors import ConfigurationError

try:
    import numpy as np
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        "the elastic samplers need numpy, which is not installed",
        expected="numpy 1.23 or later",
        next_step="pip install 'elastane[data]'",
        slug="extra-missing",
    ) from missing

__all__ = ["np"]
