"""The stderr log, and the closing box."""

import logging
import os
import unicodedata

import msgspec
import pytest

from elastane.errors import UsageError
from elastane.observe import logging as observe_logging
from elastane.observe.box import render_box
from elastane.observe.logging import ConsoleHandler, event_level, event_text, level_of, one_line
from elastane.process.streams.console import Console
from elastane.protocol.log_events import MEASURED, EventKind, LogEvent
from elastane.protocol.model import NO_RANK, Cause, Failure, Fence, Outcome


@pytest.fixture
def said():
    """Return a handler that writes to a pipe, and a reader of the pipe."""
    read_end, write_end = os.pipe()
    console = Console(write_end)

    def read():
        assert console.close(5)
        os.close(write_end)
        with os.fdopen(read_end) as file:
            return file.read()

    return ConsoleHandler(console, "host-a"), read


def record(text, *args, level=logging.WARNING):
    return logging.LogRecord("elastane", level, "", 0, text, args, None)


def test_note_is_one_line_with_node_kind_and_fence(said):
    handler, read = said
    note = LogEvent(kind=EventKind.INCIDENT, reason="worker died\nbadly\x1b[2J", fence=Fence(3, 1))
    handler.emit(record("%s", event_text(note)))
    assert read() == "elastane[host-a] incident: worker died | badly?[2J (round 3 attempt 1)\n"


def test_repeated_line_is_counted_and_not_printed(said, monkeypatch):
    handler, read = said
    now = [100.0]
    monkeypatch.setattr(observe_logging.time, "monotonic", lambda: now[0])
    for _ in range(4):
        handler.emit(record("coordinator-away: refused"))
    handler.emit(record("other"))
    now[0] += observe_logging.REPEAT_S
    handler.emit(record("coordinator-away: refused"))
    assert read().splitlines() == [
        "elastane[host-a] coordinator-away: refused",
        "elastane[host-a] other",
        "elastane[host-a] coordinator-away: refused (3 more times meanwhile)",
    ]


def test_a_rank_that_is_slow_again_and_again_is_counted_although_its_figures_differ(
    said, monkeypatch
):
    handler, read = said
    now = [100.0]
    monkeypatch.setattr(observe_logging.time, "monotonic", lambda: now[0])

    def say(rank, figure, kind=EventKind.STRAGGLER, **data):
        note = LogEvent(kind=kind, reason=f"{rank} {figure}", data={"rank": rank, **data})
        one = record("%s", event_text(note))
        one.subject = observe_logging.event_subject(note)
        handler.emit(one)
        now[0] += 30.0

    for figure in range(3):
        say(1, figure, why="cpu-share")
    say(2, 9, why="cpu-share")
    say(1, 7, kind=EventKind.CULPRIT, ranks="1", **{"class": "busy"})
    say(1, 8, kind=EventKind.CULPRIT, ranks="1", **{"class": "busy"})
    now[0] += observe_logging.REPEAT_SUBJECT_S
    say(1, 5, why="cpu-share")
    assert [line.removeprefix("elastane[host-a] ") for line in read().splitlines()] == [
        "straggler: 1 0",
        "straggler: 2 9",
        "culprit: 1 7",
        "straggler: 1 5 (2 more times meanwhile)",
    ]


def test_a_wait_that_is_repeated_in_each_round_is_printed_once(said):
    handler, read = said
    for number in (2, 3, 4):
        note = LogEvent(kind=EventKind.WAITING, reason="others wait", fence=Fence(number, 0))
        one = record("%s", event_text(note))
        one.subject = observe_logging.event_subject(note)
        handler.emit(one)
    assert read() == "elastane[host-a] waiting: others wait (round 2 attempt 0)\n"


@pytest.mark.parametrize(
    ("text", "level"), [("", 30), ("info", 20), ("WARNING", 30), ("10", 10), (" Debug ", 10)]
)
def test_loglevel_is_read_as_torchrun_reads_it(text, level):
    assert level_of(text) == level


def test_unknown_loglevel_is_refused_with_the_choices():
    with pytest.raises(UsageError, match="LOGLEVEL = 'LOUD'") as caught:
        level_of("LOUD")
    assert "INFO" in caught.value.expected


