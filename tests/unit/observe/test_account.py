"""The goodput account follows from the events: each second has one cause and its incident."""

import pytest
from view_events import event, exited, play, settled, started

from elastane.observe.account import Account, Accountant, TimeCause, account_lines, account_of
from elastane.observe.view import JobView, after_event


def training(node="a", *, round, time_s, **ages):
    return event("workers-training", node, round=round, attempt=0, time_s=time_s, **ages)


def in_place():
    """Return a job that starts in 10 s, loses a worker at 100 s and has replaced it at 110 s."""
    return [
        event("agent-started", "a", time_s=0.0),
        settled(1, "a", 2, time_s=2.0, nodes=1),
        started("a", 1, 2, round=1, attempt=0, time_s=3.0),
        training(round=1, time_s=10.0),
        exited(1, round=1, time_s=100.2, age_s=0.2),
        event("incident", "a", round=1, attempt=0, time_s=100.5),
        settled(2, "a", 1, time_s=100.6, nodes=1),
        event("workers-regrouped", "a", round=2, attempt=0, time_s=100.6),
        started("a", 1, round=2, attempt=0, time_s=100.6),
        training(round=2, time_s=102.0, age_s=0.1, built_age_s=1.0, healed_age_s=0.5),
        event("drain-started", "a", round=2, attempt=0, time_s=110.0),
        event("drain-ended", "a", round=2, attempt=0, time_s=110.1),
        settled(3, "a", 2, time_s=110.1, nodes=1),
        event("workers-regrouped", "a", round=3, attempt=0, time_s=110.1),
        training(round=3, time_s=113.0, built_age_s=2.0, healed_age_s=1.0),
    ]


def paused(what, *, round, time_s, seconds, age_s=0.0):
    data = {"what": what, "seconds": seconds, "age_s": age_s}
    return event("paused", "a", round=round, attempt=0, time_s=time_s, **data)


def test_saves_evaluations_and_restores_divide_what_is_not_known_as_lost():
    """A restore after a fault stays with its incident; a time that was lost keeps its cause."""
    events = [
        event("agent-started", "a", time_s=0.0),
        settled(1, "a", 2, time_s=2.0, nodes=1),
        started("a", 1, 2, round=1, attempt=0, time_s=3.0),
        paused("restoring", round=1, time_s=9.0, seconds=4.0, age_s=1.0),
        training(round=1, time_s=10.0),
        paused("saving", round=1, time_s=50.0, seconds=5.0),
        paused("evaluating", round=1, time_s=60.0, seconds=3.0, age_s=2.0),
        exited(1, round=1, time_s=100.0),
        event("incident", "a", round=1, attempt=0, time_s=100.0),
        settled(2, "a", 2, time_s=101.0, nodes=1),
        started("a", 1, 2, round=2, attempt=0, time_s=102.0),
        paused("restoring", round=2, time_s=106.0, seconds=2.0),
        training(round=2, time_s=108.0, age_s=0.5),
        paused("saving", round=2, time_s=110.0, seconds=2.0),
        paused("painting", round=2, time_s=111.0, seconds=1.0),
        ended(120.0),
    ]
    assert told(account_of(events)) == [
        (0.0, 4.0, "starting", 0),
        (4.0, 8.0, "restoring", 0),
        (8.0, 10.0, "starting", 0),
        (10.0, 45.0, "productive", 0),
        (45.0, 50.0, "saving", 0),
        (50.0, 55.0, "productive", 0),
        (55.0, 58.0, "evaluating", 0),
        (58.0, 100.0, "productive", 0),
        (100.0, 102.0, "rebuilding", 1),
        (102.0, 104.0, "starting", 1),
        (104.0, 106.0, "restoring", 1),
        (106.0, 107.5, "starting", 1),
        (107.5, 108.0, "productive", 0),
        (108.0, 110.0, "saving", 0),
        (110.0, 120.0, "productive", 0),
    ]


