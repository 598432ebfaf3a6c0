"""Restarts: the budget and its pause, the wait for evidence, the root cause, and drains."""

import signal

import pytest
from coordinator_driver import Driver, job_spec
from msgspec.structs import replace

from elastane.agent.failure_reports import OomCounters, kill_evidence
from elastane.agent.worker import TIMER_SLUG
from elastane.coordinator.rules.incident import SAME_CRASHES_MAX, Incidents, RestartBudget
from elastane.protocol import limits
from elastane.protocol.diagnosis import (
    Sighting,
    crash_site,
    crash_sites,
    exit_text,
    headline,
    is_lost_peer,
    root_cause,
)
from elastane.protocol.limits import VERDICT_S, Timing
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    Close,
    Drain,
    DrainTarget,
    Failed,
    Holding,
    Lost,
    Returned,
    Stop,
    Stopped,
)
from elastane.protocol.model import (
    NO_RANK,
    UNUSED,
    CheckpointUse,
    Crash,
    Failure,
    Fence,
    Joining,
    PortOffer,
)
from elastane.protocol.ring import RecordedCall, WorkerCalls


def failure(rank, message="", exit_code=1, age_s=0.0, local_rank=0):
    return Failure(
        local_rank=local_rank, rank=rank, pid=7, exit_code=exit_code, age_s=age_s, message=message
    )


def test_a_failed_worker_restarts_the_group_once_for_the_whole_job(pair):
    pair.fails("a")
    pair.fails("b", "Connection closed by peer")
    assert pair.phase == "stopping"
    pair.stops("a", "b")
    assert pair.assigned["a"].fence == Fence(1, 1)
    assert pair.assigned["a"].restarts_used == 1
    assert pair.persisted[-1].restarts_used == 1


def calls_of(rank, nbytes):
    """Return the calls of a worker: one that all made alike, and the one in which they differ."""
    made = [
        RecordedCall(number=n, operation="all_reduce", site="train.py:8", nbytes=size, group=0,
                     count=n, entered_ns=n)
        for n, size in ((1, 28), (2, nbytes))
    ]  # fmt: skip
    return WorkerCalls(rank=rank, local_rank=rank % 2, pid=60 + rank, calls=tuple(made))


def test_workers_that_are_stopped_after_gloo_ended_one_show_which_rank_differed(pair):
    """Both calls were made on the node that failed; the other node has the majority."""
    first = pair.assigned["b"].rank_base
    text = (
        "Fatal Python error: Aborted: op.preamble.length <= op.nbytes. 500 vs 4. Received data size"
        " doesn't match expected size. Is there a distributed collective mismatch in your code?"
    )
    ended = replace(
        failure(first, text, exit_code=-6), calls=(calls_of(first, 28), calls_of(first + 1, 4000))
    )
    pair.says("b", Failed(fence=pair.assigned["b"].fence, failures=(ended,)))
    assert [one.asks_calls for node in "ab" for one in pair.got(node, Stop)] == [True, True]
    assert not [one for one in pair.events if one.kind is EventKind.CULPRIT], "one against one"
    fence, base = pair.assigned["a"].fence, pair.assigned["a"].rank_base
    pair.stops("b")
    calls = tuple(calls_of(base + one, 28) for one in range(2))
    pair.says("a", Stopped(fence, PortOffer(9000, True), calls=calls))
    [found] = [one.data for one in pair.events if one.kind is EventKind.CULPRIT]
    assert (found["culprit_node"], found["ranks"]) == ("b", str(first + 1)), found
    [restart] = [one.data for one in pair.events if one.kind is EventKind.RESTART]
    assert (restart["cause_node"], restart["cause_rank"]) == ("b", first + 1), restart


def test_workers_that_are_stopped_after_one_was_killed_show_no_calls(pair):
    pair.fails("a", "", exit_code=-9)
    assert not any(one.asks_calls for node in "ab" for one in pair.got(node, Stop))


def test_a_used_up_budget_ends_the_job_with_the_root_cause(driver):
    job = driver(job_spec(restarts=0))
    job.join("a")
    job.join("b")
    job.fails("b", "RuntimeError: Connection reset by peer")
    job.fails("a", "Traceback ...\nValueError: boom", age_s=0.01)
    job.stops("a", "b")
    assert job.phase == "stopping"  # Evidence of a departure may still come.
    job.passes(0.4, alive="ab")
    outcome = job.got("a", Close)[0].outcome
    assert "worker of rank 0 (local rank 0, pid 4242) on node a ended with exit code 1" in (
        outcome.reason
    )
    assert "ValueError: boom" in outcome.reason and "--max-restarts 0" in outcome.reason
    assert (outcome.exit_code, outcome.cause.consequences) == (1, 1)
    assert job.persisted[-1].outcome == outcome


