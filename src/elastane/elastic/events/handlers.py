"""The handlers of events, by name: handlers of Python's logging. Others may be added."""

from __future__ import annotations

import logging

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of that name; KeyError with the known names if there is none."""
    if destination not in _log_handlers:
        known = ", ".join(sorted(_log_handlers))
        raise KeyError(f"no event handler {destination!r}: one of {known}")
    return _log_handlers[destination]
