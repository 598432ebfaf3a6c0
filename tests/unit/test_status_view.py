"""The screen of `elastane status`, for a report or a log."""

from elastane.cli import status
from elastane.cli.main import main
from elastane.cli.status import (
    NODES_SHOWN_MAX,
    duration,
    ended_lines,
    report_lines,
    trouble_lines,
    unreachable_lines,
)
from elastane.errors import MembershipError
from elastane.observe.events import LoggedEvent, encode_line
from elastane.observe.needs import Need
from elastane.protocol.messages import NodeStatus, Report, SafeCopies, StateCopy
from elastane.protocol.model import Fence


def node(name, rank, **changes):
    fields = {
        "node_id": name,
        "host": "10.0.0.1",
        "state": "running",
        "node_rank": rank,
        "local_world_size": 2,
        "heard_s": 0.25,
    }
    return NodeStatus(**{**fields, **changes})


def report(nodes, **changes):
    fields = {
        "job": "digits-1",
        "phase": "running",
        "reason": "all nodes are here",
        "fence": Fence(3, 1),
        "min_nodes": 1,
        "max_nodes": 4,
        "world_size": 4,
        "restarts_used": 1,
        "max_restarts": 3,
        "uptime_s": 3700.0,
        "nodes": tuple(nodes),
        "last_incident": "worker 1 of a: SIGKILL",
    }
    return Report(**{**fields, **changes})


def event(kind, reason="because", seq=0, **data):
    return LoggedEvent(
        time=f"2026-01-02T03:04:{seq:02d}.000000000Z",
        time_s=float(seq),
        mono_s=0.0,
        seq=seq,
        job="j",
        kind=kind,
        reason=reason,
        node="a",
        host="a",
        pid=1,
        data=data,
    )


def test_a_running_job_in_full():
    nodes = [node("b", 1, progress=40), node("a", 0, progress=41, steps_per_s=12.345)]
    assert report_lines(report(nodes), "10.0.0.1:29400") == [
        "digits-1: running, round 3 attempt 1, 4 workers",
        "  why           all nodes are here",
        "  coordinator   10.0.0.1:29400, up 1 h 1 min",
        "  nodes         2 here, 1 to 4 wanted",
        "  budget        1 of 3 restarts used",
        "  last incident worker 1 of a: SIGKILL",
        "",
        "  node  host      state    rank  workers  step  steps/s  heard",
        "  a     10.0.0.1  running  0     2        41    12.3     0.2 s ago",
        "  b     10.0.0.1  running  1     2        40    -        0.2 s ago",
    ]


def test_a_job_whose_workers_wait_for_one_of_them_is_stalled():
    waits = report([node("a", 0), node("spare", None)], stalled="rank 1 has not entered it")
    lines = report_lines(waits, "h:1")
    assert lines[0] == "digits-1: stalled, round 3 attempt 1, 4 workers"
    assert lines[1] == "  why           rank 1 has not entered it"
    states = {line.split()[0]: line.split()[2] for line in lines[-2:]}
    assert states == {"a": "stalled", "spare": "running"}, (
        "one without workers does not stand still"
    )


def test_a_failed_job_says_the_next_step_and_where_more_is():
    end = event("job-ended", "boom", ok=False, exit_code=1, next_step="mend the script")
    lines = ended_lines("j", [end], "/logs/my job")
    assert lines[:4] == [
        "j: failed with exit code 1: boom",
        "  next          mend the script",
        "  more          elastane explain '/logs/my job'",
        "  event log     /logs/my job",
    ]


def test_the_newest_copies_of_the_state_are_shown_by_the_loss_that_they_survive():
    old = StateCopy(step=40, age_s=2.0, took_s=0.3)
    safe = SafeCopies(worker=StateCopy(step=41, age_s=0.4, took_s=0.05), node=old, job=None)
    lines = report_lines(report([node("a", 0, progress=41)], safe=safe), "h:1")
    snapshot = (
        "  snapshot      step 41 (0.4 s old, took 0.1 s) in another process,"
        " step 40 (2.0 s old, took 0.3 s) on two nodes"
    )
    assert snapshot in lines and not any("checkpoint  " in line for line in lines)
    stored = SafeCopies(job=StateCopy(step=30, age_s=75.0, took_s=12.0))
    lines = report_lines(report([node("a", 0, progress=41)], safe=stored), "h:1")
    assert "  checkpoint    step 30 (1 min 15 s old, took 12 s)" in lines
    assert not any("snapshot" in line for line in lines)


