"""The checked versions of a framework; its private names may differ in others."""

from __future__ import annotations

from collections.abc import Sequence

from elastane.errors import ConfigurationError


def require_known(name: str, version: str, known: Sequence[str]) -> None:
    """Refuse a version that begins with none of `known`, such as "2.6."; ConfigurationError."""
    if not version.startswith(tuple(known)):
        raise ConfigurationError(
            f"{name} {version}: not possible with --in-place",
            slug="in-place-refused",
            expected=f"{name} {' or '.join(f'{each}x' for each in known)}, which were checked",
            next_step="start the script without --in-place: then a fault restarts all workers",
        )