def test_default_level_shows_what_a_person_must_know_and_no_more():
    shown = {kind for kind in EventKind if event_level(LogEvent(kind=kind, reason="")) >= 30}
    assert EventKind.INCIDENT in shown
    assert EventKind.NODE_REFUSED in shown
    assert not shown & {EventKind.NODE_JOINED, EventKind.ROUND_SETTLED, EventKind.WORKERS_STARTED}
    measured = {event_level(LogEvent(kind=kind, reason="")) for kind in MEASURED}
    assert measured == {logging.DEBUG}, "not at LOGLEVEL=INFO: there are thousands a day"
    failed = LogEvent(kind=EventKind.JOB_ENDED, reason="", data={"ok": False})
    assert event_level(failed) == logging.INFO, "the closing box says it"


def test_setup_twice_prints_each_line_once():
    try:
        observe_logging.setup("a")
        logger = observe_logging.setup("b", "INFO")
        assert len(logger.handlers) == 1
        assert not logger.propagate
        assert logger.level == logging.INFO
    finally:
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def test_line_is_bounded():
    assert len(one_line("x" * 5000)) == observe_logging.LINE_CHARS_MAX


def outcome(message="Traceback\n  File 'train.py'\nValueError: no data", rank=3, **more):
    failure = Failure(
        local_rank=1,
        rank=rank,
        pid=4711,
        exit_code=-9,
        message=message,
        log_file="/l/stderr.log",
        output=bool(more.pop("output", False)),
    )
    cause = Cause(
        kind="worker",
        what="the worker of rank 3 was killed",
        node_id="host-a",
        fence=Fence(3, 1),
        failure=failure,
        consequences=5,
        **more,
    )
    return Outcome(
        ok=False,
        reason="3 of 3 restarts were used",
        slug="restarts-used-up",
        exit_code=1,
        cause=cause,
        next_step="elastane logs job",
    )


def test_box_names_cause_evidence_place_consequences_next_step_and_logs():
    box = render_box(outcome(), "/logs/job")
    for part in (
        "3 of 3 restarts were used [restarts-used-up]",
        "the worker of rank 3 was killed",
        "node host-a, round 3, attempt 1, rank 3 (local rank 1, pid 4711)",
        "SIGKILL",
        "ValueError: no data",
        "5 more failures",
        "elastane logs job",
        "/logs/job",
        "/l/stderr.log",
    ):
        assert part in box, part


def test_box_names_another_failure_that_came_shortly_before_whether_or_not_all_restarted():
    box = render_box(msgspec.structs.replace(outcome(), before="rank 2 ended with SIGKILL"))
    assert "before      another failure, shortly before: rank 2 ended with SIGKILL" in box
    assert "before " not in render_box(outcome())


def test_box_distinguishes_an_error_from_output_and_names_no_missing_rank():
    said = " ".join(render_box(outcome()).split())
    assert "it said" in said and "failed by the same error" not in said
    quiet = outcome("UserWarning: slow", rank=NO_RANK, output=True, alike=1)
    said = " ".join(render_box(quiet).split())
    assert "last output" in said and "it said" not in said
    assert "no rank yet (local rank 1, pid 4711)" in said
    assert "1 other worker failed by the same error" in said
    many = render_box(outcome(alike=2))
    assert "2 other workers failed by the same error" in many


@pytest.mark.parametrize(
    "message",
    ["x" * 5000, "\n".join(f"line {n}" for n in range(500)), "\x1b[2J\ttab", "a b " * 900],
)
def test_box_is_bounded_in_both_directions_for_any_worker_output(message):
    lines = render_box(outcome(message), "/logs/" + "d" * 300).splitlines()
    assert {len(line) for line in lines} == {100}
    assert len(lines) < 50
    assert all(line.isprintable() for line in lines)


def test_box_is_as_wide_as_its_frame_for_wide_characters_and_accents():
    def columns(char):
        return 2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char)

    box = render_box(outcome("ValueError: 漢字 e\u0301 " + "漢" * 70))
    assert {sum(map(columns, line)) for line in box.splitlines()} == {100}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_box_has_only_what_the_encoding_of_the_console_has(encoding):
    box = render_box(outcome("ValueError: naïve ✗ " + "漢" * 70), "/logs/job", encoding)
    box.encode(encoding)
    assert {len(line) for line in box.splitlines()} == {100}
    assert box.startswith("+--") and "\\u2717" in box
    assert ("naïve" in box) == (encoding == "latin-1")


def test_box_shows_the_last_lines_of_a_long_message():
    box = render_box(outcome("\n".join(f"line {n}" for n in range(500))))
    assert "line 499" in box
    assert "line 400" not in box


def test_job_that_ended_well_gets_one_line():
    assert render_box(Outcome(ok=True, reason="all done")) == "elastane: all done"
