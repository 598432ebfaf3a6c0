"""The page's data follow from the view of the job and the coordinator's report."""

import msgspec
import pytest
from reports import report_of
from view_events import event, exited, play, settled, started

from elastane.dashboard.index import EventFilter, EventIndex
from elastane.dashboard.snapshot import (
    BUCKETS,
    DETAILED_NODES_MAX,
    SourceFacts,
    sections_of,
    state_of,
)
from elastane.observe.account import NOT_HERE, Account, Interval, TimeCause, account_of
from elastane.observe.events import PlacedEvent, encode_line
from elastane.observe.needs import needs_of
from elastane.observe.rates import rates_of, series_of
from elastane.observe.view import STEP_POINTS_MAX, after_event
from elastane.protocol.messages import NodeStatus


def source(**more):
    facts = {"now_s": 200.0, "key": "j", "folder": "/f", "events": 1, "has_agents": True}
    return SourceFacts(**{**facts, **more})


def training(*more):
    return play(settled(1, "a b", 4, time_s=100.0), started("a", 1, 2), started("b", 3, 4), *more)


def failure(at_s=110.0, rank=1, node="a", round_=1):
    return exited(rank, time_s=at_s, node=node, round=round_)


@pytest.mark.parametrize(
    ("events", "facts", "state"),
    [
        ([], {}, "training"),
        ([failure()], {}, "recovering"),
        ([failure(), settled(2, "a b", 3), started("a", 1, round=2, attempt=0)], {}, "training"),
        ([event("waiting")], {}, "waiting"),
        ([event("waiting", trains=True)], {}, "training"),
        ([event("job-ended", ok=True)], {"has_agents": False}, "done"),
        ([event("job-ended", ok=False)], {}, "failed"),
        ([event("node-released", node) for node in "ab"], {}, "stopped"),
        ([event("node-released", "a"), event("node-departed", "b")], {}, "stopped"),
        ([event("node-departed", node) for node in "ab"], {"has_agents": False}, "silent"),
        ([], {"has_agents": False}, "silent"),
        ([], {"has_agents": False, "now_s": 120.0}, "training"),
    ],
)
def test_the_state_of_a_job_is_one_word(events, facts, state):
    assert state_of(training(*events), source(**facts)) == state


def test_a_job_that_all_nodes_left_needs_a_new_start_and_waits_for_nothing():
    went = [event("node-released", node) for node in "ab"]
    left = training(event("waiting", min_nodes=2), *went)
    assert state_of(left, source()) == "stopped"
    assert [(need.severity, need.text) for need in needs_of(left)] == [
        ("next", "Start it again with the same command")
    ]


def test_checkpoints_are_counted_also_those_without_an_event_of_their_own():
    def saved(step, **more):
        return event("checkpoint-saved", step=step, location="/c", time_s=100.0 + step, **more)

    failed = event("checkpoint-failed", step=9, slug="storage-full", time_s=109.0)
    found = sections_of(training(saved(1), saved(4, saves=3), failed), source()).checkpoints
    assert (found.saved, found.failed, len(found.newest)) == (4, 1, 3)


def test_no_state_is_said_before_the_whole_log_was_read():
    shown = sections_of(training(failure()), source(share_read=0.41, has_agents=False))
    assert (shown.job.state, shown.job.reason) == ("reading", "41% of its log was read")
    assert shown.needs == [] and not shown.job.is_read


def test_a_job_without_a_world_is_starting():
    assert state_of(play(event("agent-started")), source()) == "starting"


def test_workers_have_ranks_by_the_order_of_the_world_and_their_own_states():
    found = sections_of(training(failure()), source()).nodes.here
    ranks = [[(w.rank, w.state) for w in node.workers] for node in found]
    assert ranks == [[(0, "training"), (1, "failed")], [(2, "training"), (3, "training")]]
    assert [node.state for node in found] == ["failed", "training"]


def test_a_worker_that_all_others_wait_for_is_awaited_and_the_job_stalled():
    text = "rank 2 on node b has not entered all_reduce #7 (train.py:8); ranks 0-1, 3 wait in it"
    found = {"ranks": "2", "class": "busy", "still_s": 20.0, "round": 1, "attempt": 0}
    slower = NodeStatus(node_id="a", host="h", state="running", node_rank=0, local_world_size=2,
                        heard_s=0.5, steps_per_s=0.3)  # fmt: skip
    report = msgspec.structs.replace(report_of("j"), nodes=(slower,))
    shown = sections_of(training(event("culprit", "b", text, **found)), source(report=report))
    assert (shown.job.state, shown.job.reason, shown.rate.now) == ("stalled", text, 0.0)
    ranks = [(w.rank, w.state) for node in shown.nodes.here for w in node.workers]
    assert ranks == [(0, "stalled"), (1, "stalled"), (2, "awaited"), (3, "stalled")]
    assert [node.state for node in shown.nodes.here] == ["stalled", "stalled"]
    assert shown.nodes.here[0].rate == 0.0
    [need] = shown.needs
    assert (need.severity, need.incident) == ("act", 1)


def test_a_rank_for_which_the_others_wait_is_marked_and_needs_a_look_until_it_is_over():
    slow = event("straggler", "b", "rank 2 on node b makes the others wait", rank=2, why="loader")
    view = training(slow)
    shown = sections_of(view, source())
    assert [[w.slow for w in node.workers] for node in shown.nodes.here] == [
        ["", ""],
        ["loader", ""],
    ]
    assert [(need.severity, need.text) for need in shown.needs] == [("watch", "Rank 2 is slow")]
    more = event("straggler", "a", "rank 0 on node a makes the others wait", rank=0, why="compute")
    assert needs_of(training(slow, more))[0].text == "Ranks 0, 2 are slow"
    assert not training(slow, event("straggler-ended", "b", rank=2)).stragglers
    assert not training(slow, settled(2, "a b", 4)).stragglers
    assert not training(slow, event("job-ended", ok=True)).stragglers


def test_facts_of_the_coordinator_are_shown_if_it_answers():
    known = NodeStatus(node_id="b", host="h", state="away", node_rank=1, local_world_size=2,
                       heard_s=2.5, progress=7, steps_per_s=3.0)  # fmt: skip
    report = msgspec.structs.replace(report_of("j"), nodes=(known,), max_restarts=9)
    found = sections_of(training(), source(report=report))
    assert found.job.is_live and found.job.restarts_allowed == 9 and found.rate.now == 3.0
    rows = {node.name: (node.state, node.step, node.heard_s) for node in found.nodes.here}
    assert rows == {"a": ("training", None, None), "b": ("away", 7, 2.5)}


def test_a_large_job_lists_the_workers_of_nodes_that_are_not_well_alone():
    names = [f"n{i:04}" for i in range(DETAILED_NODES_MAX * 2)]
    view = play(settled(1, "", 1), *(started(name, 1, 2) for name in names), failure(node="n0007"))
    nodes = sections_of(view, source()).nodes
    assert [node.name for node in nodes.here if node.workers] == ["n0007"]
    assert {node.worker_count for node in nodes.here} == {2} and not nodes.has_all_workers


def test_a_snapshot_of_a_thousand_nodes_is_small():
    names = [f"node-{i:04}" for i in range(1000)]
    view = play(settled(1, "", 1), *(started(name, *range(8)) for name in names))
    assert len(msgspec.json.encode(sections_of(view, source()))) < 120_000


def test_nodes_of_a_job_that_failed_stay_as_they_were():
    end = event("job-ended", ok=False, time_s=111.0)
    stopped = [event("workers-stopped", n) for n in "ab"]
    left = [event("agent-stopped", n, exit_code=1) for n in "ab"]
    found = sections_of(training(failure(), end, *stopped, *left), source()).nodes
    assert [(node.name, node.state, node.worker_count) for node in found.here] == [
        ("a", "failed", 2), ("b", "stopped", 2),
    ]  # fmt: skip
    assert [worker.state for worker in found.here[0].workers] == ["stopped", "failed"]


def steps(*pairs):
    return [event("progress", time_s=at_s, steps=made) for at_s, made in pairs]


def test_the_rate_is_that_of_the_last_seconds_and_the_usual_one_a_median():
    view = training(*steps((100, 0), (110, 20), (120, 40), (130, 60), (140, 65)))
    assert rates_of(view, 145.0).now == pytest.approx((20 + 5) / 20)
    assert rates_of(view, 145.0).usual == 2.0
    assert rates_of(view, 200.0).now == 0.0, "nothing was counted for a minute"


def test_the_world_of_a_young_job_is_drawn_until_now_and_no_further():
    """The time line shows a minute at least."""
    young = play(settled(1, "a", 4, time_s=100.0))
    world = sections_of(young, source(now_s=115.0)).series.world
    assert world[: len(world) // 4] == [4] * (len(world) // 4)
    assert set(world[len(world) // 4 + 1 :]) == {None}
    assert series_of(young, 100.0, 120.0, 2).world == [4, 4]


def test_a_rate_that_the_workers_measured_is_shown_without_a_step():
    def paces(*at):
        return [event("pace", time_s=at_s, made=made, seconds=10.0) for at_s, made in at]

    measured = paces((110, 20), (120, 20), (130, 30))
    view = training(*measured)
    assert rates_of(view, 135.0).now == pytest.approx((20 + 30) / 20)
    assert rates_of(view, 135.0).usual == 2.5
    assert series_of(view, 100.0, 130.0, 3).rate == [2.0, 2.0, 3.0]
    assert not sections_of(view, source()).job.has_steps
    view = training(*measured, *steps((140, 1000), (150, 1020)))
    assert series_of(view, 130.0, 150.0, 2).rate == [0.0, 2.0], "step 1000 is where it continues"
    assert rates_of(view, 150.0).usual == 2.0
    assert sections_of(view, source()).job.has_steps


def test_steps_after_a_silence_were_made_at_its_end_and_a_restart_makes_none_negative():
    view = training(*steps((100, 0), (110, 20), (170, 40), (180, 10), (190, 30)))
    series = series_of(view, 100.0, 200.0, 10)
    assert series.rate == [2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 2.0, None]


def test_the_curve_of_days_at_one_rate_is_flat_and_keeps_every_step():
    """Four days, with the jitter of real heartbeats and an hour without steps on the first day."""
    at_s, made, logged = 1e9, 0, []
    for number in range(4 * 8640):
        length_s = 10.0 + 0.04 * (number % 5 - 2)
        at_s += length_s + (3600.0 if number == 5000 else 0.0)
        made += round(200.0 * length_s)
        logged.append((at_s, made))
    view = play(*steps(*logged))
    assert len(view.steps) <= STEP_POINTS_MAX
    series = series_of(view, logged[0][0], logged[-1][0], BUCKETS)
    known = [rate for rate in series.rate if rate is not None]
    silent = [rate for rate in known if rate < 198.0]
    assert len(known) >= BUCKETS - 1 and max(known) < 202.0
    assert silent.count(0.0) >= 3 and len(silent) <= 6, "the hour is not averaged away"
    total = sum(rate * series.bucket_s for rate in known)
    assert total == pytest.approx(made - logged[0][1], rel=0.005)


def test_the_world_of_a_bucket_is_its_smallest():
    view = play(settled(1, "a", 4, time_s=100.0), settled(2, "a", 3, time_s=115.0),
                settled(3, "a", 4, time_s=116.0),
                event("job-ended", ok=True, time_s=135.0))  # fmt: skip
    assert series_of(view, 90.0, 150.0, 6).world == [None, 4, 3, 4, 4, None]


def test_a_span_of_no_length_has_series_too():
    assert len(series_of(training(), 100.0, 100.0, BUCKETS).rate) == BUCKETS


def texts(view):
    return [(need.severity, need.text.partition(":")[0]) for need in needs_of(view)]


def test_a_job_that_trains_well_needs_nothing():
    assert needs_of(training(event("checkpoint-saved", step=7))) == []


def test_needs_come_worst_first_and_at_most_three():
    view = training(
        event("replacement", used=2, allowed=3, round=1, attempt=0),
        event("checkpoint-failed", step=7, slug="checkpoint-write"),
        event("events-lost", events=3),
        event("waiting", reason="for nodes"),
    )
    assert [need.severity for need in needs_of(view)] == ["act", "act", "act"]
    assert texts(training(event("replacement", used=2, allowed=3))) == [
        ("act", "Because"), ("watch", "One restart is left of 3"),
    ]  # fmt: skip


def test_a_node_that_fails_again_and_again_is_named():
    failures = [exited(0, node="b", round=n, attempt=0, time_s=100.0 + n) for n in range(3)]
    settles = [settled(n + 1, "a b", 4, time_s=100.5 + n) for n in range(3)]
    view = training(*(one for pair in zip(failures, settles, strict=True) for one in pair))
    assert ("watch", "b failed 3 times in the last 3 failures") in texts(view)


def test_after_a_failure_the_needs_are_the_cause_and_a_new_run():
    saved = event("checkpoint-saved", step=1200, location="/c")
    end = event("job-ended", ok=False, round=1, attempt=0, time_s=120.0)
    view = training(saved, failure(), end)
    assert texts(view) == [("act", "Find out why"), ("next", "Start it again")]
    assert needs_of(training(event("job-ended", ok=True))) == []


def index_of(tmp_path, *events):
    index, path = EventIndex(), tmp_path / "events.h.jsonl"
    with path.open("ab") as file:
        for number, one in enumerate(events):
            index.add(
                PlacedEvent(one, path, file.tell()), "bad" if number == 0 else "plain", number
            )
            file.write(encode_line(one))
    return index, path


def test_events_are_found_again_newest_first_by_group_node_text_and_incident(tmp_path):
    index, _ = index_of(
        tmp_path,
        event("incident", "a", "SIGKILL"), event("round-settled", "b"), event("progress", "b"),
        event("checkpoint-saved", "a", "step 7"), event("step-times", "c"),
    )  # fmt: skip

    def numbers(**wanted):
        return [row.number for row in index.page(EventFilter(**wanted)).rows]

    assert numbers() == [3, 1, 0], "step counts and step times have charts"
    assert numbers(group="trouble") == [0]
    assert numbers(group="world") == [1]
    assert numbers(group="saved") == [3]
    assert numbers(node="a") == [3, 0] and numbers(node="nobody") == []
    assert numbers(text="sigkill") == [0] and numbers(incident=3) == [3]
    assert numbers(before=3) == [1, 0]


def test_events_of_a_file_that_is_gone_are_left_out(tmp_path):
    index, path = index_of(tmp_path, event("incident"))
    path.unlink()
    assert index.page(EventFilter()).rows == []


def test_what_a_log_without_decisions_of_the_coordinator_lacks_is_not_expected_later():
    """In its first moments the coordinator may still begin to log here."""
    begun = play(event("agent-started", "b", time_s=100.0))
    assert sections_of(begun, source()).not_here == ""
    works = after_event(begun, started("b", 1, round=1, attempt=0, time_s=110.0))
    assert sections_of(works, source()).not_here == NOT_HERE
    assert sections_of(works, source(share_read=0.5)).not_here == ""
    account = account_of([event("node-joined", "b", time_s=100.0)], 200.0)
    assert sections_of(works, source(), account).not_here == ""


def test_the_share_of_productive_time_is_the_goodput_however_both_are_rounded():
    intervals = (
        Interval(0.0, 161.0216, TimeCause.PRODUCTIVE),
        Interval(161.0216, 183.5, TimeCause.STARTING),
    )
    found = sections_of(training(), source(), Account(from_s=0.0, to_s=183.5, intervals=intervals))
    share = found.account.causes[0].seconds / found.account.wall_s
    assert round(share, 5) == round(found.account.goodput, 5) == round(161.0216 / 183.5, 5)