def test_pauses_reported_after_a_fault_are_of_the_time_before_it():
    """Three short saves, two of them before the fault, are no time in which it was rebuilt."""
    before = [one for one in in_place() if one.time_s <= 102.0]
    events = [*before, paused("saving", round=2, time_s=104.0, seconds=3.0), ended(120.0)]
    found = told(account_of(events))
    seconds = {cause: of.seconds for cause, of in account_of(events).causes().items()}
    plain = {
        cause: of.seconds for cause, of in account_of([*before, ended(120.0)]).causes().items()
    }
    assert seconds[TimeCause.SAVING] == pytest.approx(3.0)
    for cause in set(plain) - {TimeCause.PRODUCTIVE}:
        assert seconds[cause] == pytest.approx(plain[cause]), cause
    assert [one for one in found if one[2] == "saving"] == [
        (99.1, 100.0, "saving", 0), (101.9, 104.0, "saving", 0),
    ]  # fmt: skip


def test_an_account_can_be_read_at_any_time_and_does_not_change_by_that():
    view, accountant, plain = JobView(), Accountant(), []
    for one in in_place():
        view = after_event(view, one)
        accountant.add(one, view)
        plain.append(one)
        for now_s in (None, one.time_s + 1000.0):
            assert accountant.account(view, now_s) == account_of(plain, now_s)


def test_of_many_intervals_only_the_sums_of_the_older_ones_are_kept(monkeypatch):
    whole = account_of([*in_place(), ended(120.0)])
    monkeypatch.setattr("elastane.observe.account.INTERVALS_MAX", 6)
    short = account_of([*in_place(), ended(120.0)])
    assert len(short.intervals) <= 6 < len(whole.intervals)
    assert short.goodput == pytest.approx(whole.goodput)
    seconds = {cause: of.seconds for cause, of in whole.causes().items()}
    assert {cause: of.seconds for cause, of in short.causes().items()} == pytest.approx(seconds)


def ended(time_s, *, ok=True, **data):
    return event("job-ended", "a", time_s=time_s, ok=ok, exit_code=int(not ok), **data)


def told(account: Account) -> list[tuple]:
    return [
        (round(one.from_s, 3), round(one.to_s, 3), str(one.cause), one.incident)
        for one in account.intervals
    ]


def test_a_worker_lost_in_place_has_a_cause_for_each_second_and_points_at_its_incident():
    account = account_of([*in_place(), ended(120.0)])
    assert told(account) == [
        (0.0, 10.0, "starting", 0),
        (10.0, 100.0, "productive", 0),
        (100.0, 100.5, "detecting", 1),
        (100.5, 101.0, "rebuilding", 1),
        (101.0, 101.5, "healing", 1),
        (101.5, 101.9, "retried", 1),
        (101.9, 110.0, "productive", 0),
        (110.0, 110.1, "draining", 1),
        (110.1, 111.0, "rebuilding", 1),
        (111.0, 112.0, "healing", 1),
        (112.0, 120.0, "productive", 0),
    ]
    assert account.goodput == pytest.approx((90 + 8.1 + 8) / 120)
    assert account.causes()[TimeCause.HEALING].incidents == {1: pytest.approx(1.5)}


def test_all_nodes_must_have_made_a_step_and_the_last_one_counts():
    events = [
        settled(1, "a b", 4, time_s=2.0, nodes=2),
        training("a", round=1, time_s=10.0),
        training("a", round=1, time_s=11.0),
        training("b", round=1, time_s=14.0, age_s=0.5),
    ]
    assert told(account_of(events, 20.0)) == [
        (2.0, 13.5, "starting", 0),
        (13.5, 20.0, "productive", 0),
    ]


