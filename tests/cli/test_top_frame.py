"""The frames of `elastane top`: their content, and their size in any terminal."""

import re
import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import report_of
from view_events import event, exited, settled, started

from elastane.cli._top_frame import Picture, frame, plain
from elastane.dashboard.scalars import ScalarCurve
from elastane.dashboard.snapshot import SourceFacts, sections_of, shown_until_s
from elastane.observe.account import Accountant
from elastane.observe.view import JobView, after_event
from elastane.protocol.messages import NodeStatus

BEGUN_S = 1_795_780_000.0
NODES = ("node-a", "node-b", "node-c")


@pytest.fixture(autouse=True)
def in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(seconds):
    return {"time_s": BEGUN_S + seconds}


def workers_of(round_, seconds, nodes=NODES):
    fence = {"round": round_, "attempt": 0}
    return [
        each
        for number, node in enumerate(nodes)
        for each in (
            started(node, *range(100 + 4 * number, 104 + 4 * number), **fence, **at(seconds)),
            event("workers-training", node, **fence, **at(seconds + 1)),
        )
    ]


def begun():
    return [
        event("agent-started", "node-a", **at(0)),
        event("coordinator-started", "node-a", **at(1)),
        settled(1, " ".join(NODES), 12, nodes=3, **at(2)),
        *workers_of(1, 4),
        *(
            event("progress", "node-a", round=1, attempt=0, steps=30 * n, **at(10 * n))
            for n in range(1, 41)
        ),
        event("checkpoint-saved", "node-a", step=900, bytes=4.26e9, seconds=2.3, **at(301)),
    ]


def killed():
    """Return a view in which a worker is killed at 400 s and a smaller world continues."""
    cause = "worker of rank 6 (local rank 2, pid 106) on node node-b ended with SIGKILL: no memory"
    return [
        event("worker-exited", "node-b", "SIGKILL (out of memory)", rank=6, local_rank=2, pid=106,
              exit_code=-9, round=1, attempt=0, **at(400)),
        event("incident", "node-a", round=1, attempt=0, **at(400.2)),
        event("replacement", "node-a", round=1, attempt=0, used=1, allowed=3, cause=cause,
              cause_node="node-b", cause_rank=6, **at(400.2)),
        settled(2, " ".join(NODES), 11, nodes=3, **at(401)),
        *workers_of(2, 402),
    ]  # fmt: skip


def picture(*events, now=500, report=None, **facts):
    view, accountant = JobView(), Accountant()
    for one in sorted(events, key=lambda one: one.time_s):
        view = after_event(view, one)
        accountant.add(one, view)
    known = {
        "key": "j",
        "folder": "/f",
        "events": 1,
        "has_agents": True,
        **facts,
    }
    source = SourceFacts(now_s=BEGUN_S + now, report=report, **known)
    account = accountant.account(view, shown_until_s(view, source))
    return Picture(sections_of(view, source, account), view, BEGUN_S + now)


def test_a_node_that_was_lost_is_named_with_the_time_of_its_loss():
    fence = {"round": 1, "attempt": 0}
    how = "the last coordinator ran on it; it did not come back within the time"
    lost = [
        event("node-departed", "node-c", how, **fence, **at(420)),
        event(
            "incident", "node-b", "node node-c did not come back", departed=1, **fence, **at(420)
        ),
        settled(2, " ".join(NODES[:2]), 8, nodes=2, **at(421)),
        *workers_of(2, 422, NODES[:2]),
    ]
    said = text(picture(*begun(), *lost), 100, 40)
    assert "8 of 12 workers on 2 nodes" in said and "Node node-c was lost" in said
    assert "no longer here: 1 node: node-c lost 11:53:40" in said
    assert how[:60] in said and "1 fault" in said


