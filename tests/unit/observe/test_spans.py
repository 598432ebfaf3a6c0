"""The spans of a job follow from its events: what took how long, and what it was part of."""

from itertools import pairwise

from view_events import event, exited, settled, started

from elastane.observe.account import Accountant
from elastane.observe.spans import SETTLE_S, spans_of, trace_key
from elastane.observe.view import JobView, after_event

BEGUN = [
    event("agent-started", "a", time_s=0.0),
    settled(1, "a", 2, time_s=2.0, nodes=1),
    started("a", 1, 2, round=1, attempt=0, time_s=3.0),
    event("workers-training", "a", round=1, attempt=0, time_s=10.0),
    event("progress", "a", round=1, attempt=0, steps=40, time_s=90.0),
    event("checkpoint-saved", "a", step=40, bytes=1e6, seconds=2.0, age_s=2.5, location="/c",
          time_s=95.0),
]  # fmt: skip
FAULT = [
    exited(1, round=1, time_s=100.2, age_s=0.2),
    event("incident", "a", round=1, attempt=0, time_s=100.5),
    event("restart", "a", round=1, attempt=0, used=1, allowed=3, time_s=100.6, cause="no memory",
          cause_node="a", cause_rank=1),
    settled(2, "a", 2, time_s=101.0, nodes=1),
    started("a", 3, 4, round=2, attempt=0, time_s=103.0),
    event("workers-training", "a", round=2, attempt=0, time_s=110.0),
]  # fmt: skip


def played(*events):
    view, accountant = JobView(), Accountant()
    for one in events:
        view = after_event(view, one)
        accountant.add(one, view)
    return view, accountant.account(view)


def spans(*events):
    return {one.key: one for one in spans_of(*played(*events))}


def test_an_incident_has_the_causes_of_the_time_that_it_cost():
    found = spans(*BEGUN, *FAULT)
    incident = found["incident/1"]
    assert (incident.parent, incident.from_s, incident.to_s) == ("job", 100.0, 103.0)
    assert incident.attributes["rank"] == 1 and incident.attributes["state"] == "recovered"
    assert "no memory" in incident.error
    parts = [one for one in found.values() if one.parent == "incident/1"]
    assert [one.name for one in parts][:2] == ["detecting", "rebuilding"]
    assert parts[0].from_s == 100.0
    assert all(one.to_s == other.from_s for one, other in pairwise(parts))


def test_the_job_its_worlds_and_saves_are_spans():
    end = event("job-ended", "a", "all workers succeeded", ok=True, exit_code=0, time_s=200.0)
    found = spans(*BEGUN, *FAULT, end)
    job = found["job"]
    assert (job.from_s, job.to_s, job.parent, job.error) == (0.0, 200.0, "", "")
    assert job.attributes["steps"] == 40 and job.attributes["restarts"] == 1
    assert 0 < job.attributes["goodput"] < 1
    worlds = [one for key, one in found.items() if key.startswith("world/")]
    assert [(one.from_s, one.to_s) for one in worlds] == [(2.0, 101.0), (101.0, 200.0)]
    [save] = [one for key, one in found.items() if key.startswith("save/")]
    assert (save.name, save.from_s, save.to_s) == ("save of step 40", 92.5, 94.5)
    assert [one.name for one in found.values() if one.parent == "job"].count("starting") == 1
    assert all(one.is_over for one in found.values())


def test_a_failed_job_and_a_failed_save_are_errors():
    found = spans(
        *BEGUN,
        event("checkpoint-failed", "a", step=50, slug="disk-full", location="/c", time_s=150.0),
        event("job-ended", "a", "no restarts left", ok=False, exit_code=1, time_s=200.0),
    )
    assert found["job"].error == "no restarts left"
    assert found["save/a/50/150.0"].error == "disk-full"


def test_a_span_that_late_step_counts_may_change_is_open():
    found = spans(*BEGUN, *FAULT)
    open_ = {key for key, one in found.items() if not one.is_over}
    assert {"job", "world/101.0"} <= open_ and "world/2.0" not in open_
    rebuilding = next(key for key, one in found.items() if one.name == "rebuilding")
    assert rebuilding in open_, "step counts that come later may name retried steps"
    later = event("progress", "a", round=2, attempt=0, steps=60, time_s=110.0 + SETTLE_S)
    assert spans(*BEGUN, *FAULT, later)[rebuilding].is_over


def test_a_span_that_is_over_stays_the_same():
    events = [*BEGUN, *FAULT]
    events += [
        event("progress", "a", round=2, attempt=0, steps=60 + 10 * n, time_s=120.0 + 10 * n)
        for n in range(20)
    ]
    events.append(event("job-ended", "a", ok=True, time_s=400.0))
    last = spans(*events)
    seen = {}
    for count in range(1, len(events)):
        for key, one in spans(*events[:count]).items():
            if one.is_over:
                seen.setdefault(key, one)
    assert len(seen) > 5
    assert {key: last.get(key) for key in seen} == seen


def test_runs_of_one_name_are_traces_of_their_own():
    end = event("job-ended", "a", ok=True, time_s=200.0)
    again = [event("coordinator-started", "a", time_s=300.0), settled(1, "a", 2, time_s=301.0)]
    first, second = played(*BEGUN, end)[0], played(*BEGUN, end, *again)[0]
    assert trace_key(first) != trace_key(second)


def test_a_log_without_events_has_no_spans():
    assert spans() == {}
