"""The view model: all displayed data follow from events and progress."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_job import write_job
from view_events import event, exited, play, settled, started

from elastane.cli._demo_story import (
    EXAMPLES,
    STORY,
    TITLES,
    Comparison,
    Cost,
    DemoDone,
    DemoResult,
    WorkerEnd,
    chaos,
    cost_of,
    is_to_slow_down,
    next_act,
)
from elastane.observe.events import read_events
from elastane.observe.screen import LiveScreen, PlainLines, face_for, sparkline
from elastane.observe.step_times import step_times_of
from elastane.observe.view import (
    HISTORY_MAX,
    LINES_MAX,
    IncidentTrack,
    JobView,
    StepProgress,
    after_act,
    after_event,
    after_progress,
    after_steps,
    decode_progress,
)
from elastane.protocol.log_events import EventKind


def point(step: int, *, pid: int = 1, at: float | None = None, **more) -> StepProgress:
    values = {"loss": 1.0, "world_size": 4, "total_steps": 600, **more}
    return StepProgress(step=step, pid=pid, time=float(step) if at is None else at, **values)


def test_a_nodes_workers_are_those_of_its_latest_start_with_ranks_from_the_world():
    view = play(
        settled(1, "node-a node-b", 4),
        started("node-a", 10, 11),
        started("node-b", 20, 21),
        started("node-b", 30, 31),
    )
    assert [worker.pid for worker in view.node("node-b").workers] == [30, 31]
    assert view.node("node-b").state == "training"
    assert view.first_ranks() == {"node-a": 0, "node-b": 2}
    assert (view.round, view.attempt, view.world_size) == (1, 0, 4)


def test_only_the_worker_that_failed_is_shown_as_failed():
    view = play(
        started("node-a", 10, 11), event(EventKind.WORKER_EXITED, local_rank=1, exit_code=-9)
    )
    assert [worker.state for worker in view.node("node-a").workers] == ["training", "failed"]
    assert view.lines[-1].tone == "bad"


def test_a_successful_worker_is_not_shown_as_a_failure():
    view = play(started("node-a", 10), event(EventKind.WORKER_EXITED, local_rank=0))
    assert view.node("node-a").workers[0].state == "done"
    assert view.lines[-1].tone == "plain"


def test_a_worker_that_was_asked_to_stop_is_not_shown_as_a_failure():
    stopped = event(EventKind.WORKER_EXITED, local_rank=0, exit_code=-15, stopped=True)
    view = play(started("node-a", 10, 11), event(EventKind.WORKERS_STOPPING), stopped)
    assert view.lines[-1].tone == "plain"
    assert [worker.state for worker in view.node("node-a").workers] == ["stopped", "training"]


def test_a_worker_that_fails_while_others_are_asked_to_stop_is_shown_as_failed():
    failed = event(EventKind.WORKER_EXITED, local_rank=0, exit_code=1, stopped=False)
    view = play(started("node-a", 10, 11), event(EventKind.WORKERS_DRAINING), failed)
    assert view.lines[-1].tone == "bad"
    assert view.node("node-a").workers[0].state == "failed"


def test_at_the_end_of_a_job_only_the_node_whose_worker_failed_is_shown_as_failed():
    exits = [
        event(EventKind.WORKER_EXITED, node, local_rank=0, exit_code=code, stopped=stopped)
        for node, code, stopped in (("node-a", 3, False), ("node-b", -15, True))
    ]
    ends = [event(EventKind.AGENT_STOPPED, node, exit_code=1) for node in ("node-a", "node-b")]
    view = play(started("node-a", 10), started("node-b", 20), *exits,
                event(EventKind.JOB_ENDED, ok=False), *ends)  # fmt: skip
    assert [node.state for node in view.nodes.values()] == ["failed", "stopped"]


def test_a_node_that_announced_its_departure_has_left_and_is_not_lost():
    leaving = event(EventKind.NODE_LEAVING, "node-b", "SIGTERM")
    view = play(started("node-b", 20), leaving, event(EventKind.NODE_DEPARTED, "node-b"))
    assert view.node("node-b").state == "left"
    assert view.lines[-1].tone == "plain"


def test_a_reason_that_repeats_another_is_shown_once():
    stopping = event(EventKind.WORKERS_STOPPING, reason="rank 1 died")
    view = play(event(EventKind.INCIDENT, reason="rank 1 died"), stopping)
    assert [line.kind for line in view.lines] == ["incident"]
    assert view.node("node-a").state == "stopping"


def test_a_departed_node_stays_gone_until_it_starts_again():
    view = play(started("node-b", 20), event(EventKind.NODE_DEPARTED, "node-b"))
    assert view.node("node-b").state == "gone"
    late = after_event(view, event(EventKind.WORKERS_STOPPED, "node-b"))
    assert late.node("node-b").state == "gone"
    back = after_event(late, event(EventKind.AGENT_STARTED, "node-b"))
    assert back.node("node-b").state == "starting"


def test_a_node_that_ended_well_keeps_its_workers_in_the_picture_and_a_lost_one_does_not():
    stopped = event(EventKind.AGENT_STOPPED, "node-a", exit_code=0)
    done = play(started("node-a", 10), stopped).node("node-a")
    assert (done.state, len(done.workers)) == ("done", 1)
    gone = play(started("node-a", 10), event(EventKind.NODE_DEPARTED, "node-a")).node("node-a")
    assert (gone.state, gone.workers) == ("gone", ())


def test_the_reason_of_every_event_is_a_line_even_of_a_kind_from_the_future():
    view = play(event("node-teleported", reason="it could"))
    assert [(line.kind, line.text) for line in view.lines] == [("node-teleported", "it could")]
    assert view.nodes == {}


def test_one_node_at_a_time_is_shown_as_the_coordinators():
    view = play(
        event(EventKind.COORDINATOR_STARTED, "node-a"),
        event(EventKind.COORDINATOR_STARTED, "node-b"),
    )
    assert [node.coordinates for node in view.nodes.values()] == [False, True]


def test_the_view_is_bounded():
    view = JobView()
    for index in range(HISTORY_MAX + 10):
        view = after_progress(view, point(index))
    for index in range(LINES_MAX + 10):
        view = after_event(view, event(EventKind.WAITING, reason=str(index)))
    assert len(view.losses) == HISTORY_MAX
    assert len(view.lines) == LINES_MAX
    assert view.lines[-1].text == str(LINES_MAX + 9)


def test_a_count_of_the_coordinator_does_not_set_back_the_progress_of_the_script():
    """The coordinator hears of steps later: the last line of a demo would show an older step."""
    view = after_steps(JobView(), 1.0, 5)
    assert view.step == 5
    view = after_progress(view, point(300))
    view = after_steps(view, 2.0, 297)
    assert view.step == 300 and view.steps[-1].steps == 297


def test_a_torn_or_foreign_line_is_no_progress():
    assert decode_progress(b'{"step": 1, "tot') is None
    assert decode_progress(b'{"hello": 1}') is None
    assert decode_progress(b"\xff\xfe") is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(0, 80))
def test_a_sparkline_is_never_wider_than_its_room_and_shows_the_extremes(values, width):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    if line and len(set(values)) > 1 and len(values) <= width:
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


def test_plain_lines_say_each_event_once_and_each_tenth_of_the_training():
    out = StringIO()
    view = play(event(EventKind.NODE_JOINED, reason="node-a joined"))
    with PlainLines(out) as face:
        face.show(view)
        face.show(view)
        for step in range(1, 601):
            view = after_progress(view, point(step))
            face.show(view)
        face.show(after_act(view, 101.5, "node-b", "SIGKILL to a worker"))
    lines = out.getvalue().splitlines()
    assert sum("node-joined: node-a joined" in line for line in lines) == 1
    assert sum("step" in line and "/600" in line for line in lines) == 10
    assert lines[-1].split() == ["1.50", "s", "node-b", "act:", "SIGKILL", "to", "a", "worker"]


def test_without_a_terminal_there_is_no_live_screen():
    assert isinstance(face_for(StringIO(), "title"), PlainLines)


def test_the_live_screen_shows_nodes_workers_reasons_and_progress():
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40)
    view = play(
        settled(3, "node-a", 2), started("node-a", 10, 11), event("incident", reason="rank 1 died")
    )
    view = after_progress(view, point(300, accuracy=0.985))
    with LiveScreen(console, "demo") as face:
        face.show(view)
    text = out.getvalue()
    for expected in ("node-a", "rank 1", "training", "rank 1 died", "98.5%", "300/600", "round 3"):
        assert expected in text


def test_acts_come_in_order_by_progress_and_not_before_training_continued():
    kill_worker, kill_node = STORY.acts[0], STORY.acts[1]
    early = [point(step) for step in range(1, int(kill_worker.at * 600))]
    assert next_act(STORY, early, [], 4) is None
    due = [point(step) for step in range(1, int(kill_node.at * 600) + 1)]
    assert next_act(STORY, due, [], 4) == kill_worker
    done = [DemoDone(act="kill-worker", time_s=200.5, what="")]
    assert next_act(STORY, due, done, 4) is None  # still the same process: it has not recovered
    again = [point(200 + i, pid=2, at=201.0 + i) for i in range(STORY.steady_steps - 1)]
    assert next_act(STORY, due[:200] + again, done, 4) is None
    settled_ = [point(240 + i, pid=2, at=201.0 + i) for i in range(STORY.steady_steps)]
    assert next_act(STORY, due[:200] + settled_, done, 4) == kill_node


def test_no_act_comes_before_all_workers_are_back():
    due = [point(step) for step in range(1, 200)]
    done = [DemoDone(act="kill-worker", time_s=200.5, what="")]
    fewer = [point(200 + i, round=2, at=201.0 + i, world_size=3) for i in range(50)]
    assert next_act(STORY, due + fewer, done, 4) is None
    all_back = [point(250 + i, round=3, at=251.0 + i) for i in range(STORY.steady_steps)]
    assert next_act(STORY, due + fewer + all_back, done, 4) == STORY.acts[1]


def test_the_training_slows_down_near_its_end_until_the_last_act_has_been_recovered_from():
    early, late = [point(step) for step in range(1, 300)], [point(step) for step in range(1, 500)]
    done = [DemoDone(act=one.act, time_s=500.5, what="") for one in STORY.acts]
    assert not is_to_slow_down(STORY, [], []) and not is_to_slow_down(STORY, early, done[:1])
    assert is_to_slow_down(STORY, late, done[:2]) and is_to_slow_down(STORY, late, done)
    back = [point(500, round=2, at=501.0)]
    assert not is_to_slow_down(STORY, late + back, done)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_chaos_is_the_same_again_and_leaves_a_node_that_trains(seed, rounds):
    plan = chaos(seed, rounds)
    assert plan == chaos(seed, rounds)
    assert [one.at for one in plan.acts] == sorted(one.at for one in plan.acts)
    nodes = 2
    for one in plan.acts:
        nodes += {"kill-node": -1, "leave": -1, "add-node": 1}.get(one.act, 0)
        assert 1 <= nodes <= 2 and 0 <= one.pick < 1
    assert nodes == 2
    assert rounds < 2 or {one.act for one in plan.acts} == set(TITLES)


def test_the_cost_of_an_act_counts_redone_steps_and_ignores_the_old_process():
    done = DemoDone(act="kill-worker", time_s=50.2, what="")
    before = [point(step, at=float(step)) for step in range(1, 51)]
    straggler = point(51, at=50.3)
    after = [point(41, pid=2, at=51.7, world_size=2), point(42, pid=2, at=51.8)]
    cost = cost_of([*before, straggler, *after], done)
    assert cost.redone_steps == 11
    assert round(cost.recovery_s, 6) == 1.5
    assert round(cost.interrupted_s, 6) == 1.4
    assert cost.world_size == 2
    assert cost_of([*before, straggler], done) is None


def result(learned=0.9861, **more) -> DemoResult:
    cost = Cost(
        act="kill-node", what="", recovery_s=0.42, interrupted_s=0.44, redone_steps=7, world_size=2
    )
    return DemoResult(EXAMPLES["digits"], learned, steps=600, total_s=30.0, acts=[cost], **more)


def test_the_summary_says_accuracy_recovery_and_redone_steps_and_fails_below_the_promise():
    good = result()
    assert "98.61%" in good.as_text()
    assert "0.42 s" in good.as_text()
    assert good.ok
    bad = result(0.9)
    assert not bad.ok
    assert "not the 0.97" in bad.as_text()


def test_a_lower_loss_counts_as_better():
    assert EXAMPLES["gpt"].is_reached(2.3) and not EXAMPLES["gpt"].is_reached(5.5)


@pytest.mark.parametrize(
    "here", [[], [("a", 600), ("b", 600)], [("a", 599)], [("b", 600), ("b", 600)]]
)
def test_other_weights_than_the_undisturbed_runs_are_a_failure(here):
    undisturbed = [WorkerEnd(rank=0, steps=600, weights="a")]
    ends = [WorkerEnd(rank=rank, steps=steps, weights=w) for rank, (w, steps) in enumerate(here)]
    bad = result(comparison=Comparison(7, ends, undisturbed))
    assert not bad.ok and "NOT equal" in bad.as_text()
    good = result(comparison=Comparison(7, undisturbed * 3, undisturbed))
    assert good.ok and "--seed 7" in good.as_text()


def test_the_account_of_a_log_follows_the_same_incidents_as_the_view(tmp_path):
    """`explain` and `status` show no nodes, so their account follows less than a whole view."""
    fence = {"round": 6, "attempt": 0}
    story = [
        *read_events(write_job(tmp_path, now_s=5000.0)),
        event("straggler", "node-c", rank=9, why="loader", time_s=5001.0),
        event("culprit", "node-c", ranks="9", still_s=9.0, time_s=5020.0, **fence),
        exited(9, node="node-c", round=6, time_s=5030.0),
        settled(7, "node-a node-b", 8, time_s=5031.0),
        event("straggler", "node-a", rank=1, why="compute", time_s=5040.0),
        event("node-leaving", "node-b", time_s=5041.0),
        event("node-departed", "node-b", round=7, attempt=0, time_s=5042.0),
        event("job-ended", "node-a", ok=False, exit_code=1, time_s=5050.0),
        event("agent-started", "node-a", time_s=5060.0),
        event("coordinator-started", "node-a", time_s=5061.0),
        event("culprit", "node-a", ranks="", still_s=3.0, time_s=5070.0, round=1, attempt=0),
        settled(1, "node-a", 4, time_s=5080.0),
        # All agents were killed, and started again.
        event("agent-started", "node-a", time_s=5090.0),
        event("coordinator-started", "node-a", time_s=5091.0),
        settled(1, "node-a", 4, time_s=5092.0),
        event("culprit", "node-a", ranks="", still_s=3.0, time_s=5095.0, round=1, attempt=0),
    ]
    view, track = JobView(), IncidentTrack()
    for one in story:
        view = after_event(view, one)
        track.add(one)
        assert (track.run, track.incidents) == (view.run, view.incidents), one
        assert track.stragglers == view.stragglers, one
        assert track.started_s == view.started_s, one
    assert track.run == 3 and track.incidents.beside("stall") is not None


def test_a_node_that_registers_with_another_coordinator_is_here_again():
    """The last one had lost its connection to the node, which trained on."""
    lost = [started("node-b", 20), event(EventKind.NODE_DEPARTED, "node-b")]
    view = play(*lost, event(EventKind.NODE_REGISTERED_AGAIN, "node-b"))
    assert view.node("node-b").state == "waiting"


def test_a_node_that_left_with_its_coordinator_has_left_though_the_next_one_missed_it():
    left = [started("node-b", 20), event(EventKind.AGENT_STOPPED, "node-b", exit_code=143)]
    before = play(*left).node("node-b").state
    missed = event(EventKind.NODE_DEPARTED, "node-b")
    assert play(*left, missed).node("node-b").state == before != "gone"


def test_a_slow_rank_and_a_stall_are_over_once_their_world_has_ended():
    """The node of the coordinator was lost while all waited for a rank that had been slow."""
    lost = "the node of rank 0 did not come back to the new coordinator within the time"
    view = play(
        settled(1, "a b", 2, time_s=1.0),
        started("a", 1, round=1, attempt=0),
        started("b", 2, round=1, attempt=0),
        event("step-times", time_s=10.0, own_ms="26,39", median_ms=32.5),
        event("straggler", "b", "rank 1 is slow", rank=1, why="loader", time_s=10.0),
    )
    assert view.stragglers and step_times_of(view).waits
    found = {"ranks": "1", "class": "busy", "still_s": 5.0, "round": 1, "attempt": 0}
    stalled = after_event(view, event("culprit", "a", "rank 1 computes", time_s=20.0, **found))
    assert stalled.incidents.beside("stall") and not step_times_of(stalled).waits
    gone = event("incident", "b", lost, departed=1, round=1, attempt=0, time_s=30.0)
    ended = after_event(stalled, gone)
    assert not ended.stragglers and not step_times_of(ended).waits
    stall, node = ended.incidents.listed
    assert (stall.state, stall.to_s, node.kind, node.state) == ("recovered", 30.0, "node", "open")
    assert (node.title, node.node) == (lost[0].upper() + lost[1:], "")
