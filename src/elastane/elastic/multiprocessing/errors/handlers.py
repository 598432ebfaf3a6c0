"""The default error handler of `record`."""

from __future__ import annotations

from elastane.elastic.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """Return a handler that writes to the file that TORCHELASTIC_ERROR_FILE names."""
    return ErrorHandler()
