"""The incidents of a job follow from its events: cause, evidence, and times."""

import msgspec
import pytest
from view_events import event, exited, play, settled, started

from elastane.observe.account import TimeCause, account_of
from elastane.observe.incidents import DID_MAX, EVIDENCE_MAX
from elastane.observe.needs import needs_of, troubles_of
from elastane.observe.view import after_event


def killed(**more):
    """Return the shortened events of a real job in which the worker of rank 2 is replaced."""
    return [
        settled(1, "a", 4, time_s=10.0),
        started("a", 1, 2, 3, 4, round=1, attempt=0, time_s=11.0),
        exited(2, time_s=20.0, round=1, **more),
        event("incident", round=1, attempt=0, time_s=20.1, reason="worker of rank 2 ended"),
        event("replacement", round=1, attempt=0, time_s=20.1, used=1, allowed=3, cause="SIGKILL!",
              cause_node="a", cause_rank=2, consequences=1),
        settled(2, "a", 3, time_s=20.2),
        started("a", 1, 2, 4, round=2, attempt=0, time_s=20.3),
        event("drain-started", round=2, attempt=0, time_s=21.0, reason="adding workers of a"),
        settled(3, "a", 4, time_s=21.2),
        started("a", 1, 2, 4, 9, round=3, attempt=0, time_s=21.3),
    ]  # fmt: skip


def test_a_killed_worker_is_one_incident_with_cause_evidence_and_times():
    [one] = play(*killed(age_s=0.5, log_file="/logs/x")).incidents.listed
    assert (one.kind, one.state, one.rank, one.node) == ("worker", "recovered", 2, "a")
    assert one.title == "Rank 2 on a: SIGKILL"
    assert (one.from_s, one.detected_s) == (19.5, 0.5)
    assert one.to_s == 20.3, "training goes on as the workers of the next world have started"
    assert one.whole_s == 21.2, "the replacement is there"
    assert one.cause == "SIGKILL!" and one.consequences == 1 and one.log_file == "/logs/x"
    assert one.evidence == ("rank 2 on a: SIGKILL (from outside)",)
    assert (one.world_before, one.world_after) == (4, 4)


def test_a_worker_that_only_the_coordinator_names_is_shown_with_its_end():
    """Its program returned, which is no failure in the log, or its log is on another host."""
    cause = {
        "cause": "worker of rank 1 ended with exit code 0", "cause_node": "b", "cause_rank": 1,
        "cause_local_rank": 0, "cause_pid": 9, "cause_exit": "exit code 0 (it returned)",
        "cause_log": "/logs/b",
    }  # fmt: skip
    [one] = play(
        settled(1, "a b", 4),
        exited(3, round=1, time_s=20.0, message="Connection closed", log_file="/logs/a"),
        event("restart", round=1, attempt=0, time_s=20.2, **cause),
    ).incidents.listed
    assert one.title == "Rank 1 on b: exit code 0 (it returned)"
    assert (one.node, one.rank, one.local_rank, one.pid) == ("b", 1, 0, 9)
    assert (one.log_file, one.message) == ("/logs/b", "")


def test_a_failure_after_a_standstill_has_ended_is_an_incident_of_its_own():
    stood = [
        settled(1, "a", 4, time_s=10.0),
        started("a", 1, 2, 3, 4, round=1, attempt=0, time_s=11.0),
        event("culprit", "a", round=1, attempt=0, time_s=40.0, still_s=20.0, ranks="1",
              reason="rank 1 has not entered it", **{"class": "busy"}),
        event("culprit-ended", round=1, attempt=0, time_s=43.0, still_s=23.0),
    ]  # fmt: skip
    later = [*stood, exited(2, round=1, time_s=44.0)]
    wait, failure = play(*later).incidents.listed
    assert (wait.state, wait.from_s, wait.to_s) == ("recovered", 20.0, 43.0)
    assert (failure.kind, failure.rank, failure.from_s) == ("worker", 2, 44.0)
    stalled = account_of(later, 44.0).causes()[TimeCause.STALLED]
    assert stalled.seconds == pytest.approx(23.0)