def restarted(*, restored=True):
    """Return a restart of all workers at step 300 of a job that had saved step 200."""
    progress = [
        event("progress", round=1, attempt=0, time_s=10.0 * at, steps=100 * at, workers=2)
        for at in (1, 2, 3)
    ]
    more = [event("restored", time_s=38.0, step=200)] if restored else []
    return [
        settled(1, "a", 2, time_s=0.0, nodes=1),
        training(round=1, time_s=0.0),
        *progress,
        exited(1, round=1, time_s=31.0),
        event("incident", "a", round=1, attempt=0, time_s=31.0),
        event("restart", "a", round=1, attempt=0, time_s=31.0, used=1, allowed=3),
        settled(2, "a", 2, time_s=33.0, nodes=1),
        started("a", 7, 8, round=2, attempt=0, time_s=34.0),
        *more,
        training(round=2, time_s=40.0),
        event("progress", round=2, attempt=0, time_s=42.0, steps=220, workers=2),
        event("progress", round=2, attempt=0, time_s=52.0, steps=320, workers=2),
    ]


def test_steps_repeated_after_a_restore_are_retried_until_the_count_is_back():
    account = account_of(restarted(), 60.0)
    assert told(account) == [
        (0.0, 31.0, "productive", 0),
        (31.0, 34.0, "rebuilding", 1),
        (34.0, 40.0, "starting", 1),
        (40.0, 50.0, "retried", 1),
        (50.0, 60.0, "productive", 0),
    ]
    assert account.helped == (
        "10.0 s repeating steps: with a restart, a shorter checkpoint interval",
    )


def test_steps_are_repeated_since_the_restored_one_before_the_first_count():
    *events, _, last = restarted()
    assert told(account_of([*events, last], 60.0))[3:] == [
        (40.0, 50.0, "retried", 1),
        (50.0, 60.0, "productive", 0),
    ]


def test_without_a_restore_the_count_says_nothing_about_repeated_steps():
    account = account_of(restarted(restored=False), 60.0)
    assert TimeCause.RETRIED not in account.causes() and account.helped == ()


def test_a_script_without_steps_is_productive_while_its_workers_run():
    events = [
        settled(1, "a", 2, time_s=0.0, nodes=1),
        started("a", 1, 2, round=1, attempt=0, time_s=3.0),
        exited(1, round=1, time_s=50.0, age_s=1.0),
        event("incident", "a", round=1, attempt=0, time_s=51.0),
        settled(2, "a", 2, time_s=52.0, nodes=1),
        started("a", 3, 4, round=2, attempt=0, time_s=53.0),
        ended(60.0),
    ]
    assert told(account_of(events)) == [
        (0.0, 3.0, "starting", 0),
        (3.0, 49.0, "productive", 0),
        (49.0, 51.0, "detecting", 1),
        (51.0, 53.0, "rebuilding", 1),
        (53.0, 60.0, "productive", 0),
    ]


def test_workers_that_fail_before_the_first_step_of_a_job_were_starting():
    events = [
        settled(1, "a", 2, time_s=0.0, nodes=1),
        started("a", 1, 2, round=1, attempt=0, time_s=3.0),
        exited(1, round=1, time_s=50.0),
        event("incident", "a", round=1, attempt=0, time_s=51.0),
        settled(2, "a", 2, time_s=52.0, nodes=1),
        started("a", 3, 4, round=2, attempt=0, time_s=53.0),
        training(round=2, time_s=55.0),
    ]
    assert told(account_of(events, 60.0)) == [
        (0.0, 51.0, "starting", 0),
        (51.0, 53.0, "rebuilding", 1),
        (53.0, 55.0, "starting", 1),
        (55.0, 60.0, "productive", 0),
    ]


def test_a_wait_for_nodes_is_lost_time_and_a_spare_node_is_proposed():
    events = [
        *in_place(),
        exited(0, round=3, time_s=120.0),
        event("incident", "a", round=3, attempt=0, time_s=120.0),
        event("waiting", "a", round=3, attempt=0, time_s=121.0, nodes=0, min_nodes=1),
    ]
    account = account_of(events, 141.0)
    assert told(account)[-2:] == [
        (120.0, 121.0, "rebuilding", 2),
        (121.0, 141.0, "waiting for nodes", 2),
    ]
    assert account.helped[0].startswith("20.0 s waiting for nodes: another node")


def test_workers_that_continue_with_fewer_wait_for_nothing_but_a_spare_would_help():
    found = account_of(
        [*in_place(), event("waiting", "a", round=3, attempt=0, time_s=114.0)], 130.0
    )
    assert TimeCause.WAITING not in found.causes()
    assert found.helped == (
        "9.5 s with fewer workers until replacements were ready: --spares-per-node 1",
    )


def test_a_stall_counts_from_when_the_workers_stood_until_the_next_step():
    events = [
        *in_place(),
        event("stall", "a", round=3, attempt=0, time_s=150.0),
        event("progress", round=3, attempt=0, time_s=160.0, steps=5, workers=2),
    ]
    assert told(account_of(events, 170.0))[-2:] == [
        (140.0, 160.0, "stalled", 2),
        (160.0, 170.0, "productive", 0),
    ]


def test_a_culprit_that_is_found_after_a_failure_makes_no_time_stalled():
    found = event("culprit", "a", round=1, attempt=0, time_s=100.5, still_s=0.0, ranks="1")
    before, after = in_place()[:6], in_place()[6:]
    assert account_of([*before, found, *after], 120.0) == account_of([*before, *after], 120.0)


@pytest.mark.parametrize("kind", ["progress", "pace"])
def test_the_time_in_which_all_wait_for_a_named_worker_is_not_productive(kind):
    of = {"round": 1, "attempt": 0}
    began_s = 13.0 if kind == "progress" else 12.0  # a script without steps trains once it runs
    counted = [event("progress", steps=5, time_s=at, **of) for at in (20.0, 30.0)]
    events = [
        settled(1, "a", 2, time_s=10.0, nodes=1),
        started("a", 1, 2, time_s=12.0, **of),
        *([training(round=1, time_s=13.0), *counted] if kind == "progress" else []),
        event("culprit", "a", time_s=60.0, still_s=25.0, ranks="1", **of),
        event(kind, steps=9, made=4, time_s=80.0, **of),
    ]
    assert told(account_of(events, 90.0)) == [
        (10.0, began_s, "starting", 0),
        (began_s, 35.0, "productive", 0),
        (35.0, 80.0, "stalled", 1),
        (80.0, 90.0, "productive", 0),
    ]


def test_a_script_without_steps_is_productive_from_the_first_one_that_was_measured():
    """The workers import and build their model before it, also those that start again."""
    of, then = {"round": 1, "attempt": 0}, {"round": 1, "attempt": 1}
    events = [
        settled(1, "a", 2, time_s=10.0, nodes=1),
        started("a", 1, 2, time_s=12.0, **of),
        event("pace", time_s=40.0, made=100, before=50, seconds=10.0, **of),
        event("pace", time_s=50.0, made=100, before=150, seconds=10.0, **of),
        exited(1, time_s=60.0, **of),
        event("incident", time_s=60.0, **of),
        event("round-settled", members="a", world_size=2, nodes=1, time_s=61.0, **then),
        started("a", 3, 4, time_s=62.0, **then),
        event("pace", time_s=90.0, made=100, before=100, seconds=10.0, **then),
    ]
    assert told(account_of(events, 100.0)) == [
        (10.0, 25.0, "starting", 0),
        (25.0, 60.0, "productive", 0),
        (60.0, 62.0, "rebuilding", 1),
        (62.0, 70.0, "starting", 1),
        (70.0, 100.0, "productive", 0),
    ]
    early = event("pace", time_s=40.0, made=10, before=500, seconds=10.0, **of)
    [_, second] = told(account_of([*events[:2], early], 50.0))
    assert second == (12.0, 50.0, "productive", 0), "not before the workers have started"


def test_time_in_which_events_were_lost_is_unknown():
    lost = event("events-lost", "a", time_s=140.0, events=3)
    assert told(account_of([*in_place(), lost], 150.0))[-2:] == [
        (113.0, 140.0, "unknown", 0),
        (140.0, 150.0, "productive", 0),
    ]


