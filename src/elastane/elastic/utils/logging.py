"""A logger at the level of LOGLEVEL. Source: torch.distributed.elastic.utils.logging."""

from __future__ import annotations

import inspect
import logging
import os

from elastane.elastic.utils.log_level import get_log_level


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger, by default of the caller's module, at the level of LOGLEVEL (WARNING)."""
    if name is None:
        module = inspect.getmodule(inspect.stack()[1].frame)
        name = module.__name__ if module is not None else None
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger
