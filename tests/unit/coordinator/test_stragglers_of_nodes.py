"""The coordinator names the ranks that make the others wait, from heartbeats."""

from coordinator_driver import Driver, job_spec

from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Heartbeat
from elastane.protocol.model import Fence
from elastane.protocol.stragglers import COMPARED_STEPS, COMPARISONS_MIN, WINDOW_STEPS, Pace


def running():
    job = Driver(job_spec(2, 2, 3))
    for node_id in "ab":
        job.join(node_id)
    job.passes(4.0, alive="ab")
    return job


def beat(job, shares, step, fence=None):
    """Send a heartbeat of each node a second later, with the `shares` of its two workers."""
    job.passes(1.0, alive="")
    for node_id, own in shares.items():
        base = job.assigned[node_id].rank_base
        paces = [Pace(base + at, step, share, 0.01, 0.1, 0.0) for at, share in enumerate(own)]
        of = fence or job.assigned[node_id].fence
        job.says(node_id, Heartbeat(fence=of, paces=tuple(paces)))


def beats(job, count, shares, first=WINDOW_STEPS, **more):
    for number in range(count):
        beat(job, shares, first + number * COMPARED_STEPS, **more)


def found(job, kind=EventKind.STRAGGLER):
    return [event for event in job.events if event.kind is kind]


SLOW = {"a": (0.75, 0.75), "b": (0.98, 0.75)}
EVEN = {"a": (0.75, 0.75), "b": (0.75, 0.75)}


def test_a_straggler_is_logged_once_and_its_end_as_well():
    job = running()
    beats(job, COMPARISONS_MIN + 4, SLOW)
    [named] = found(job)
    rank = job.assigned["b"].rank_base
    assert (named.node_id, named.data["rank"], named.data["why"]) == ("b", rank, "other")
    assert named.data["own_s"] == 0.098 and named.data["others_s"] == 0.075
    assert named.reason.startswith(f"rank {rank} on node b makes the others wait in each step")
    assert not found(job, EventKind.STRAGGLER_ENDED)
    beats(job, 2, EVEN, first=500)
    [ended] = found(job, EventKind.STRAGGLER_ENDED)
    assert (ended.node_id, ended.data["rank"]) == ("b", rank)


def test_the_rate_of_a_script_that_reports_no_steps_is_measured_and_logged():
    job = running()
    beats(job, 25, EVEN)
    rates = {node.node_id: node.steps_per_s for node in job.machine.report().nodes}
    assert rates == {"a": COMPARED_STEPS, "b": COMPARED_STEPS}
    first, second = found(job, EventKind.PACE)
    # Node a was heard last, so node b's workers are a second behind in the first one.
    common = {"seconds": 10.0, "workers": 4, "age_s": 0.0}
    made, before = first.data["made"], first.data["before"]
    assert first.data == {"made": 9 * COMPARED_STEPS, "before": before, **common}
    assert second.data == {"made": 10 * COMPARED_STEPS, "before": made + before, **common}
    assert second.reason == "4 steps/s, as the workers measure them"


def test_no_pace_is_logged_of_ranks_that_make_no_steps_or_report_them():
    job = running()
    for _ in range(25):
        beat(job, EVEN, WINDOW_STEPS)
    assert not found(job, EventKind.PACE)
    for _ in range(6):
        beat(job, EVEN, WINDOW_STEPS + 15)
    [late] = found(job, EventKind.PACE)
    counted = {"made": 15, "before": WINDOW_STEPS, "seconds": 30.0}
    assert late.data == {**counted, "workers": 4, "age_s": 5.0}
    for _ in range(25):
        job.passes(1.0, alive="")
        for node_id in "ab":
            job.says(node_id, Heartbeat(fence=job.assigned[node_id].fence, progress=7))
    assert found(job, EventKind.PACE) == [late] and found(job, EventKind.PROGRESS)


def test_own_parts_of_all_workers_are_logged_at_intervals_while_they_make_steps():
    job = running()
    beats(job, 40, SLOW)
    first, named, later, *more = found(job, EventKind.STEP_TIMES)
    ranks = {node: job.assigned[node].rank_base for node in "ab"}
    own_ms = {ranks["a"]: "75", ranks["a"] + 1: "75", ranks["b"]: "98", ranks["b"] + 1: "75"}
    listed = ",".join(own_ms[rank] for rank in sorted(own_ms))
    assert first.data == {"own_ms": listed, "median_ms": 75.0, "workers": 4}
    kinds = [event.kind for event in job.events]
    at = kinds.index(EventKind.STRAGGLER)
    assert kinds[at + 1] is EventKind.STEP_TIMES and job.events[at + 1] is named, "at once"
    assert named.data == later.data == first.data and not more, "every 30 s"
    for _ in range(60):
        beat(job, SLOW, WINDOW_STEPS + 40 * COMPARED_STEPS)
    assert len(found(job, EventKind.STEP_TIMES)) == 4, "not without new steps"


def test_no_straggler_is_named_while_a_node_shows_nothing_of_the_world():
    job = running()
    beats(job, 2 * COMPARISONS_MIN, {"b": SLOW["b"]})
    beats(job, 2 * COMPARISONS_MIN, SLOW, fence=Fence(0, 0))
    assert not found(job)