def test_first_steps_that_are_missing_are_found_by_the_step_count():
    progress = [
        event("progress", round=1, attempt=0, time_s=at, steps=int(at), workers=2)
        for at in (20.0, 30.0)
    ]
    events = [settled(1, "a", 2, time_s=0.0, nodes=1), *progress]
    assert told(account_of(events, 40.0)) == [
        (0.0, 20.0, "starting", 0),
        (20.0, 40.0, "productive", 0),
    ]


def test_another_run_under_the_same_name_has_an_account_of_its_own():
    second = [event("coordinator-started", "a", time_s=500.0), settled(1, "a", 2, time_s=501.0)]
    account = account_of([*in_place(), ended(120.0), *second], 510.0)
    assert (account.from_s, account.to_s) == (500.0, 510.0)


def test_nothing_is_accounted_after_the_end_and_without_events_of_the_coordinator():
    assert account_of([]) is None
    assert account_of([*in_place(), ended(120.0)], 999.0).to_s == 120.0
    assert account_of([event("coordinator-started", time_s=5.0)]).goodput == 0.0
    of_another_node = [one for one in in_place() if one.kind.startswith("workers-")]
    assert of_another_node and account_of(of_another_node) is None
    assert "logs on another node" in "".join(account_lines(None))


def test_the_lines_name_each_cause_with_its_longest_incidents():
    lines = account_lines(account_of([*in_place(), ended(120.0)]))
    assert lines[0] == "goodput 88.4% of 120.00 s"
    assert [line.split()[0] for line in lines[1:3]] == ["productive", "starting"]
    assert any("healing" in line and line.endswith("incidents #1 1.50 s") for line in lines)
    assert lines[-1].split(maxsplit=2)[2] == (
        "9.5 s with fewer workers until replacements were ready: --spares-per-node 1"
    )


def lost_node(*loss):
    """Return a job of two nodes in place whose node b is lost, with these events, at 60 s."""
    world = {"round": 1, "attempt": 0}
    return [
        event("agent-started", "a", time_s=0.0),
        settled(1, "a b", 2, time_s=2.0, nodes=2),
        started("a", 1, **world, time_s=3.0),
        started("b", 1, **world, time_s=3.0),
        training("a", round=1, time_s=10.0),
        training("b", round=1, time_s=10.0),
        *loss,
        settled(2, "a", 1, time_s=63.0, nodes=1),
        event("workers-regrouped", "a", round=2, attempt=0, time_s=63.0),
        training("a", round=2, time_s=64.0, built_age_s=0.0, healed_age_s=0.0),
        ended(70.0),
    ]


def test_the_time_from_the_loss_of_a_node_until_it_counts_as_departed_is_not_productive():
    at = {"round": 1, "attempt": 0, "time_s": 63.0, "age_s": 3.0}
    departs = event("node-departed", "b", "silent for 3.0 s", **at)
    events = lost_node(departs, event("incident", "a", "node b departed", **at))
    assert told(account_of(events)) == [
        (0.0, 10.0, "starting", 0),
        (10.0, 60.0, "productive", 0),
        (60.0, 63.0, "detecting", 1),
        (63.0, 64.0, "rebuilding", 1),
        (64.0, 70.0, "productive", 0),
    ]
    [one] = play(*events).incidents.listed
    assert (one.kind, one.from_s, one.detected_s) == ("node", 60.0, 3.0)


def test_the_loss_of_a_node_without_a_place_in_the_world_costs_nothing():
    spare = event("node-departed", "c", "gone", round=1, attempt=0, time_s=30.0, age_s=9.0)
    at = {"round": 1, "attempt": 0, "time_s": 63.0, "age_s": 1.0}
    account = account_of(lost_node(spare, event("incident", "a", "node b departed", **at)))
    assert told(account)[1:3] == [(10.0, 62.0, "productive", 0), (62.0, 63.0, "detecting", 1)]


def test_a_node_that_is_lost_with_its_coordinator_was_lost_when_agents_missed_that():
    world = {"round": 1, "attempt": 0}
    away = event("coordinator-away", "a", **world, time_s=60.0)
    comes = event("coordinator-started", "a", time_s=60.5)
    again = event("node-registered-again", "a", time_s=60.6)
    late = "the node of rank 1 did not come back to the new coordinator within the time"
    found = event("incident", "a", late, **world, time_s=63.0, departed=1)
    events = lost_node(away, comes, again, found)
    assert told(account_of(events))[1:4] == [
        (10.0, 60.0, "productive", 0), (60.0, 63.0, "detecting", 1), (63.0, 64.0, "rebuilding", 1),
    ]  # fmt: skip
    view = play(*events)
    assert (view.node("b").state, view.node("b").why) == ("gone", late)
    assert view.node("a").state != "gone"
    resumed = event("round-resumed", "a", **world, time_s=61.0)
    lost = event("incident", "a", late, **world, time_s=63.0, departed=1)
    account = account_of(lost_node(away, comes, again, resumed, lost))
    assert told(account)[1] == (10.0, 63.0, "productive", 0), "that one cost nothing"


def own_folder(node):
    """The log of one of the nodes a and b, which log to folders of their own; b takes over at 60 s.

    The coordinator logs on a until then. Both nodes train from 10 s, and from 61 s without a.
    """
    world = {"round": 1, "attempt": 0}
    of_agent = [
        event("agent-started", node, time_s=0.0),
        started(node, 1, **world, time_s=5.0),
        training(node, round=1, time_s=10.0),
    ]
    first = [
        event("node-joined", "a", time_s=0.1),
        settled(1, "a b", 2, time_s=2.0, nodes=2),
        event("progress", "a", **world, steps=5, time_s=11.0),
        event("progress", "a", **world, steps=95, time_s=21.0),
    ]
    second = [
        event("coordinator-started", "b", time_s=60.0),
        event("progress", "b", **world, steps=500, time_s=60.1),
        event("node-departed", "a", "lost", **world, time_s=60.5),
        event("incident", "b", **world, time_s=60.5),
        settled(2, "b", 1, time_s=60.6, nodes=1),
        event("workers-regrouped", "b", round=2, attempt=0, time_s=60.6),
        training("b", round=2, time_s=61.0, built_age_s=0.2, healed_age_s=0.1),
        event("progress", "b", round=2, attempt=0, steps=600, time_s=70.0),
    ]
    return sorted(of_agent + (first if node == "a" else second), key=lambda one: one.time_s)


def test_a_node_with_a_log_of_its_own_knows_the_first_step_of_the_world_from_its_own():
    """The step count of all proves that the others have made it too."""
    account = account_of(own_folder("a"))
    assert told(account) == [(0.0, 10.0, "starting", 0), (10.0, 21.0, "productive", 0)]
    assert account.missing_s == 0.0


def test_the_account_of_a_node_that_takes_over_begins_there_and_says_so():
    account = account_of(own_folder("b"))
    assert (account.from_s, account.to_s, account.missing_s) == (60.0, 70.0, 60.0)
    assert told(account)[0] == (60.0, 60.5, "productive", 0)
    assert sum(one.seconds for one in account.intervals) == pytest.approx(account.wall_s)
    assert account.goodput == pytest.approx(0.95)
    assert account_lines(account)[1] == (
        "  without the 60.00 s before: the coordinator logged on another node; "
        "one --log-dir for all nodes has all"
    )


def test_the_account_of_both_logs_is_of_the_whole_run():
    events = sorted(own_folder("a") + own_folder("b"), key=lambda one: one.time_s)
    account = account_of(events)
    assert (account.from_s, account.to_s, account.missing_s) == (0.0, 70.0, 0.0)
    assert account.goodput == pytest.approx((50.5 + 9.0) / 70.0)


def test_a_takeover_before_the_first_step_was_made_begins_as_a_start():
    events = [one for one in own_folder("b") if one.kind != "workers-training"]
    assert told(account_of(events))[0][2] == "starting"
