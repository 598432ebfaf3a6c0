"""Logs timers that expired; replace the function to log more."""

from __future__ import annotations

import logging

__all__ = ["log_debug_info_for_expired_timers"]
_log = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the timers that expired, by process."""
    if expired_timers:
        _log.info("run %s: timers expired: %s", run_id, expired_timers)