@pytest.mark.parametrize(("lived_s", "is_named"), [(2.0, True), (90.0, False)])
def test_an_outcome_names_the_failure_right_before_the_last_restart(driver, lived_s, is_named):
    job = driver(job_spec(1, 1, restarts=1))
    job.join("a")
    job.fails("a", "ValueError: first")
    job.stops("a")
    job.passes(lived_s, alive="a")
    job.fails("a", "ValueError: second")
    job.stops("a")
    job.passes(0.4, alive="a")
    outcome = job.got("a", Close)[0].outcome
    assert "ValueError: second" in outcome.reason
    assert ("restart 1 of 1" in outcome.before) == is_named
    first = "worker of rank 0 (local rank 0, pid 4242) on node a ended with exit code 1: ValueError"
    assert outcome.before.startswith(f"{first}: first") == is_named


def test_an_outcome_names_the_failure_before_those_that_repeat_one_error(driver):
    """A full disk left half a checkpoint, which no restart could read."""
    job = driver(job_spec(1, 1, restarts=3))
    job.join("a")
    full = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"
    for error in (full, *["FileNotFoundError: checkpoint-150/trainer_state.json"] * 3):
        job.passes(2.0, alive="a")
        job.fails("a", error)
        job.stops("a")
        job.passes(1.0, alive="a")
        assert error in job.machine.report().last_incident
    outcome = job.got("a", Close)[0].outcome
    assert "trainer_state.json" in outcome.cause.what and full in outcome.before
    assert outcome.before.endswith("; restart 1 of 3")
    assert "free space on the disk" in outcome.next_step


def test_the_first_of_two_failures_of_a_node_is_the_cause_even_if_reported_late(driver):
    """The first report took half a second; the next one, with both failures, no time."""
    job = driver(job_spec(1, 1, restarts=0))
    job.join("a")
    fence = job.assigned["a"].fence
    first, second = failure(1, "ValueError: 1"), failure(0, "ValueError: 0", local_rank=1)
    job.now_s += 0.5
    job.says("a", Failed(fence=fence, failures=(first,)))
    both = (replace(first, age_s=0.5), replace(second, age_s=0.3))
    job.says("a", Failed(fence=fence, failures=both))
    job.stops("a")
    job.passes(0.4, alive="a")
    assert job.got("a", Close)[0].outcome.cause.failure.rank == 1


def test_failures_caused_by_a_leaving_node_are_free_even_if_its_notice_came_late(
    driver,
):
    job = driver(job_spec(2, 3))
    for node_id in "abc":
        job.join(node_id)
    job.fails("b", "Connection closed by peer")
    job.leaves("a")
    job.breaks("a")
    job.passes(0.2, alive="bc")
    job.stops("b", "c")
    assert job.phase == "running" and job.machine.report().restarts_used == 0


def test_failures_caused_by_a_departure_use_no_restart(driver):
    job = driver(job_spec(1, 2, restarts=0))
    job.join("a")
    job.join("b")
    job.fails("b", "Connection closed by peer")
    job.stops("b")
    job.breaks("a")
    job.passes(0.2, alive="b")
    assert job.phase == "running" and job.ranks() == ["b"]
    assert job.machine.report().restarts_used == 0


@pytest.mark.parametrize(("said", "used"), [("Connection closed by peer", 0), ("boom", 1)])
def test_failures_caused_by_a_stop_under_an_earlier_coordinator_use_no_restart(pair, said, used):
    """A failure of a worker's own uses one."""
    new, failures = Driver(), (failure(0, said),)
    new.join("b", holding=pair.holding("b", "stopping"), welcomed=True)
    new.join("a", holding=pair.holding("a", "failed", failures=failures), welcomed=True)
    new.assigned |= pair.assigned
    new.stops("b", "a")
    new.passes(1.0, alive="ab")
    assert new.phase == "running" and new.assigned["a"].fence == Fence(1, 1)
    assert new.machine.report().restarts_used == used


def test_the_pauses_of_a_crash_loop_get_longer_and_are_logged(driver):
    job = driver(job_spec(1, 1, restarts=3))
    job.join("a")
    pauses = []
    for _ in range(3):
        job.fails("a")
        job.stops("a")
        began_s = job.now_s
        while job.phase == "forming":
            job.passes(0.1, alive="a")
        pauses.append(job.now_s - began_s)
    assert pauses[0] == 0.0 and 0.5 <= pauses[1] < 0.7 and 1.0 <= pauses[2] < 1.2
    job.fails("a")
    job.stops("a")
    job.passes(0.4, alive="a")
    assert "a crash loop: the last 4 attempts each failed" in job.persisted[-1].outcome.reason


def test_the_pause_has_a_bound_and_ends_with_a_good_run():
    budget = RestartBudget(allowed=100)
    delays = [budget.charge(0.0, Timing()).delay_s for _ in range(40)]
    assert delays[0] == 0.0 and delays[1] == limits.BACKOFF_FIRST_S
    assert max(delays) == delays[-1] == limits.BACKOFF_MAX_S
    assert budget.charge(60.0, Timing()).delay_s == 0.0
    assert budget.used == 41