def test_a_worker_that_says_why_all_restart_is_shown_with_that():
    said = "elastane: all workers restart: no worker holds the state of the job [job-state-lost]"
    lost = exited(0, round=1, time_s=20.0, exit_code=75, reason="exit code 75", output=True,
                  message=f"some warning\n{said}")  # fmt: skip
    [one] = play(settled(1, "a", 4), lost).incidents.listed
    assert one.cause == f"exit code 75: {said}"
    assert one.title.startswith("Rank 0 on a: exit code 75: elastane: all workers restart")


def test_events_of_an_incident_are_marked_as_its_own_and_others_are_not():
    view = play(*killed(), event("node-joined", "b", time_s=30.0))
    marks = {(line.kind, line.time_s): line.incident for line in view.lines}
    assert marks["worker-exited", 20.0] == marks["drain-started", 21.0] == 1
    assert marks["round-settled", 10.0] == marks["node-joined", 30.0] == 0


def test_the_last_node_of_the_next_world_ends_an_incident():
    view = play(
        settled(1, "a b", 4),
        exited(2, node="b", round=1, time_s=20.0),
        settled(2, "a b", 4, time_s=20.2),
        started("a", 1, 2, round=2, attempt=0, time_s=20.5),
        started("b", 3, 4, round=2, attempt=0, time_s=20.9),
    )
    assert view.incidents.listed[0].to_s == 20.9


def test_failures_of_one_world_are_one_incident_with_bounded_evidence():
    many = [exited(rank, round=1, time_s=20.0 + rank) for rank in range(20)]
    [one] = play(settled(1, "a", 20), *many).incidents.listed
    assert one.rank == 0 and len(one.evidence) == EVIDENCE_MAX


def test_an_incident_shows_the_worker_that_is_its_cause_not_the_one_that_was_logged_first():
    why = {"cause": "rank 0: loss is nan", "cause_node": "a", "cause_rank": 0}
    stack = "Traceback (most recent call last):\n  File 'train.py'\nValueError: loss is nan"
    own = {"exit_code": 1, "reason": "exit code 1", "message": stack, "log_file": "/logs/0"}
    lost = {"exit_code": 1, "reason": "exit code 1", "message": "lost a peer", "output": True}
    [one] = play(
        settled(1, "a", 2),
        exited(1, round=1, time_s=20.0, log_file="/logs/1", **lost),
        exited(0, round=1, time_s=20.1, **own),
        event("restart", round=1, attempt=0, time_s=20.2, used=1, allowed=2, **why),
    ).incidents.listed
    assert (one.title, one.rank) == ("Rank 0 on a: exit code 1: ValueError: loss is nan", 0)
    assert (one.local_rank, one.pid, one.message, one.log_file) == (0, 100, stack, "/logs/0")
    assert one.others == ()


def test_a_failure_of_the_next_world_takes_the_place_of_one_that_is_open():
    first, second = play(
        settled(1, "a", 4),
        exited(1, round=1, time_s=20.0),
        settled(2, "a", 3, time_s=20.2),
        exited(0, round=2, time_s=20.3),
    ).incidents.listed
    assert (first.state, first.to_s, second.state) == ("recovered", 20.3, "open")


def test_a_worker_that_was_stopped_or_succeeded_is_no_incident():
    view = play(settled(1, "a", 2), exited(0, stopped=True), exited(1, exit_code=0))
    assert view.incidents.listed == ()


def test_a_lost_node_is_an_incident_and_one_that_asked_to_leave_is_a_change():
    lost = play(settled(1, "a b", 4), event("node-departed", "b", round=1, attempt=0))
    assert [one.kind for one in lost.incidents.listed] == ["node"]
    left = play(
        settled(1, "a b", 4),
        event("node-leaving", "b"),
        event("drain-started", round=1, attempt=0, reason="b leaves (SIGTERM)"),
        settled(2, "a", 2),
        event("node-departed", "b", round=2, attempt=0),
    )
    [one] = left.incidents.listed
    assert (one.kind, one.title, one.world_after) == ("change", "b leaves", 2)


def test_a_spare_that_departs_is_no_incident_and_the_next_failure_has_its_own():
    """No world ends with a spare, so that an incident of it would wait for the next failure."""
    departs = event("node-departed", "c", "silent for 3.0 s", round=1, attempt=0, spare=True)
    view = play(settled(1, "a b", 4), departs)
    assert view.incidents.listed == () and not needs_of(view)
    view = after_event(view, exited(1, round=1, time_s=20.0))
    [one] = view.incidents.listed
    assert (one.kind, one.rank, one.node) == ("worker", 1, "a")


def test_a_stall_lasts_until_the_next_step():
    stalled = play(settled(1, "a", 4), event("stall", round=1, attempt=0, time_s=50.0))
    assert stalled.incidents.current().state == "open"
    [one] = play(
        settled(1, "a", 4),
        event("stall", round=1, attempt=0, time_s=50.0),
        event("progress", steps=7, time_s=60.0),
    ).incidents.listed
    assert (one.state, one.to_s) == ("recovered", 60.0)


def test_the_loss_of_authority_ends_no_world_and_is_over_when_it_is_back():
    view = play(
        settled(1, "a", 4),
        event("authority-lost", time_s=50.0),
        exited(1, round=1, time_s=51.0),
        settled(2, "a", 4, time_s=52.0),
        event("authority-regained", time_s=53.0),
    )
    assert [(one.kind, one.to_s) for one in view.incidents.listed] == [
        ("authority", 53.0), ("worker", None),
    ]  # fmt: skip


@pytest.mark.parametrize("beside", ["authority-lost", "stall", "replica-differed"])
def test_an_incident_stays_open_while_one_that_ends_no_world_begins_and_ends(beside):
    view = play(
        settled(1, "a", 4),
        exited(1, round=1, time_s=50.0),
        event(beside, "a", round=1, attempt=0, time_s=51.0),
        settled(2, "a", 3, time_s=52.0),
        event("authority-regained", time_s=53.0),
        started("a", 1, 2, 4, round=2, attempt=0, time_s=54.0),
        event("progress", steps=7, round=2, attempt=0, time_s=60.0),
    )
    worker, other = view.incidents.listed
    assert (worker.kind, worker.state, worker.to_s) == ("worker", "recovered", 54.0)
    assert worker.world_after == 3, "the next world is that of the failure, not a change"
    assert other.state == "recovered" and other.is_over


def test_a_stall_is_over_when_a_failure_ends_its_world():
    view = play(
        settled(1, "a", 2),
        event("stall", round=1, attempt=0, time_s=50.0),
        exited(1, round=1, time_s=51.0),
        settled(2, "a", 2, time_s=52.0),
        started("a", 1, 2, round=2, attempt=0, time_s=53.0),
        event("progress", steps=7, round=2, attempt=0, time_s=60.0),
    )
    assert [(one.kind, one.to_s) for one in view.incidents.listed] == [
        ("stall", 51.0), ("worker", 53.0),
    ]  # fmt: skip


NAMED = {"class": "busy", "ranks": "1", "still_s": 20.0, "reason": (
    "rank 1 on node b has not entered all_reduce #57 (train.py:22); rank 0 waits in it"
)}  # fmt: skip


def named(**more):
    return event("culprit", "a", round=1, attempt=0, **{"time_s": 50.0, **NAMED, **more})


def test_a_standstill_with_a_named_culprit_is_an_incident_until_the_next_steps():
    view = play(settled(1, "a b", 2), named(culprit_node="b"))
    [one] = view.incidents.listed
    assert (one.kind, one.state, one.from_s, one.detected_s) == ("stall", "open", 30.0, 20.0)
    assert (one.title, one.node, one.rank) == (
        "Rank 1 on node b has not entered all_reduce #57", "b", 1,
    )  # fmt: skip
    assert [need.incident for need in needs_of(view)] == [1]
    view = play(settled(1, "a b", 2), named(culprit_node="b", culprit_pid=77))
    act, then = needs_of(view)
    assert (act.severity, act.text, then.severity) == ("act", one.title, "next")
    assert then.text == "If rank 1 does not continue by itself: kill -9 77 on b"
    assert troubles_of(view.incidents, {}) == [act, then]
    reads = named(culprit_node="b", culprit_pid=77, **{"class": "disk"})
    assert needs_of(play(settled(1, "a b", 2), reads))[1].text == then.text
    certain = named(culprit_node="b", culprit_pid=77, **{"class": "stopped"})
    assert len(needs_of(play(settled(1, "a b", 2), certain))) == 1, "its agent ends it"
    raised = named(culprit_node="b", culprit_pid=77, **{"class": "raised"})
    assert (
        needs_of(play(settled(1, "a b", 2), raised))[1].text == "To end rank 1 now: kill -9 77 on b"
    )
    [one] = play(settled(1, "a b", 2), named(), event("pace", time_s=60.0)).incidents.listed
    assert (one.state, one.to_s) == ("recovered", 60.0)


def test_a_second_finding_of_one_standstill_is_no_second_incident():
    view = play(
        settled(1, "a b", 2),
        event("stall", round=1, attempt=0, time_s=40.0),
        named(),
        named(reason="rank 1 on node b waits for its disk", time_s=90.0, **{"class": "disk"}),
    )
    [one] = view.incidents.listed
    assert (one.from_s, one.standstill, one.cause) == (
        40.0, "disk", "rank 1 on node b waits for its disk",
    )  # fmt: skip


def test_a_culprit_that_is_found_after_a_failure_is_the_cause_of_its_incident():
    """gloo ended rank 0, since rank 2 had sent more than it expected."""
    view = play(
        settled(1, "a b", 3),
        started("a", 1, 2, round=1, attempt=0, time_s=11.0),
        exited(0, round=1, time_s=20.0, log_file="/logs/0"),
        event("incident", round=1, attempt=0, time_s=20.1, reason="worker of rank 0 ended"),
        event("culprit", "a", round=1, attempt=0, time_s=20.1, reason="rank 2 on node b: differs",
              ranks="2", still_s=0.0, culprit_node="b", culprit_local_rank=1, culprit_pid=77,
              **{"class": "other-shape"}),
        event("restart", round=1, attempt=0, time_s=20.2, cause_node="b", cause_rank=2,
              cause="rank 2 on node b: differs; so rank 0 ended"),
    )  # fmt: skip
    [one] = view.incidents.listed
    assert (one.kind, one.rank, one.node) == ("worker", 2, "b")
    assert one.cause == "rank 2 on node b: differs; so rank 0 ended"
    assert (one.local_rank, one.pid, one.log_file) == (1, 77, "")
    assert one.evidence == ("rank 0 on a: SIGKILL (from outside)",)


def test_a_failure_during_a_standstill_keeps_its_culprit_as_the_cause():
    """The workers that wait for it fail in the end, and their failure is not the cause."""
    found = f"{NAMED['reason']}; so rank 0 on node a timed out"
    view = play(
        settled(1, "a b", 2),
        named(culprit_node="b"),
        exited(0, round=1, time_s=51.0, reason="exit code 1"),
        event("restart", round=1, attempt=0, used=1, allowed=2, cause=found,
              cause_node="b", cause_rank=1, time_s=51.1),
        settled(2, "a b", 2, time_s=52.0),
        started("a", 1, round=2, attempt=0, time_s=53.0),
    )  # fmt: skip
    [one] = view.incidents.listed
    assert (one.kind, one.rank, one.node, one.cause) == ("stall", 1, "b", found)
    assert (one.from_s, one.state, one.to_s) == (30.0, "recovered", 53.0)
    assert one.evidence == ("rank 0 on a: exit code 1",)


