"""`elastane explain`: the story of a job from invented event logs."""

import json
import os
import re

import pytest
from msgspec.structs import replace

from elastane.cli.explain import story_lines
from elastane.cli.main import main
from elastane.observe.events import LoggedEvent, encode_line, iso_time
from elastane.observe.story import story_of
from elastane.process.files import JobEntry, JobRegistry, process_start, runtime_folder
from elastane.protocol.log_events import EventKind

START_S = 1_700_000_000


def logged(seconds):
    return iso_time(int((START_S + seconds) * 1e9))


def at(seconds):
    """Return a time as people read it: in milliseconds."""
    return f"{logged(seconds)[:23]}Z"


def event(seconds, kind, reason="", *, node="a", fence=(0, 0), **data):
    return LoggedEvent(
        time=logged(seconds),
        time_s=START_S + seconds,
        mono_s=seconds,
        seq=int(seconds * 1000),
        job="training",
        kind=kind,
        reason=reason,
        node=node,
        host=node,
        pid=1,
        round=fence and fence[0],
        attempt=fence and fence[1],
        data=data,
    )


def settled(seconds, fence=(0, 0), **data):
    data = {"world_size": 4, "nodes": 2, "members": "a b"} | data
    return event(seconds, EventKind.ROUND_SETTLED, "2 of 2 nodes joined", fence=fence, **data)