def test_a_budget_never_goes_over_what_is_allowed():
    budget = RestartBudget(allowed=1)
    assert budget.charge(9.0, Timing()).restart
    verdict = budget.charge(9.0, Timing())
    assert not verdict.restart and verdict.reason == "the one restart of the job is used"
    assert budget.used == 1


def test_the_cause_is_the_earliest_failure_that_is_no_consequence():
    sightings = [
        Sighting(node_id="b", at_s=1.0, failure=failure(3, "Connection closed by peer")),
        Sighting(node_id="c", at_s=1.2, failure=failure(5, exit_code=-9)),
        Sighting(node_id="a", at_s=1.5, failure=failure(0, "ValueError: later")),
    ]
    cause = root_cause(sightings, Fence(2, 1))
    assert (cause.node_id, cause.failure.rank, cause.consequences) == ("c", 5, 2)
    assert "SIGKILL" in cause.what


def test_if_all_failures_are_lost_peers_the_first_is_the_cause():
    sightings = [
        Sighting(node_id="b", at_s=2.0, failure=failure(3, "Connection closed by peer")),
        Sighting(node_id="c", at_s=1.0, failure=failure(5, "Broken pipe")),
    ]
    assert root_cause(sightings, Fence(1, 0)).node_id == "c"


LOST = "[/a/pair.cc:5] Connection closed by peer [::1]:9. This is typically caused by a crash."


def returns(job, node_id, rank, age_s=0.0, **more):
    end = Failure(local_rank=0, rank=rank, pid=9, exit_code=0, age_s=age_s, **more)
    job.says(node_id, Returned(fence=job.assigned[node_id].fence, end=end))


def test_a_program_that_returned_on_one_rank_is_the_cause_of_the_peers_lost_on_other_nodes(pair):
    pair.fails("a", LOST, age_s=0.1)
    returns(pair, "b", 1, 0.5, steps=4, log_file="/logs/b")
    pair.stops("a", "b")
    [restart] = [event for event in pair.events if event.kind is EventKind.RESTART]
    early = "ended with exit code 0 (its program returned after 4 steps while others still trained)"
    assert restart.data["cause"] == (
        f"worker of rank 1 (local rank 0, pid 9) on node b {early}; so worker of rank 0 (local rank"
        " 0, pid 4242) on node a ended with exit code 1: Connection closed by peer [::1]:9"
    )
    named = ("node", "rank", "local_rank", "pid", "log")
    assert [restart.data[f"cause_{one}"] for one in named] == ["b", 1, 0, 9, "/logs/b"]
    assert restart.data["consequences"] == 1
    assert restart.reason.endswith(f"worker of rank 1 on node b {early}")
    assert pair.machine.report().last_incident.startswith("worker of rank 1 (local rank 0, pid 9)")


@pytest.mark.parametrize(
    ("said", "age_s"), [("ValueError: loss is nan", 0.5), (LOST, -5.0)], ids=["own error", "later"]
)
def test_a_program_that_returned_is_no_cause_of_an_own_error_or_an_earlier_loss(pair, said, age_s):
    pair.fails("a", said)
    pair.passes(max(0.0, -age_s), alive="ab")
    returns(pair, "b", 1, max(0.0, age_s))
    pair.stops("a", "b")
    [restart] = [event for event in pair.events if event.kind is EventKind.RESTART]
    assert (restart.data["cause_node"], restart.data["cause_rank"]) == ("a", 0)


def test_a_program_that_returned_is_the_cause_of_a_peer_lost_in_place(pair):
    for node_id in "ab":
        able = Able(workers=(0, 1), offer=PortOffer(9000, True), joining=Joining.NEVER)
        pair.says(node_id, able)
    returns(pair, "b", 3)
    pair.says("a", Lost(fence=pair.assigned["a"].fence, reason="lost a peer: reset"))
    pair.passes(limits.LOST_PEER_S + 0.2, alive="ab")
    [incident] = [event for event in pair.events if event.kind is EventKind.INCIDENT]
    assert incident.reason.startswith("worker of rank 3 on node b ended with exit code 0 (its")


def test_a_job_that_a_returned_program_ends_says_that_in_its_outcome():
    one = Driver(job_spec(1, 1, restarts=0))
    one.join("a")
    one.fails("a", LOST)
    returns(one, "a", 1, 0.2)
    one.stops("a")
    one.passes(1.0, alive="a")
    outcome = one.persisted[-1].outcome
    assert (outcome.cause.failure.rank, outcome.cause.failure.exit_code) == (1, 0)
    assert "the same number of steps" in outcome.next_step
    ends = [(one.failure.rank, one.failure.exit_code) for one in outcome.failures]
    assert ends == [(1, 0), (0, 1)], "in the order of time"


TRACE = "Traceback (most recent call last):\n  File x, line 1, in f\n    f()\n"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", ""),
        ("warning\nKilled\n\n", "Killed"),
        (TRACE + "ValueError: bad", "ValueError: bad"),
        (TRACE + "pkg.Error: bad\n  next: mend it\nand so on", "pkg.Error: bad"),
        (TRACE + "KeyError: 1\n\nDuring handling ...\n\n" + TRACE + "OSError: 2", "OSError: 2"),
        ("elastane.errors.UsageError: no\n  next: x", "elastane.errors.UsageError: no"),
        ("not started: no /py [worker-start]\n  next: x", "not started: no /py [worker-start]"),
    ],
)
def test_the_headline_is_the_line_that_names_the_error(said, line):
    assert headline(said) == line


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exit code 3"), (-11, "SIGSEGV"), (-250, "signal 250")],
)
def test_an_exit_code_is_described_in_words(code, text):
    assert exit_text(code) == text


def test_a_timeout_of_a_collective_explains_nothing():
    assert is_lost_peer(failure(0, "Timed out waiting 1800000ms for recv operation to complete"))


def leave(job):
    job.leaves("a")
    assert [bool(job.got(n, Drain)) for n in "ab"] == [True, True]


def test_all_workers_checkpoint_at_one_call_that_none_has_passed(elastic):
    leave(elastic)
    elastic.marks("a", 7)
    assert not elastic.got("a", DrainTarget)
    elastic.marks("b", 8)
    assert [elastic.got(n, DrainTarget)[0].calls for n in "ab"] == [9, 9]
    elastic.drains("a")
    assert not elastic.got("a", Stop)
    elastic.drains("b")
    assert elastic.got("a", Stop) and elastic.got("b", Stop)


def test_a_drain_has_a_bound(elastic):
    leave(elastic)
    elastic.passes(29.0, alive="ab")
    assert elastic.phase == "draining"
    elastic.passes(1.2, alive="ab")
    assert elastic.phase == "stopping"
    assert "workers of a, b did not checkpoint" in elastic.events[-1].reason


def test_workers_that_exit_on_a_drain_are_no_success(elastic):
    leave(elastic)
    for name in "ab":
        elastic.marks(name, None)
    elastic.succeeds("a", "b")
    assert elastic.phase == "draining"
    elastic.drains("a")
    elastic.drains("b")
    elastic.stops("a", "b")
    assert elastic.phase == "running" and elastic.ranks() == ["b"]


def test_workers_that_finish_before_they_are_asked_are_a_success(elastic):
    leave(elastic)
    elastic.succeeds("a", "b")
    assert elastic.phase == "closing" and elastic.persisted[-1].outcome.ok


def test_a_worker_that_dies_in_a_drain_ends_it_at_once_and_is_not_charged(elastic):
    leave(elastic)
    elastic.marks("a", 7)
    elastic.marks("b", 7)
    elastic.fails("b", "", exit_code=-9)
    assert elastic.phase == "stopping"
    elastic.stops("a", "b")
    assert elastic.machine.report().restarts_used == 0


def test_a_drain_request_lost_with_a_session_is_repeated(elastic):
    elastic.breaks("b")
    elastic.leaves("a")
    elastic.join("b", holding=elastic.holding("b"))
    assert elastic.got("b", Drain)
    elastic.marks("a", 4)
    elastic.breaks("b")
    elastic.join("b", holding=elastic.holding("b", draining=True, last_drain=1))
    elastic.marks("b", 5)
    elastic.breaks("b")
    elastic.join("b", holding=elastic.holding("b", draining=True, last_drain=1))
    assert [m.calls for m in elastic.got("b", DrainTarget)] == [6, 6]


def test_a_new_coordinator_continues_a_drain(elastic, driver):
    new = driver(elastic.spec, record=elastic.persisted[-1], store_backed=True)
    new.assigned = elastic.assigned
    new.join("a", holding=elastic.holding("a", draining=True, last_drain=1))
    new.join("b", holding=elastic.holding("b"))
    assert new.phase == "draining" and new.got("a", Drain) and new.got("b", Drain)


@pytest.mark.parametrize("in_place", [True, False])
def test_finished_workers_do_not_restart_after_a_coordinator_died_in_a_drain(
    elastic, driver, in_place
):
    """A script without in-place recovery may have exited in order to be restarted."""
    new = driver(elastic.spec, record=elastic.persisted[-1], store_backed=True)
    new.assigned = elastic.assigned
    for name in "ab":
        held = elastic.holding(name, "succeeded", draining=True, in_place=in_place)
        new.join(name, holding=held)
    assert bool(new.persisted[-1].outcome) == in_place
    assert new.phase == ("closing" if in_place else "draining")


def test_the_job_succeeds_when_all_nodes_have(pair):
    pair.succeeds("a")
    assert pair.phase == "running"
    pair.succeeds("b")
    assert pair.persisted[-1].outcome.reason == "all 4 workers of round 1 attempt 0 succeeded"
    for name in "ab":
        pair.breaks(name)
    pair.passes(0.2)
    assert pair.finished.ok


def test_workers_that_do_not_stop_are_counted_out_after_their_bound(elastic):
    elastic.fails("a")
    elastic.stops("b")
    elastic.passes(39.5, alive="ab")
    assert elastic.phase == "stopping"
    elastic.passes(1.0, alive="ab")
    assert elastic.ranks() == ["b"]


def test_bounds_that_contradict_one_another_are_named():
    faults = limits.check(limits.Timing(heartbeat_s=2.0, lease_ttl_s=0.0, shutdown_timeout_s=-1.0))
    assert "heartbeat_s = 2 s needs silence_s >= 4 s, got 3: one lost heartbeat" in " ".join(faults)
    assert any("lease_ttl_s = 0 s: must be positive" in fault for fault in faults)
    assert any("shutdown_timeout_s = -1 s: must not be negative" in fault for fault in faults)
    assert limits.check(limits.Timing()) == []


def test_workers_of_an_older_world_whose_node_leaves_are_not_charged_as_they_fail():
    job = Driver(job_spec(1, 2))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    older = job.holding("a")
    job.breaks("a")
    job.passes(0.2, alive="b")
    job.stops("b")
    job.passes(4.0, alive="b")
    job.join("a", holding=older)
    job.leaves("a")
    job.passes(0.1, alive="ab")
    job.fails("a")
    job.passes(4.0, alive="ab")
    assert job.persisted[-1].restarts_used == 0
    assert job.assigned["b"].fence.round == 2 and job.assigned["b"].restarts_used == 0


def test_a_node_that_stops_its_workers_while_the_store_is_away_says_why(pair):
    pair.authority(False)
    pair.says("a", Stopped(pair.assigned["a"].fence, PortOffer(9000, True), True))
    [incident] = [one for one in pair.events if one.kind is EventKind.INCIDENT]
    assert incident.reason == (
        "node a stopped its workers by itself, since the store accepts no decisions"
    )


@pytest.mark.parametrize("unasked", [False, True])
def test_a_node_that_stopped_its_workers_unasked_is_the_cause_of_other_failures(pair, unasked):
    """Its message came late; until then the cause of the other failures was unknown."""
    pair.fails("b", "RuntimeError: Connection reset by peer")
    assert pair.phase == "stopping"
    pair.says("a", Stopped(pair.assigned["a"].fence, PortOffer(9000, True), unasked))
    pair.stops("b")
    pair.passes(3.0, alive="ab")
    assert pair.persisted[-1].restarts_used == (0 if unasked else 1)


def cause_of(*failures):
    return root_cause(
        [Sighting(node_id="a", at_s=f.rank, failure=f) for f in failures], Fence(1, 0)
    )


WARNING = "torch/utils.py:3: UserWarning: this is slow\n"


def test_a_line_that_was_written_before_a_kill_is_not_its_cause():
    killed = replace(failure(1, WARNING, -9), output=True, evidence="from outside")
    assert cause_of(killed).what == (
        "worker of rank 1 (local rank 0, pid 7) on node a ended with SIGKILL (from outside)"
    )


def test_the_last_line_of_stderr_is_called_that_and_an_error_is_not():
    quiet = replace(failure(1, WARNING, 3), output=True)
    assert cause_of(quiet).what.endswith(
        f"ended with exit code 3; the last line of its stderr: {WARNING.strip()}"
    )
    trace = f'{WARNING}Traceback (most recent call last):\n  File "x.py", line 1\nValueError: bad\n'
    assert cause_of(replace(failure(1, trace), output=True)).what.endswith(
        "ended with exit code 1: ValueError: bad"
    )


def test_a_killed_worker_that_once_wrote_of_a_connection_is_no_consequence():
    killed = replace(failure(1, "retrying: connection refused", -9), output=True)
    assert not is_lost_peer(killed)
    assert cause_of(failure(2, "Connection closed by peer"), killed).failure == killed


def test_workers_that_wrote_the_same_line_did_not_fail_by_the_same_error():
    quiet = [replace(failure(rank, WARNING, 3), output=True) for rank in range(3)]
    cause = cause_of(*quiet)
    assert (cause.alike, cause.consequences) == (0, 2)


def test_an_error_before_the_stop_is_the_cause_and_not_the_signal_of_the_stop():
    error = replace(failure(0, "ImportError: no x", -15), stopped=True, error_file="e")
    cause = cause_of(error, failure(1, "ImportError: no x"), failure(2, "KeyError: 1"))
    assert cause.what.endswith("on node a failed by an error of its own: ImportError: no x")
    assert (cause.alike, cause.consequences) == (1, 1)


def test_a_worker_without_a_place_is_named_without_a_rank():
    what = cause_of(failure(NO_RANK, "ValueError: bad")).what
    assert what.startswith("worker without a rank (local rank 0, pid 7) on node a ended with")


def crash(error="ModuleNotFoundError: No module named 'x'", line=2, **more):
    text = (
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 9, in <module>\n    main()\n'
        f'  File "/job/train.py", line {line}, in main\n    import x\n{error}\n'
    )
    return replace(failure(0, text), **{"error_file": "error.json", **more})


def test_the_place_of_a_crash_is_its_error_and_the_innermost_line():
    assert crash_site(crash()) == "ModuleNotFoundError: No module named 'x', /job/train.py:2"


FABRIC_REFUSES = (
    "ValueError: You selected the FSDP strategy but FSDP is only available on GPU. Set"
    " `Fabric(accelerator='gpu', ...)` to continue or select a different strategy."
)


@pytest.mark.parametrize(
    "error",
    [
        FABRIC_REFUSES,
        "TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+",
        "AttributeError: 'Store' object has no attribute 'cuda'",
        "KeyError: 'no state to restore'",
        "ValueError: no lossless codec named 'x'",
    ],
)
def test_a_refused_argument_is_a_crash_of_the_script_whatever_words_it_has(error):
    assert crash_site(crash(error)).startswith(error)


@pytest.mark.parametrize(
    "other",
    [
        crash("ConnectionRefusedError: [Errno 111] Connection refused"),
        crash("FileNotFoundError: data.bin"),
        crash("torch.distributed.DistNetworkError: The client socket has failed to connect"),
        crash("torch.OutOfMemoryError: tried to allocate"),
        crash("RuntimeError: CUDA error: uncorrectable ECC error"),
        crash("torch.AcceleratorError: an illegal memory access was encountered"),
        crash("RuntimeError: Cannot access accelerator device when none is available."),
        crash("ssl.SSLError: certificate verify failed"),
        crash("torch.distributed.DistStoreError: wait of the TCPStore"),
        crash("RuntimeError: [gloo] Connection closed by peer"),
        crash("RuntimeError: Broken pipe"),
        crash("requests.exceptions.ReadTimeout: hub"),
        crash("SystemExit: not today"),
        crash(error_file=""),
        failure(0, "ValueError: no stack"),
    ],
)
def test_errors_that_may_be_gone_the_next_time_are_no_crash_of_the_script(other):
    assert crash_site(other) == ""


FATAL = (
    'Python stack (most recent call last):\n  File "/job/train.py", line 9 in main\n'
    '  File "/job/train.py", line 2 in step\nFatal Python error: Segmentation fault'
)
IN_GLOO = (
    "Native stack of the thread that faulted (innermost first):\n"
    "  frame #0: gloo::transport::tcp::Pair::read() + 0x7 (0x7f in libtorch_cpu.so)\n" + FATAL
)


def fatal(exit_code=-signal.SIGSEGV, message=FATAL, **more):
    return replace(failure(0, message, exit_code), **more)


@pytest.mark.parametrize(
    ("end", "site"),
    [
        (fatal(), "SIGSEGV, /job/train.py:2"),
        (fatal(-signal.SIGABRT, steps=3), "SIGABRT, /job/train.py:2"),
        (fatal(-signal.SIGFPE, "step 3", output=True, steps=3), "SIGFPE"),
        (fatal(-signal.SIGILL, "step 3", output=True, measured=3), "SIGILL"),
        (fatal(-signal.SIGBUS, FATAL, steps=3), "SIGBUS, /job/train.py:2"),
        (fatal(-signal.SIGSEGV, "step 3", output=True), ""),
        (fatal(-signal.SIGKILL, "step 3", output=True, steps=3), ""),
        (fatal(-signal.SIGTERM, "step 3", output=True, steps=3), ""),
        (fatal(-signal.SIGINT, FATAL, steps=3), ""),
        (fatal(-signal.SIGABRT, steps=3, evidence="by its agent, since it hung"), ""),
        (fatal(-signal.SIGABRT, steps=3, evidence=f"timer 'x' [{TIMER_SLUG}]"), ""),
        (fatal(message=f"{FATAL}: Connection closed by peer", steps=3), ""),
        (fatal(message=f"{FATAL}: CUDA error: uncorrectable ECC error", steps=3), ""),
        (fatal(-signal.SIGABRT, "Watchdog caught collective operation timeout", steps=3), ""),
        (fatal(-signal.SIGBUS, "nfs: server f not responding", output=True, steps=3), ""),
        (fatal(-signal.SIGABRT, IN_GLOO, steps=3), ""),
    ],
)
def test_a_signal_of_its_own_is_a_crash_of_the_script_and_one_from_outside_is_not(end, site):
    assert crash_site(end) == site


@pytest.mark.parametrize(
    ("error", "site"),
    [
        ("MemoryError", "MemoryError: out of memory, /job/train.py:2"),
        (
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 4.00 TiB",
            "_ArrayMemoryError: out of memory, /job/train.py:2",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. Process 7 has 9",
            "OutOfMemoryError: out of memory, /job/train.py:2",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", ""),
        ("BlockingIOError: out of memory", ""),
    ],
)
def test_a_lack_of_memory_is_a_crash_of_the_script_once_steps_show(error, site):
    assert crash_site(crash(error)) == ""
    assert crash_site(crash(error, steps=3)) == crash_site(crash(error, measured=3)) == site


def test_a_kill_by_the_kernel_for_lack_of_memory_is_the_workers_own_once_steps_show():
    before, after = OomCounters(cgroup_kills=0), OomCounters(cgroup_kills=1)
    told = kill_evidence(before, after, 0, -signal.SIGKILL)
    end = fatal(-signal.SIGKILL, "step 3", output=True, evidence=told)
    assert crash_site(end) == ""
    assert crash_site(replace(end, steps=3)) == "SIGKILL: out of memory"
    others = OomCounters(host_kills=0), OomCounters(host_kills=1)
    for counters in (others, (before, before)):
        told = kill_evidence(*counters, 0, -signal.SIGKILL)
        assert crash_site(replace(end, steps=3, evidence=told)) == ""


def crashes(job, times, *, lives_s=0.0, node="a", use=UNUSED, **more):
    """Let the node's attempts crash; each restart begins at once or after its pause.

    What is callable in `more` is called with the number of the attempt.
    """
    for number in range(times):
        job.passes(lives_s, alive=node)
        given = job.assigned[node]
        shown = {key: each(number) if callable(each) else each for key, each in more.items()}
        job.says(node, Failed(fence=given.fence, failures=(crash(pid=10 + number, **shown),)))
        job.stops(node, use=use(number) if callable(use) else use)
        while job.phase == "forming":
            job.passes(0.1, alive=node)


def alone(driver, **timing):
    job = driver(job_spec(1, 1, restarts=100, timing=timing))
    job.join("a")
    return job


def test_the_same_crash_before_a_step_ends_the_job_at_the_third_time(driver):
    job = alone(driver)
    crashes(job, SAME_CRASHES_MAX - 1)
    assert job.phase == "running"
    crashes(job, 1)
    outcome = job.persisted[-1].outcome
    assert outcome.slug == "worker-failed" and "3 attempts in a row" in outcome.reason
    assert "/job/train.py:2" in outcome.reason and "same_crash=0" in outcome.reason
    assert job.machine.report().restarts_used == SAME_CRASHES_MAX - 1


def names_its_rank(rank):
    return f"ValueError: device_ids [{rank}] on a CPU"


def two_crash(job, first):
    """Let both workers of a node crash by an error that names their rank, one of them `first`."""
    found = [
        crash(names_its_rank(rank=each), pid=10 + each, local_rank=each, rank=each)
        for each in (0, 1)
    ]
    found[first] = replace(found[first], age_s=0.1)
    job.says("a", Failed(fence=job.assigned["a"].fence, failures=tuple(found)))
    job.stops("a")
    while job.phase == "forming":
        job.passes(0.1, alive="a")


def test_the_same_crash_of_all_workers_counts_whichever_of_them_reports_it_first(driver):
    job = driver(job_spec(1, 1, restarts=100))
    job.join("a")
    for attempt in range(SAME_CRASHES_MAX):
        assert job.phase == "running"
        two_crash(job, first=attempt % 2)
    assert "3 attempts in a row" in job.persisted[-1].outcome.reason
    assert names_its_rank(0) in job.persisted[-1].outcome.reason


def test_errors_of_other_lines_are_not_the_same_crash():
    own = "ValueError: nan at step 12, /job/train.py:2"
    others = ["ValueError: nan at step 12, /job/train.py:9", "KeyError: 3, /job/train.py:2"]
    found = crash_sites(crash("ValueError: nan at step 12"), others)
    assert found == (own,)
    assert crash_sites(crash("ConnectionResetError: x"), others) == ()


REFUSED = "elastane.errors.ConfigurationError: new_group([0]): not possible [in-place-refused]"


@pytest.mark.parametrize("allowed", [100, 0])
def test_what_elastane_refuses_ends_the_job_at_the_first_time_whatever_it_has_done(driver, allowed):
    job = driver(job_spec(1, 1, restarts=allowed))
    job.join("a")
    crashes(job, 1, error=lambda _: f"{REFUSED}\n  next: leave it out", steps=5, lives_s=100.0)
    job.passes(VERDICT_S + 0.1, alive="a")
    outcome = job.persisted[-1].outcome
    assert (
        "elastane refuses what the script does, in each attempt [in-place-refused]"
        in outcome.reason
    )
    assert outcome.next_step == "leave it out"
    assert job.machine.report().restarts_used == 0


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (REFUSED, {"same_crash_s": 0.0}),
        ("elastane.errors.JobError: the holders are lost [job-state-lost]", {}),
        (f"ValueError: the log has {REFUSED}", {}),
        ("elastane.errors.JobError: a collective, by a worker that came later [job-early]", {}),
    ],
    ids=["turned off", "the state is lost", "the script's own error cites it", "came later"],
)
def test_other_errors_than_refusals_use_the_budget(driver, error, how):
    job = alone(driver, **how)
    crashes(job, 2, error=lambda _: error, steps=5)
    assert job.phase == "running"