def test_a_failure_of_its_own_during_a_standstill_is_the_cause_as_the_coordinator_found():
    killed = "worker of rank 0 on node a ended with SIGKILL (out of memory)"
    view = play(
        settled(1, "a b", 2),
        named(culprit_node="b", culprit_local_rank=0, culprit_pid=77),
        exited(0, round=1, time_s=51.0, log_file="/logs/0"),
        event("restart", round=1, attempt=0, cause=killed, cause_node="a", cause_rank=0,
              time_s=51.1),
    )  # fmt: skip
    [one] = view.incidents.listed
    assert (one.node, one.rank, one.cause, one.log_file) == ("a", 0, killed, "/logs/0")
    assert one.title.startswith("Rank 0 on a: SIGKILL"), one.title


ASKED = "elastane: all workers restart: workers do not run the same program [in-place-restart]"


def asked(rank, **more):
    """Return the end of a worker that asks for a restart of all."""
    return exited(rank, exit_code=75, reason="exit code 75", message=ASKED, **more)


def differing():
    """Return the shortened events of a real job in place, in which rank 1 calls another collective.

    The step count at 54 s was made before all stood still at 48 s.
    """
    waits = "all workers wait for one another: rank 0 in all_reduce, rank 1 in broadcast"
    to_restart = "worker of rank 1 on node a ended with exit code 75 to restart all workers"
    return [
        settled(1, "a", 3, time_s=10.0),
        started("a", 1, 2, 3, round=1, attempt=0, time_s=11.0),
        named(time_s=50.0, still_s=2.0, **{"class": "other-collective"}),
        event("progress", steps=42, age_s=6.5, round=1, attempt=0, time_s=54.0),
        event("stall", round=1, attempt=0, time_s=58.0, reason="no progress for 10 s"),
        event("incident", round=1, attempt=0, time_s=58.0, reason=waits),
        settled(2, "a", 3, time_s=58.1),
        started("a", 1, 2, 3, round=2, attempt=0, time_s=58.2),
        asked(1, round=2, time_s=58.3),
        event("incident", round=2, attempt=0, time_s=58.4, reason=to_restart),
        settled(3, "a", 2, time_s=58.5),
        started("a", 1, 3, round=3, attempt=0, time_s=58.6),
        asked(0, round=3, time_s=58.7),
        event("incident", round=3, attempt=0, time_s=58.8, reason=to_restart),
        event("restart", round=3, attempt=0, time_s=58.9, used=1, allowed=2, cause="exit code 75",
              cause_node="a", cause_rank=1),
        settled(4, "a", 3, time_s=59.0),
        started("a", 4, 5, 6, round=4, attempt=0, time_s=59.5),
    ]  # fmt: skip


def test_programs_that_differ_in_place_are_one_incident_until_all_have_restarted():
    [one] = play(*differing()).incidents.listed
    assert (one.kind, one.rank, one.cause) == ("stall", 1, NAMED["reason"])
    assert (one.from_s, one.to_s, one.whole_s) == (48.0, 59.5, 59.0)
    said = f"exit code 75: {ASKED}"
    assert one.evidence == ("no progress for 10 s", f"rank 1 on a: {said}", f"rank 0 on a: {said}")
    account = account_of(differing())
    lost = {cause: of for cause, of in account.causes().items() if of.incidents}
    assert {number for of in lost.values() for number in of.incidents} == {1}
    assert round(lost[TimeCause.STALLED].seconds, 1) == 10.0, "until the world was ended"


def test_a_restart_that_a_lost_worker_makes_necessary_belongs_to_its_loss():
    """Also if the log of the worker's node is elsewhere, so that only the coordinator tells it."""
    lost = [*killed()[:7], started("a", 1, 2, 4, round=2, attempt=0, time_s=20.3)]
    to_restart = "worker of rank 1 on node b ended with exit code 75 to restart all workers"
    told = event("incident", round=2, attempt=0, time_s=20.4, reason=to_restart)
    for ends in (asked(1, round=2, time_s=20.4), told):
        [one] = play(*lost, ends).incidents.listed
        assert (one.kind, one.rank, one.cause, one.state) == ("worker", 2, "SIGKILL!", "open")
    trained = event("workers-training", round=2, attempt=0, time_s=20.35)
    first, second = play(*lost, trained, told).incidents.listed
    assert (first.state, second.state) == ("recovered", "open"), "the next world had trained"