def exited(seconds, rank, reason="exit code 1", *, fence=(0, 0), **data):
    data = {"rank": rank, "local_rank": rank % 2, "pid": 100 + rank, "exit_code": 1} | data
    return event(
        seconds, EventKind.WORKER_EXITED, reason, node="ab"[max(rank, 0) // 2], fence=fence, **data
    )


def restarted(seconds, node, rank, **data):
    cause = {"cause": "ValueError: bad", "cause_node": node, "cause_rank": rank, "used": 1}
    return event(seconds, EventKind.RESTART, "1 of 3 restarts used", **cause | data)


def told(*events):
    return story_lines(story_of("folder", "/logs/training", events))


def succeeded(seconds, rank, fence):
    data = {"rank": rank, "local_rank": rank % 2, "pid": 200 + rank}
    return event(seconds, EventKind.WORKER_EXITED, "succeeded", fence=fence, **data)


@pytest.fixture
def folder(tmp_path):
    """The folder of a job that failed once and then succeeded, with the logs of two hosts."""
    place = tmp_path / "training"
    place.mkdir()
    message = "Traceback\n\tline\nValueError: bad\n"
    events = [
        settled(0),
        exited(5, 2, message=message, age_s=1.5, log_file="/l/stderr.log"),
        exited(5.5, 0, "SIGABRT", error_file="/l/error.json"),
        exited(5.6, 1, "SIGTERM", stopped=True),
        restarted(6, "b", 2, consequences=1),
        settled(8, (0, 1)),
        *(succeeded(30, rank, (0, 1)) for rank in range(4)),
        event(31, EventKind.JOB_ENDED, "all workers succeeded", fence=(0, 1), ok=True, exit_code=0),
    ]
    for one in events:
        with (place / f"events.{one.host}.jsonl").open("ab") as file:
            file.write(encode_line(one))
    return place


def test_each_attempt_shows_its_root_cause_first(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"job training: succeeded at {at(31)}: all workers succeeded",
        "restarts used: 1",
        "",
        "round 0 attempt 0, 2 nodes, 4 workers",
        f"  began      {at(0)}: 2 of 2 nodes joined",
        "  nodes      a b",
        f"  ended      {at(6)} (after 6 s): 1 of 3 restarts used",
        "  root cause ValueError: bad",
        f"  cause      rank 2 on node b (local rank 0, pid 102) at {at(3.5)}: exit code 1",
        "    | Traceback",
        "    |   line",
        "    | ValueError: bad",
        "    class python; another attempt: unknown",
        "    next: mend the script; the traceback has the line",
        "    its log: /l/stderr.log",
        f"  failure    rank 0 on node a (local rank 0, pid 100) at {at(5.5)}: SIGABRT",
        "    class crash; another attempt: unknown",
        "    error file: /l/error.json",
        "  others     1 worker was stopped",
        "",
        "round 0 attempt 1, 2 nodes, 4 workers",
        f"  began      {at(8)}: 2 of 2 nodes joined",
        "  nodes      a b",
        f"  ended      {at(31)} (after 23 s): all workers succeeded",
        "  others     4 ended with exit code 0",
        "",
        "goodput 0.0% of 31.00 s",
        "  rebuilding             23.00 s  74.2%  incidents #1 23.00 s",
        "  starting                8.00 s  25.8%",
        "",
        f"logs: {folder}",
        f"output: elastane logs {folder}",
    ]


@pytest.mark.parametrize(
    ("words", "fences"),
    [
        ([], [(0, 0), (0, 1)]),
        (["--attempt", "1"], [(0, 1)]),
        (["--round", "0"], [(0, 0), (0, 1)]),
        (["--round", "1"], []),
    ],
)
def test_json_has_the_attempts_that_were_asked_for_and_all_of_the_job(
    folder, capsys, words, fences
):
    assert main(["explain", str(folder), "--json", *words]) == 0
    story = json.loads(capsys.readouterr().out)
    assert [(one["round"], one["attempt"]) for one in story["attempts"]] == fences
    assert (story["job"], story["ok"], story["restarts_used"]) == ("training", True, 1)
    if (0, 0) in fences:
        first = story["attempts"][0]
        assert (first["root_node"], first["root_rank"], first["consequences"]) == ("b", 2, 1)
        assert [one["stopped"] for one in first["failures"]] == [False, False, True]


PATTERNS = """
[[pattern]]
class = "license"
sign = "licence server (\\\\S+) is away"
outlook = "may-pass"
next = "start the licence server of {}"

[[pattern]]
class = "no-seat"
sign = "no seat is free"
"""


def test_a_user_adds_classes_and_the_log_of_a_worker_is_searched_too(folder, tmp_path, capsys):
    """Only a log below the job's folder is read, which other files are not."""
    log, outside = folder / "stderr.log", tmp_path / "secret.log"
    log.write_text("licence server lic7 is away\nnothing else")
    outside.write_text("no seat is free")
    with (folder / "events.a.jsonl").open("ab") as file:
        for rank, path in ((0, log), (1, outside)):
            one = exited(20, rank, "SIGABRT", fence=(0, 1), exit_code=-6, log_file=str(path))
            file.write(encode_line(one))
    table = tmp_path / "patterns.toml"
    table.write_text(PATTERNS)
    assert main(["explain", str(folder), "--json", "--patterns", str(table)]) == 0
    seen = json.loads(capsys.readouterr().out)["attempts"][1]["failures"]
    found = [(one["kind"], one["outlook"], one["clue"], one["next_step"]) for one in seen]
    first = "license", "may-pass", "licence server lic7 is away", "start the licence server of lic7"
    assert found[0] == first
    assert found[1][0] == "crash", "the other log is not read"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("a = 1", r"no table \[\[pattern\]\]"),
        ("pattern = [7]", "pattern 1 is no table"),
        ("[[pattern]]\nclass = 'A b'\nsign = 'x'", "needs a class of small letters"),
        ("[[pattern]]\nclass = 'a'", "needs a class of small letters, and a sign"),
        ("[[pattern]]\nclass = 'a'\nsign = '('", "no regular expression"),
        ("[[pattern]]\nclass = 'a'\nsign = 'x'\noutlook = 'good'", "good"),
        ("[[pattern]]\nclass = 'a'\nsign = 'x'\ncolour = 'red'", "colour = 'red'"),
        ("[[pattern", "Expected ']]'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_by_its_entry(folder, tmp_path, capsys, text, says):
    table = tmp_path / "patterns.toml"
    if text is not None:
        table.write_text(text)
    assert main(["explain", str(folder), "--patterns", str(table)]) == 78
    err = capsys.readouterr().err
    assert re.search(says, err) and "[explain-patterns]" in err


def test_a_workers_text_cannot_steer_the_terminal(folder, capsys):
    with (folder / "events.a.jsonl").open("ab") as file:
        file.write(encode_line(exited(5.7, 3, message="\x1b[2Jgone\x07")))
    main(["explain", str(folder)])
    out = capsys.readouterr().out
    assert "gone" in out
    assert not {"\x1b", "\x07"} & set(out)


def test_a_job_whose_agent_runs_on_this_machine_is_said_to_run(tmp_path, monkeypatch, capsys):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder = tmp_path / "logs" / "training"
    folder.mkdir(parents=True)
    (folder / "events.a.jsonl").write_bytes(encode_line(settled(0)))
    own = {"pid": os.getpid(), "process": process_start(os.getpid())}
    entry = JobEntry(job="training", node="a", endpoint="h:1", token="", **own)
    registry = JobRegistry(runtime_folder({"XDG_RUNTIME_DIR": str(runtime)}))
    for log_dir, says in ((tmp_path, "no end is on file"), (folder.parent, "it runs; last: ")):
        registry.write(replace(entry, log_dir=str(log_dir)))
        assert main(["explain", str(folder)]) == 0
        assert capsys.readouterr().out.startswith(f"job training: {says}")
    main(["explain", str(folder), "--json"])
    until_s = json.loads(capsys.readouterr().out)["account"]["to_s"]
    assert until_s > START_S + 1000.0, "its account lasts until now, as in status"


def test_a_failed_job_is_shown_with_its_exit_code():
    lines = told(settled(0), event(9, EventKind.JOB_ENDED, "no restart left", exit_code=3))
    assert lines[0] == f"job training: failed with exit code 3 at {at(9)}: no restart left"


def test_a_job_without_an_end_may_run_or_have_lost_all_its_agents():
    lines = told(settled(0))
    assert lines[0] == (
        "job training: no end is on file: it runs, or all its agents were killed; last:"
        f" {at(0)} round-settled: 2 of 2 nodes joined"
    )


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ([], "job folder: no attempt is on file"),
        (
            [event(1, EventKind.NODE_JOINED, "a came", fence=None)],
            f"job training: no attempt is on file; last: {at(1)} node-joined: a came",
        ),
    ],
)
def test_a_job_that_never_trained_shows_its_last_event(events, verdict):
    assert told(*events)[0] == verdict


def test_many_failures_show_the_cause_and_some_others_and_a_count():
    ends = [exited(5 + rank / 10, rank % 4, node_pid=rank) for rank in range(20)]
    lines = told(settled(0), *ends, restarted(9, "b", 3))
    shown = [line.split()[0] for line in lines if " rank " in line]
    assert len(shown) == 8
    causes = shown.count("cause")
    assert shown == ["cause"] * causes + ["failure"] * (8 - causes)
    assert "  others     12 more failures (--json has all)" in lines


def test_the_end_of_a_long_message_is_shown():
    message = "\n".join(f"frame {n}" for n in range(50))
    lines = told(settled(0), exited(1, 0, message=message))
    assert [line for line in lines if "frame" in line] == [
        f"    | frame {n}" for n in range(38, 50)
    ]


def test_a_job_whose_agents_all_left_says_so_and_not_that_it_may_run():
    left = "released: drained: SIGTERM"
    lines = told(
        event(0, EventKind.AGENT_STARTED, fence=None),
        settled(1),
        event(5, EventKind.DRAIN_STARTED, "node a is leaving"),
        event(6, EventKind.AGENT_STOPPED, left, fence=None, exit_code=143),
    )
    assert lines[0] == (
        "job training: no outcome: all agents whose logs are here left before the job ended; the"
        f" last at {at(6)} a: exit code 143: {left}"
    )


def test_a_job_one_of_whose_agents_is_here_may_run():
    lines = told(
        event(0, EventKind.AGENT_STARTED, fence=None),
        event(0.1, EventKind.AGENT_STARTED, node="b", fence=None),
        settled(1),
        event(6, EventKind.AGENT_STOPPED, "SIGTERM", fence=None, exit_code=143),
    )
    assert "it runs, or all its agents were killed" in lines[0]


def test_replacements_are_not_counted_as_restarts():
    lines = told(
        settled(0),
        event(4, EventKind.INCIDENT, "worker of rank 1 on node a ended with SIGKILL"),
        event(5, EventKind.REPLACEMENT, used=7, cause="killed", cause_node="a", cause_rank=1),
        settled(6, (1, 0)),
        event(
            8, EventKind.REPLACEMENT, fence=(1, 0), used=8, cause="a successor's", cause_node="a"
        ),
    )
    assert lines[1] == ("restart budget used: 8, 2 of it for replacements of lost workers")
    assert "  root cause killed" in lines
    # A worker without a rank ended: the world continues.
    assert "a successor's" not in "".join(lines)
    assert sum(line.startswith("  ended ") for line in lines) == 1