def test_a_worker_of_several_that_elastane_refuses_something_ends_the_job(driver):
    job = driver(job_spec(restarts=100))
    job.join("a")
    job.join("b")
    fence = job.assigned["a"].fence
    job.says("a", Failed(fence=fence, failures=(crash(REFUSED, pid=10),)))
    job.stops("a", "b")
    assert job.persisted[-1].outcome.cause.node_id == "a"


@pytest.mark.parametrize(
    "how",
    [
        {"timing": {"same_crash_s": 0.0}, "steps": 5},
        {"steps": lambda number: 5 + number},
        {"measured": lambda number: 5 + number},
        {"steps": 5, "use": CheckpointUse(read=True, written=True)},
        {"measured": 5, "use": CheckpointUse()},
        {"use": CheckpointUse()},
        {"error": lambda number: f"ValueError: loss is nan at step {number}"},
        {"lives_s": 61.0},
    ],
    ids=[
        "turned off",
        "at other steps",
        "at other measured steps",
        "each from a checkpoint of the last",
        "the same, steps measured",
        "the same, no step shows",
        "another text",
        "no step shows in a long life",
    ],
)
def test_crashes_that_differ_or_came_after_progress_use_the_budget(driver, how):
    job = alone(driver, **how.pop("timing", {}))
    crashes(job, SAME_CRASHES_MAX + 1, **how)
    assert job.phase == "running"


@pytest.mark.parametrize(
    "use",
    [
        UNUSED,
        CheckpointUse(read=True, written=False),
        CheckpointUse(read=False, written=True),
    ],
    ids=["no checkpoint", "from the same one", "from the start"],
)
@pytest.mark.parametrize("count", ["steps", "measured"])
def test_the_same_crash_at_the_same_step_ends_the_job_if_none_began_further_on(driver, count, use):
    job = alone(driver)
    crashes(job, SAME_CRASHES_MAX - 1, lives_s=200.0, use=use, **{count: 450})
    assert job.phase == "running"
    crashes(job, 1, lives_s=200.0, use=use, **{count: 450})
    assert "3 attempts in a row failed after 450 steps" in job.persisted[-1].outcome.reason


def test_a_free_restart_after_a_save_breaks_the_row_of_the_same_crash(driver):
    def after(use):
        job = alone(driver)
        crashes(job, SAME_CRASHES_MAX - 1, steps=450)
        job.leaves("a")
        job.stops("a", use=use)
        job.join("a")
        crashes(job, 1, steps=450, use=CheckpointUse(read=True, written=False))
        return job

    assert "3 attempts in a row" in after(UNUSED).persisted[-1].outcome.reason
    assert after(CheckpointUse(read=True, written=True)).phase == "running"


def test_the_use_of_checkpoints_by_a_node_that_did_not_report_it_is_unknown():
    incidents = Incidents()
    incidents.note_use("a", UNUSED)
    assert incidents.use_by(["a"]) == UNUSED
    assert incidents.use_by(["a", "b"]) == CheckpointUse(read=True, written=True)


def test_a_new_coordinator_continues_the_count_of_the_same_crash_and_of_quick_failures(driver):
    job = alone(driver, crash_loop_s=3600.0)
    crashes(job, SAME_CRASHES_MAX - 1)
    after = driver(job.spec, job.persisted[-1])
    after.join("a", holding=Holding(assignment=job.assigned["a"], state="running"))
    after.assigned = dict(job.assigned)
    crashes(after, 1)
    assert "3 attempts in a row" in after.persisted[-1].outcome.reason
    assert after.persisted[-1].quick_failures == SAME_CRASHES_MAX


def test_the_same_crash_on_other_nodes_starts_a_new_count():
    budget = RestartBudget(allowed=100)
    for nodes in (("a", "b"), ("a", "b"), ("a", "c"), ("a", "c")):
        assert budget.charge(1.0, Timing(), Crash(("ValueError: x",), nodes)).restart
    assert not budget.charge(1.0, Timing(), Crash(("ValueError: x",), ("a", "c"))).restart


def test_a_failure_of_another_kind_breaks_the_row_of_the_same_crash():
    budget, same = RestartBudget(allowed=100), Crash(("ValueError: x",), ("a",))
    for crash_or_none in (same, same, None, same, same):
        assert budget.charge(1.0, Timing(), crash_or_none).restart
    assert not budget.charge(1.0, Timing(), same).restart


def test_the_nodes_of_a_crash_are_those_of_its_world(driver):
    job = alone(driver)
    crashes(job, SAME_CRASHES_MAX - 1)
    job.leaves("a")
    job.stops("a")
    job.join("b")
    crashes(job, 1, node="b")
    assert job.phase == "running", "it crashed on another node than before"