def test_incidents_are_listed_by_when_they_began_not_by_when_they_were_found():
    view = play(
        settled(1, "a", 4),
        event("authority-lost", time_s=50.0),
        exited(1, round=1, time_s=51.0, age_s=4.0),
    )
    assert [one.kind for one in view.incidents.listed] == ["authority", "worker"]
    assert [(one.kind, one.from_s) for one in view.incidents.by_time(9)] == [
        ("authority", 50.0), ("worker", 47.0),
    ]  # fmt: skip


def test_incidents_open_at_the_fatal_failure_end_with_the_job():
    view = play(
        settled(1, "a", 4),
        exited(1, round=1, time_s=50.0),
        event("authority-lost", time_s=51.0),
        event("job-ended", round=1, attempt=0, time_s=52.0, ok=False, exit_code=1),
    )
    assert [(one.kind, one.state) for one in view.incidents.listed] == [
        ("worker", "fatal"), ("authority", "recovered"),
    ]  # fmt: skip
    assert needs_of(view)[0].incident == view.incidents.fatal().id == 1


def test_an_incident_keeps_a_bounded_number_of_lines_about_what_was_done():
    worlds = [settled(2 + n, "a", 3, time_s=60.0 + n) for n in range(3 * DID_MAX)]
    [one] = play(settled(1, "a", 4), exited(1, round=1), *worlds).incidents.listed
    assert len(one.did) == DID_MAX


def test_of_very_many_incidents_the_oldest_are_dropped_and_the_others_keep_their_numbers(
    monkeypatch,
):
    monkeypatch.setattr("elastane.observe.incidents.INCIDENTS_MAX", 4)
    worlds = [
        one
        for n in range(1, 8)
        for one in (
            exited(1, round=n, time_s=20.0 + n),
            settled(n + 1, "a", 4, time_s=20.2 + n),
            started("a", 1, 2, round=n + 1, attempt=0, time_s=20.3 + n),
        )
    ]
    history = play(settled(1, "a", 4), event("stall", time_s=19.0), *worlds).incidents
    assert [one.id for one in history.listed] == [5, 6, 7, 8]
    assert {one.state for one in history.listed} == {"recovered"}
    assert history.by_number(5) is history.listed[0]
    assert history.by_number(4) is None and history.by_number(9) is None
    assert history.beside("stall") is None and history.of_world() is history.listed[-1]


def test_nodes_that_left_under_names_of_their_own_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("elastane.observe.view.NODES_MAX", 4)
    came = [event("node-joined", f"spot-{n}", time_s=100.0 + n) for n in range(9)]
    went = [event("node-released", f"spot-{n}", time_s=100.5 + n) for n in range(8)]
    order = sorted([event("node-joined", "a"), *came, *went], key=lambda one: one.time_s)
    assert set(play(*order).nodes) == {"a", "spot-8", "spot-7", "spot-6"}


@pytest.mark.parametrize("opened", [True, False])
def test_the_failure_that_ends_the_job_is_fatal(opened):
    before = [exited(1, round=1, time_s=20.0)] if opened else []
    end = event("job-ended", round=1, attempt=0, time_s=21.0, ok=False, exit_code=1,
                reason="it failed", cause="out of memory", cause_node="a")  # fmt: skip
    late = exited(0, round=1, time_s=22.0)
    view = play(settled(1, "a", 4), *before, end)
    [one] = view.incidents.listed
    assert (one.state, one.cause, one.to_s) == ("fatal", "out of memory", 21.0)
    assert (view.end.ok, view.end.exit_code) == (False, 1)
    assert len(play(settled(1, "a", 4), *before, end, late).incidents.listed) == 1