def test_a_worker_without_a_rank_is_shown_without_one():
    lines = told(settled(0), exited(4, -1, local_rank=0))
    assert any("a worker without a rank on node a (local rank 0" in line for line in lines)


def test_a_failure_without_a_rank_is_not_marked_as_a_cause_without_a_rank():
    cause = event(5, EventKind.RESTART, used=1, cause="killed", cause_node="a", alike=2)
    lines = told(settled(0), exited(4, -1, local_rank=0), cause)
    assert "  root cause killed" in lines
    assert "  also       2 more failed by the same error" in lines
    assert not any(line.startswith("  cause ") for line in lines)


def test_text_before_a_signal_is_called_output():
    lines = told(settled(0), exited(4, 0, "SIGKILL", message="UserWarning: x", output=True))
    at_output = lines.index("    its last output:")
    assert lines[at_output + 1] == "    | UserWarning: x"


def test_departures_and_differing_replicas_are_shown():
    lines = told(
        settled(0),
        event(3, EventKind.REPLICA_DIFFERED, "rank 1 has other weights"),
        event(4, EventKind.NODE_DEPARTED, "no heartbeat for 10 s", node="b"),
    )
    assert f"  replica    {at(3)}: rank 1 has other weights" in lines
    where = lines.index("nodes that departed:")
    assert lines[where + 1] == f"  {at(4)} b: no heartbeat for 10 s"


def test_the_times_without_a_coordinator_that_may_decide_are_shown():
    lines = told(
        settled(0),
        event(3, EventKind.AUTHORITY_LOST, "the store is silent"),
        event(9, EventKind.AUTHORITY_REGAINED, "term 2 is held again"),
        event(20, EventKind.AUTHORITY_LOST, "the store is silent"),
    )
    where = lines.index("no coordinator could decide:")
    assert lines[where + 1] == f"  {at(3)} a: the store is silent, until {at(9)}"
    assert lines[where + 2] == f"  {at(20)} a: the store is silent"
    assert "no coordinator could decide:" not in told(settled(0))


def test_injected_faults_are_named_as_such():
    lines = told(settled(0), event(3, EventKind.FAULT_INJECTED, "kill-worker 7 of a", node="a"))
    where = lines.index("faults that were injected:")
    assert lines[where + 1] == f"  {at(3)} kill-worker 7 of a"


def test_the_first_reason_for_an_attempts_end_is_the_reason():
    lines = told(
        settled(0),
        event(2, EventKind.INCIDENT, "node b is gone"),
        restarted(3, "b", 2),
    )
    assert f"  ended      {at(2)} (after 2 s): node b is gone" in lines


def test_an_attempt_without_a_logged_start_has_no_duration():
    lines = told(event(2, EventKind.DRAIN_STARTED, "preemption"))
    assert "round 0 attempt 0" in lines
    assert f"  ended      {at(2)}: preemption" in lines


def test_invalid_figures_are_left_out():
    wrong = {"rank": "two", "pid": "x", "age_s": "later", "exit_code": 1}
    events = [
        settled(0, world_size="many"),
        event(1, EventKind.WORKER_EXITED, "exit code 1", **wrong),
    ]
    [attempt] = story_of("folder", "/logs", events).attempts
    [failure] = attempt.failures
    assert (attempt.world_size, failure.rank, failure.pid) == (0, None, 0)
    assert failure.time == logged(1)


def test_a_time_beyond_the_calendar_is_the_calendars_end():
    [attempt] = story_of("folder", "/logs", [exited(1, 0, age_s=-1e30)]).attempts
    assert attempt.failures[0].time.startswith("9999-12-31T23:59:")
    [attempt] = story_of("folder", "/logs", [exited(1, 0, age_s=1e30)]).attempts
    assert attempt.failures[0].time.startswith("1970-01-01T00:00:00")


def test_a_straggler_is_shown_with_its_reason_and_its_end():
    text = "rank 1 on node a makes the others wait in each step"
    data = {"rank": 1, "why": "loader", "own_s": 0.04, "others_s": 0.03}
    slow = event(5, EventKind.STRAGGLER, text, **data)
    assert f"  straggler  {at(5)}: {text} [loader]" in told(settled(0), slow)
    over = event(9, EventKind.STRAGGLER_ENDED, "rank 1 is as fast as the others again", rank=1)
    assert f"  straggler  {at(5)} until {at(9)}: {text} [loader]" in told(settled(0), slow, over)
    [one] = story_of("folder", "/logs", [settled(0), slow, over]).attempts[0].stragglers
    assert (one.rank, one.why, one.own_s, one.others_s, one.ended) == (
        1,
        "loader",
        0.04,
        0.03,
        logged(9),
    )