def test_of_a_job_whose_agents_were_killed_and_started_again_the_new_run_is_shown():
    again = [
        *(event("agent-started", node, **at(500)) for node in NODES[:2]),
        event("coordinator-started", "node-b", **at(501)),
        settled(1, " ".join(NODES[:2]), 8, nodes=2, **at(502)),
        *workers_of(1, 504, NODES[:2]),
        event("progress", "node-a", round=1, attempt=0, steps=30, **at(520)),
    ]
    said = text(picture(*begun(), *killed(), *again, now=520))
    assert "8 workers on 2 nodes   20 s   round 1, attempt 0   run 2" in said
    assert "0 faults" in said and "node-c" not in said and "step 30 " in said


def test_the_last_logged_scalars_are_on_one_line():
    curves = [
        ScalarCurve(name="loss", steps=[10, 20], values=[2.5, 0.251234]),
        ScalarCurve(name="norm\x1b[2J", steps=[20], values=[None]),
    ]
    lines = [str(line) for line in frame(picture(*begun(), scalars=curves), 100, 40)]
    [line] = [line for line in lines if "loss" in line]
    assert "loss 0.2512" in line and "nan" in line and "\x1b" not in line


def reported(*names):
    nodes = tuple(
        NodeStatus(node_id=name, host=name, state="joined", node_rank=rank, local_world_size=4,
                   heard_s=0.2, progress=1234, steps_per_s=3.2)
        for rank, name in enumerate(names)
    )  # fmt: skip
    return msgspec.structs.replace(report_of("demo"), nodes=nodes, max_restarts=3)


def text(picture, width=80, height=24):
    lines = frame(picture, width, height)
    assert len(lines) <= height and all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain.rstrip() for line in lines)


def test_a_frame_of_80_by_24_shows_state_progress_and_causes():
    said = text(picture(*begun(), *killed(), report=reported(*NODES)))
    for answer in (
        "elastane top   demo",
        "● training   11 of 12 workers on 3 nodes   8 min 20 s   round 2, attempt 0",
        "step 1,200   3.2 steps/s   usual 3   ",
        "goodput 9",
        "saved step 900, 3 min ago   restarts 1 of 3 used",
        "workers  ",
        "steps/s  ",
        "11:46:40",
        "node-b    ● training      1,234      3.2  4-7",
        "INCIDENTS   1 fault, 0 planned changes",
        "#1   11:53:20  × recovered 3.00 s   Rank 6 on node-b: SIGKILL",
        "WHERE THE TIME WENT   goodput 9",
        "productive ",
        "CHECKPOINTS   1 saved",
        "step 900  3 min ago  4.26 GB  2.3 s",
    ):
        assert answer in said, f"{answer}\n{said}"


def test_the_worker_curve_and_the_marks_share_a_time_axis():
    rows = text(picture(*begun(), *killed(), now=500)).splitlines()
    [world] = [row for row in rows if row.startswith("workers")]
    [marks] = [row for row in rows if row.startswith("incidents ")]
    column = marks.index("×")
    assert column == 9 + 64 * 400 // 500
    assert world[column - 1] == "█" != world[column + 1], "the curve does not fall after the fault"


def test_a_wide_terminal_shows_causes_and_all_panels_side_by_side():
    said = text(picture(*begun(), *killed()), 120, 40)
    assert "worker of rank 6" in said and "with SIGKILL: no memory" in said
    [row] = [row for row in said.splitlines() if row.startswith("NODE")]
    assert "WHERE THE TIME WENT" in row


def test_a_narrow_terminal_omits_facts_and_cuts_none():
    said = text(picture(*begun(), *killed(), report=reported(*NODES)), 60, 40)
    assert "…" not in "\n".join(said.splitlines()[:6]), said
    assert "11 of 12 workers on 3 nodes" in said and "round 2" not in said
    assert "CHECKPOINTS   1 saved" in said


def test_problems_that_need_a_user_come_first():
    said = text(picture(*begun(), event("checkpoint-failed", "node-a", step=1100, slug="disk-full",
                                        location="/ckpt", **at(405))))  # fmt: skip
    [need] = [row for row in said.splitlines() if row.startswith("!")]
    assert need == "! The save of step 1,100 failed: /ckpt on node-a [disk-full]"
    assert "× step 1,100 failed [disk-full]" in said


