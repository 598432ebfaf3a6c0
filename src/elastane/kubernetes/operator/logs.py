"""How an operator's lines reach stderr: as the project's own, or one JSON object each."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from elastane.observe.logging import ConsoleHandler, one_line, setup
from elastane.process import environment
from elastane.process.streams.console import process_console

_STDERR = 2
# People who look at an operator's log want to know what it does.
DEFAULT_LEVEL = "INFO"


def set_up_logs(*, as_json: bool) -> None:
    """Let the logger `elastane` write to stderr; UsageError where LOGLEVEL is no level."""
    logger = setup("operator", environment.get("LOGLEVEL") or DEFAULT_LEVEL)
    if as_json:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(JsonHandler(process_console(_STDERR), "operator"))


class JsonHandler(ConsoleHandler):
    """Writes records as JSON: time, level, logger, message."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as one line."""
        try:
            text = one_line(record.getMessage())
            if record.exc_info:
                text += " | " + one_line(logging.Formatter().formatException(record.exc_info))
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)
            return
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        self.console.put(json.dumps(line).encode() + b"\n")