def test_a_culprit_is_shown_with_its_class_and_its_facts():
    text = "rank 1 on node a has not entered all_reduce #7 (train.py:8, main); rank 0 waits in it"
    data = {"class": "busy", "ranks": "1", "outlook": "unknown", "certain": False, "still_s": 21.5}
    found = event(5, EventKind.CULPRIT, text, **data, group="0", sequence=7)
    assert f"  culprit    {at(5)}: {text} [busy]" in told(settled(0), found)
    attempt = story_of("folder", "/logs", [settled(0), found]).attempts[0]
    [culprit] = attempt.culprits
    assert (culprit.kind, culprit.ranks, culprit.outlook) == ("busy", [1], "unknown")
    assert (culprit.still_s, culprit.group, culprit.sequence) == (21.5, "0", 7)
    assert not culprit.certain


def test_stacks_are_shown_with_the_program_that_they_came_from():
    text = "Thread 51\n    hold (train.py:3)"
    data = {"rank": 1, "local_rank": 1, "pid": 51, "source": "py-spy --native", "stacks": text}
    said = told(settled(0), event(5, EventKind.STACKS, "stacks of rank 1", **data))
    at_line = said.index(f"  stacks     {at(5)}: rank 1 on node a (pid 51), by py-spy --native")
    assert said[at_line + 1 : at_line + 3] == ["    | Thread 51", "    |     hold (train.py:3)"]


def test_only_the_cause_shows_its_traceback_and_no_line_that_only_marks_another():
    long = "Traceback\n  total = loss / count\n          ~~~~~^~~~~~~\nZeroDivisionError: by zero"
    victim = "Traceback\n  loss.backward()\nRuntimeError: Connection closed by peer"
    lines = told(
        settled(0),
        exited(3, 2, message=long),
        exited(4, 0, message=victim),
        restarted(5, "b", 2),
    )
    said = [line.removeprefix("    | ") for line in lines if line.startswith("    | ")]
    assert said == [
        "Traceback", "  total = loss / count", "ZeroDivisionError: by zero",
        "RuntimeError: Connection closed by peer",
    ]  # fmt: skip


def ran(at_s, *, ends=True):
    """Return the events of a run whose one attempt ended with an error."""
    agents = [event(at_s, EventKind.AGENT_STARTED, node=node, fence=None) for node in "abc"]
    begun = *agents, event(at_s, EventKind.COORDINATOR_STARTED, fence=None), settled(at_s + 1)
    ended = event(at_s + 3, EventKind.JOB_ENDED, "too many restarts", ok=False, exit_code=1)
    return [*begun, exited(at_s + 2, 0, message=f"of {at_s}"), *([ended] if ends else [])]


@pytest.mark.parametrize("is_new", [False, True], ids=["same agents", "new agents"])
def test_a_world_that_is_settled_twice_is_of_another_run_only_if_its_agents_are_new(is_new):
    """A coordinator without a store was lost as it settled round 1; the next one knew nothing."""

    def starts(seconds):
        return [event(seconds, EventKind.AGENT_STARTED, node=node, fence=None) for node in "abc"]

    text = "\n".join(
        told(
            *starts(0),
            settled(1),
            exited(2, 0, message="of round 0"),
            settled(3, (1, 0)),
            *starts(4)[: 3 if is_new else 1],  # the node of the lost coordinator comes again
            event(5, EventKind.COORDINATOR_STARTED, node="b", fence=None),
            settled(6, (1, 0)),
        )
    )
    assert ("of round 0" in text) is not is_new
    assert ("earlier run" in text) is is_new
    assert text.count("round 1 attempt 0") == 1


@pytest.mark.parametrize("ends", [True, False])
def test_of_several_runs_under_one_name_the_newest_is_told(ends):
    text = "\n".join(told(*ran(0, ends=ends), *ran(100, ends=False)))
    assert "of 100" in text and "of 0" not in text
    assert "no end is on file" in text and text.count("round 0 attempt 0") == 1
    assert "the log has 1 earlier run of jobs of this name" in text