def test_a_script_that_reports_no_steps_gets_an_explanation():
    lines = report_lines(report([node("a", 0)]), "h:1")
    assert any(
        line.startswith("  steps         none seen so far: a script shows") for line in lines
    )
    lines = report_lines(report([node("a", 0, steps_per_s=2.5)]), "h:1")
    assert any(line.startswith("  steps         not numbered: a script") for line in lines)
    assert any("2.5" in line for line in lines)
    lines = report_lines(report([node("a", 0, progress=0)]), "h:1")
    assert not any("  steps  " in line for line in lines)


def test_a_job_without_a_round_or_nodes_says_so():
    lines = report_lines(report([], fence=None, last_incident="", max_nodes=1), "h:1")
    assert lines[0].endswith("no round settled yet")
    assert lines[3].endswith("0 here, 1 wanted")
    assert not [line for line in lines if "incident" in line]


def test_a_thousand_nodes_fit_on_one_screen_and_those_without_a_rank_come_first():
    nodes = [node(f"n{rank:04d}", rank) for rank in range(1000)]
    lines = report_lines(report([*nodes, node("late", None, state="waiting")]), "h:1")
    assert len(lines) < NODES_SHOWN_MAX + 12
    assert lines[10].split()[0] == "late"
    assert lines[-1] == f"  and {1001 - NODES_SHOWN_MAX} more; --json lists all"


def test_a_job_that_ended_says_how_and_shows_its_last_events():
    events = [event("round-settled", seq=n) for n in range(30)] + [event("job-ended", "done", 30)]
    lines = ended_lines("j", events, "/logs/j")
    assert lines[0] == "j: ended: done"
    assert "/logs/j" in lines[1]
    assert len(lines) == 13
    assert lines[-1] == "  2026-01-02T03:04:30Z job-ended              done"


def test_a_job_whose_nodes_left_after_its_end_says_how_it_ended(tmp_path, capsys):
    left = [event("agent-stopped", f"it left: {n}", seq=31 + n) for n in range(20)]
    events = [event("job-ended", "all workers succeeded", 30), *left]
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "events.a.jsonl").write_bytes(b"".join(map(encode_line, events)))
    assert main(["status", "j", "--log-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("j: ended: all workers succeeded\n")
    assert text.count("agent-stopped") == 10 and "it left: 19" in text and "goodput" in text


def test_the_coordinators_report_is_shown_before_the_log_is_read(monkeypatch, capsys):
    """To read a log of a thousand hosts takes seconds."""
    view = status._View("digits-1", "h:1", report=report([node("a", 0)]), log_dir="/logs")
    shown = []
    monkeypatch.setattr(status, "_views", lambda args, job: [view])
    monkeypatch.setattr(status, "_add_account", lambda _: shown.append(capsys.readouterr().out))
    assert main(["status", "digits-1"]) == 0
    assert [text.partition(":")[0] for text in shown] == ["digits-1"]


def test_a_job_without_an_end_event_is_shown_as_cut_off():
    lines = ended_lines("j", [event("round-settled")], "/logs/j")
    assert lines[0] == "j: no longer runs on this machine"


def test_a_coordinator_that_does_not_answer_is_named_beside_the_agents_that_live():
    error = MembershipError("no process listens at h:1", slug="x", next_step="start it")
    text = "\n".join(unreachable_lines("j", error, ["a (pid 7)"], [event("coordinator-away")]))
    for part in ("does not answer", "no process listens at h:1", "start it", "a (pid 7)", "away"):
        assert part in text


def test_durations_have_the_two_units_that_matter():
    assert [duration(s) for s in (0.04, 9.94, 59, 61, 3600, 90_061)] == [
        "0.0 s",
        "9.9 s",
        "59 s",
        "1 min 1 s",
        "1 h 0 min",
        "25 h 1 min",
    ]


def test_a_standstill_and_a_slow_rank_are_said_while_the_job_runs():
    title = "Rank 1 on node b has not entered all_reduce #57"
    found = f"r{title[1:]} (train.py:22); ranks 0, 2 wait in it; rank 1 computes"
    needs = [
        Need(severity="act", text=title, hint=found),
        Need(severity="watch", text="Rank 3 is slow", hint="it waits longer for its data loader"),
    ]
    needs.append(Need(severity="next", text="kill -9 7 on b", hint="it costs one restart"))
    assert trouble_lines([]) == []
    _, *lines = trouble_lines(needs)
    assert max(map(len, lines)) <= 100
    assert " ".join(" ".join(lines).split()) == (
        f"needs you {found} needs you Rank 3 is slow: it waits longer for its data loader"
        " next kill -9 7 on b: it costs one restart"
    )
