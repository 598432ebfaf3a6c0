"""The error handler of `record`, for subclassing: the methods are torch's.

`worker.record` does the work, and `process.errorfile` owns the format.
"""

from __future__ import annotations

import os
from typing import Any

from elastane.process.errorfile import with_error_code
from elastane.worker.record import ErrorFileHandler

__all__ = ["ErrorHandler"]


class ErrorHandler(ErrorFileHandler):
    """Writes an exception to the file that TORCHELASTIC_ERROR_FILE names, if it is set."""

    def _get_error_file_path(self) -> str | None:
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set the exit code in the content of `rootcause_error_file`, in place."""
        rootcause_error.update(with_error_code(rootcause_error, error_code))