@pytest.mark.parametrize(
    ("events", "facts", "words"),
    [
        ([event("agent-started", "a", **at(0))], {"now": 5}, "○ starting   5.0 s"),
        ([], {"now": 5}, "no step reported"),
        ([*begun(), event("waiting", "node-a", "2 nodes of 3", min_nodes=3, **at(405))], {},
         "○ waiting"),
        (begun(), {"has_agents": False, "now": 4000}, "? silent, no event for 1 h 0 min"),
        ([*begun(), event("job-ended", "node-a", "all succeeded", ok=True, **at(450))], {},
         "✓ done   12 workers on 3 nodes   7 min 30 s"),
        ([*begun(), *killed()[:1],
          event("job-ended", "node-a", "no restarts left", ok=False, exit_code=1, **at(450))], {},
         "× failed   12 workers on 3 nodes   exit code 1"),
    ],
    ids=["starting", "empty", "waiting", "silent", "done", "failed"],
)  # fmt: skip
def test_each_state_has_a_sign_and_a_word(events, facts, words):
    assert words in text(picture(*events, **facts))


def test_a_failed_job_is_shown_with_its_reason_and_next_step():
    said = text(picture(*begun(), *killed()[:1], event(
        "job-ended", "node-a", "no restarts left", ok=False, exit_code=1, **at(450))))  # fmt: skip
    assert "no restarts left" in said and "ended the job" in said
    assert "! Find out why: Rank 6 on node-b: SIGKILL (#1)" in said
    assert "→ Start it again: step 900 is saved" in said
    assert "step 1,200 at the last count" in said and "before the end" in said


def test_a_failed_worker_is_named_beside_the_running_ones_of_its_node():
    said = text(picture(*begun(), killed()[0]))
    assert "node-b    × failed            -        -  6; 4-5,7 training" in said


def test_a_slow_rank_is_named_beside_its_node():
    slow = event(
        "straggler", "node-b", "rank 6 makes the others wait", rank=6, why="loader", **at(60)
    )
    said = text(picture(*begun(), slow), 100, 40)
    assert "4-7; 6 slow (loader)" in said
    assert "! Rank 6 is slow: rank 6 makes the others wait" in said


def step_times(seconds, *own_ms, median_ms=25.0, **more):
    own = ",".join(map(str, own_ms))
    return event("step-times", "node-a", own_ms=own, median_ms=median_ms, **more, **at(seconds))


def test_the_slowest_worker_of_each_node_is_shown_with_its_own_part():
    slow = step_times(60, *([25] * 6), 41, *([25] * 5))
    for width in (80, 120):
        said = text(picture(*begun(), slow, report=reported(*NODES)), width)
        assert "! 11 workers wait 16 ms in each step for rank 6 on node-b" in said
        assert "STEPS/S       OWN PART  RANKS" in said
        assert "    3.2    41 ms 1.64×  4-7" in said and "    25 ms 1.00×  8-11" in said
    assert "own part of a step 25 ms in the median" in said


def test_without_a_slow_worker_the_median_of_the_current_world_is_shown():
    usual = step_times(60, *([25] * 12))
    said = text(picture(*begun(), usual))
    assert "own part of a step 25 ms in the median" in said and "wait 1" not in said
    assert "OWN PART" not in text(picture(*begun(), usual, *killed()))


def test_a_node_for_which_others_wait_is_never_omitted():
    names = [f"n{number:03}" for number in range(200)]
    slow = step_times(60, 90, 26, ranks="601,12", nodes="n150 n003", workers=800)
    said = text(picture(settled(1, " ".join(names), 800, nodes=200, **at(0)),
                        *workers_of(1, 1, names), slow))  # fmt: skip
    assert "! 799 workers wait 65 ms in each step for rank 601 on n150" in said
    assert "  90 ms 3.60×  4 workers" in said


