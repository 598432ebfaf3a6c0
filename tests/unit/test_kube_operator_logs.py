"""The JSON log lines of an operator: one object each, for any record."""

import json
import logging
import sys
from datetime import UTC, datetime

import pytest

from elastane.errors import UsageError
from elastane.kubernetes.operator import set_up_logs
from elastane.kubernetes.operator.running import JsonHandler
from elastane.observe.logging import ConsoleHandler

SAID_S = 1_700_000_000.25


class Console:
    def __init__(self):
        self.lines = []

    def put(self, line):
        self.lines.append(line)
        return True


def record(text, *args, level=logging.WARNING, trouble=None):
    made = logging.LogRecord("elastane.operator", level, "", 0, text, args, trouble)
    made.created = SAID_S
    return made


@pytest.fixture
def project_logger():
    """Restore the logger `elastane` after the test."""
    logger = logging.getLogger("elastane")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_record_is_one_object_on_one_line():
    console = Console()
    JsonHandler(console, "operator").emit(record("job %s\nis \x1b[2Jgone", '"x"'))
    [line] = console.lines
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")) == datetime.fromtimestamp(SAID_S, UTC)
    assert told == {
        "level": "warning",
        "logger": "elastane.operator",
        "message": 'job "x" | is ?[2Jgone',
    }


def test_an_exception_stands_on_the_line_of_its_record():
    console = Console()
    try:
        raise ValueError("no such phase")
    except ValueError:
        JsonHandler(console, "operator").emit(record("failed", trouble=sys.exc_info()))
    [line] = console.lines
    message = json.loads(line)["message"]
    assert message.startswith("failed | Traceback")
    assert message.endswith("ValueError: no such phase")


def test_the_same_line_again_is_a_line_again():
    console = Console()
    handler = JsonHandler(console, "operator")
    for _ in range(3):
        handler.emit(record("looked"))
    assert len(console.lines) == 3, "a machine reads them, and counts"


def test_a_log_format_that_does_not_fit_is_reported_and_does_not_raise(capsys):
    console = Console()
    JsonHandler(console, "operator").emit(record("%d jobs", "many"))
    assert console.lines == []
    assert "Logging error" in capsys.readouterr().err


@pytest.mark.parametrize(("as_json", "kind"), [(True, JsonHandler), (False, ConsoleHandler)])
def test_an_operator_logs_at_info_unless_set_otherwise(project_logger, monkeypatch, as_json, kind):
    monkeypatch.delenv("LOGLEVEL", raising=False)
    set_up_logs(as_json=as_json)
    assert [type(handler) for handler in project_logger.handlers] == [kind]
    assert project_logger.level == logging.INFO
    monkeypatch.setenv("LOGLEVEL", "error")
    set_up_logs(as_json=as_json)
    assert len(project_logger.handlers) == 1, "called twice, it says everything once"
    assert project_logger.level == logging.ERROR


def test_an_invalid_level_is_refused(project_logger, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "chatty")
    with pytest.raises(UsageError, match="chatty"):
        set_up_logs(as_json=True)
