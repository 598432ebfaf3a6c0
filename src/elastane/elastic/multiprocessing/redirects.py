"""Redirects the standard streams of this process into a file, for Python and C code alike."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]


def get_libc() -> ctypes.CDLL:
    """Return this process's C library."""
    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect `std` (stdout or stderr) to `to_file` in this context; the file is truncated first.

    The descriptor is redirected, so the output of C code and of child processes goes there too.
    Raises ValueError for another name, OSError if the file cannot be created.
    """
    if std not in ("stdout", "stderr"):
        raise ValueError(f"unknown standard stream <{std}>, must be stdout or stderr")
    number = {"stdout": 1, "stderr": 2}[std]
    before = os.dup(number)
    try:
        with open(to_file, "w+b") as target:  # noqa: PTH123 - as torch takes any path
            _flush(std)
            os.dup2(target.fileno(), number)
            try:
                yield
            finally:
                _flush(std)
                os.dup2(before, number)
    finally:
        os.close(before)


def _flush(std: str) -> None:
    getattr(sys, std).flush()
    get_libc().fflush(None)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")