def test_the_node_for_which_a_stalled_job_waits_is_never_omitted():
    names = [f"n{number:03}" for number in range(200)]
    waits = event(
        "culprit", "n150", "rank 601 on node n150 computes", ranks="601", still_s=30.0,
        round=1, attempt=0, culprit_node="n150", **{"class": "busy"}, **at(60),
    )  # fmt: skip
    said = text(picture(settled(1, " ".join(names), 800, nodes=200, **at(0)),
                        *workers_of(1, 1, names), waits))  # fmt: skip
    assert "n150    ! stalled          -        -  601 awaited; 600,602-603" in said
    assert "n000    ! stalled" in said and "training" not in said


def test_failing_nodes_are_never_omitted_and_others_are_counted():
    names = [f"n{number:03}" for number in range(200)]
    events = [settled(1, " ".join(names), 800, nodes=200, **at(0)), *workers_of(1, 1, names)]
    events.append(event("workers-draining", "n150", **at(100)))
    said = text(picture(*events))
    assert "n150" in said and "↓ draining" in said and "  and 19" in said
    assert text(picture(*events), 120, 2000).count("● training") == 200


def test_concurrent_incidents_are_counted_on_the_timeline():
    events = [settled(1, "node-a", 4, nodes=1, **at(0)), *workers_of(1, 1, ["node-a"])]
    for round_ in range(1, 13):
        events += [exited(0, node="node-a", round=round_, **at(100 + round_)),
                   settled(round_ + 1, "node-a", 4, **at(100.5 + round_)),
                   *workers_of(round_ + 1, 100.6 + round_, ["node-a"])]  # fmt: skip
    view = picture(*events, now=5000)
    [marks] = [row for row in text(view).splitlines() if row.startswith("incidents ")]
    assert marks.split() == ["incidents", "*"]
    assert "#12 " in text(view) and re.search("and [5-9] more", text(view))


def test_a_log_without_decisions_of_the_coordinator_says_what_is_not_known():
    shown = text(picture(event("agent-started", "b", **at(0)), *workers_of(1, 4, ["b"])), 100, 60)
    assert "steps not known here" in shown and "not known here\n" in shown
    assert "not known: the coordinator logs on another node" in shown
    assert "yet" not in shown and "none so far" not in shown


def test_an_account_that_begins_later_than_the_run_says_so():
    takes_over = event("coordinator-started", "b", **at(100))
    begun_b = [event("agent-started", "b", **at(0)), *workers_of(1, 4, ["b"])]
    assert "without the 100.00 s before: the coord" in text(picture(*begun_b, takes_over), 100, 60)


def test_an_incident_that_is_open_when_all_nodes_have_left_grows_no_longer():
    left = [event("node-released", node, **at(410)) for node in NODES]
    lost = [one for one in killed() if one.time_s < BEGUN_S + 401]
    shown = text(picture(*begun(), *lost, *left), 100, 60)
    assert "open at the end" in shown and "open for" not in shown


def test_control_characters_of_the_log_are_escaped():
    bad = "\x1b[2J\x07\u202e[bold]x"
    waiting = event("waiting", "node-a", bad, min_nodes=3, **at(411))
    said = text(picture(*begun(), event("node-joined", bad, **at(410)), waiting), 120, 50)
    assert "[bold]x" in said
    assert not [char for char in said if not char.isprintable() and char != "\n"]


def test_every_symbol_has_an_ascii_form():
    for width, height in ((80, 24), (120, 50)):
        said = plain(text(picture(*begun(), *killed(), report=reported(*NODES)), width, height))
        assert said.replace("…", "~").isascii(), [c for c in said if not c.isascii()]
        assert "* training" in said


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 70), live=st.booleans())
def test_a_frame_never_exceeds_its_terminal(width, height, live):
    for one in (picture(), picture(*begun(), *killed(), report=reported(*NODES))):
        text(replace(one, is_live=live), width, height)