def test_a_job_that_runs_again_under_its_name_is_another_run():
    view = play(
        *killed(),
        event("job-ended", round=3, attempt=0, ok=True, time_s=40.0),
        event("agent-stopped", "a", time_s=41.0),
        event("agent-started", "c", time_s=50.0),
        event("coordinator-started", "c", time_s=50.1),
    )
    assert (view.run, view.incidents.listed, view.end) == (2, (), None)
    assert set(view.nodes) == {"c"}


@pytest.mark.parametrize("comes", ["ac", "a", "b"])
def test_a_job_whose_agents_were_killed_is_another_run_once_new_agents_settle_a_world(comes):
    """Its log has no end of the first run. With an agent of before it is the same run."""
    begun = [event("agent-started", name, time_s=9.0) for name in "ab"]
    story = [
        *begun,
        *killed(),
        *(event("agent-started", name, time_s=60.0) for name in comes),
        event("coordinator-started", comes[0], time_s=60.1),
        *(event("node-joined", name, time_s=60.2) for name in comes),
    ]
    before, settles = play(*story), settled(1, " ".join(sorted({"a", *comes})), 2, time_s=62.0)
    view = after_event(before, settles)
    assert (before.run, len(before.incidents.listed)) == (1, 1)
    if comes == "b":  # the agent of a has stayed, and lost its coordinator
        assert view.run == 1 and view.incidents.listed[:1] == before.incidents.listed
        return
    assert (view.run, view.incidents.listed, view.started_s) == (2, (), 60.0)
    assert set(view.nodes) == set(comes) and view.nodes["a"].coordinates
    assert (view.round, view.worlds[0].time_s, view.step, view.restarts) == (1, 62.0, 0, (0, None))
    account = account_of([*story, settles, event("progress", steps=3, time_s=70.0)])
    assert (account.from_s, account.to_s) == (60.0, 70.0)
    assert {one.cause for one in account.intervals} == {TimeCause.STARTING}


@pytest.mark.parametrize("value", ["x", True, -1, 1e308, 10**400])
def test_data_of_other_types_than_documented_breaks_nothing(value):
    kinds = ["worker-exited", "round-settled", "workers-started", "replacement", "job-ended",
             "checkpoint-saved", "progress", "events-lost", "replica-differed"]  # fmt: skip
    fields = ["rank", "exit_code", "age_s", "used", "steps", "world_size", "pids", "events",
              "bytes", "ok", "cause_rank", "local_rank", "pid"]  # fmt: skip
    view = play(*(event(kind, **dict.fromkeys(fields, value)) for kind in kinds))
    assert view.lines and msgspec.json.encode(view, enc_hook=list)


@pytest.mark.parametrize("output", [True, False])
def test_an_incident_knows_whether_its_message_is_only_the_end_of_the_workers_output(output):
    [one] = play(
        settled(1, "a", 4), exited(1, round=1, message="hm", output=output)
    ).incidents.listed
    assert (one.message, one.is_output) == ("hm", output)


def test_an_incident_lasts_until_all_nodes_of_its_next_world_have_made_a_step():
    """The world after that, which has the replacement, does not count."""
    second, third = {"round": 2, "attempt": 0}, {"round": 3, "attempt": 0}
    events = [
        settled(1, "a b", 4),
        exited(1, round=1, time_s=110.0),
        settled(2, "a b", 3, time_s=110.1),
        started("a", 1, **second, time_s=110.2),
        started("b", 2, 3, **second, time_s=110.3),
        event("workers-training", "a", **second, time_s=111.0, age_s=0.5),
        event("workers-training", "b", **second, time_s=112.0, age_s=1.0),
        settled(3, "a b", 4, time_s=113.0),
        started("a", 1, 4, **third, time_s=113.1),
        event("workers-training", "a", **third, time_s=114.0),
    ]
    went_on = [play(*events[:count]).incidents.listed[0].went_on_s for count in (3, 5, 6, 7, 10)]
    assert went_on == [None, 110.3, 110.5, 111.0, 111.0]
