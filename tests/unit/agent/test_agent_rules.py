"""The agent's rules: it reports its workers, keeps healthy ones, and stops them in time."""

import msgspec
import pytest
from coordinator_driver import job_spec, node_spec

from elastane.agent.rules import AgentCore, Readings
from elastane.errors import ExitCode
from elastane.protocol.effects import (
    AimGroup,
    Decline,
    Exit,
    MarkGroup,
    RegroupWorkers,
    StartGroup,
    StopGroup,
    Transmit,
    TryAddresses,
)
from elastane.protocol.events import (
    AddressesTried,
    GroupAble,
    GroupDrained,
    GroupGone,
    GroupMarked,
    Linked,
    MessageReceived,
    Signalled,
    Tick,
    Unlinked,
    WorkerFailed,
    WorkerLost,
    WorkerSucceeded,
)
from elastane.protocol.limits import ISOLATION_GRACE_S, PROBE_EVERY_S, Timing
from elastane.protocol.messages import (
    Alive,
    Assign,
    Close,
    Drain,
    Drained,
    DrainTarget,
    Failed,
    Heartbeat,
    Join,
    Leave,
    Marked,
    Probe,
    ProbeResult,
    Release,
    Returned,
    Stop,
    Stopped,
    Succeeded,
    Welcome,
)
from elastane.protocol.model import Assignment, Failure, Fence, Outcome, PortOffer
from elastane.protocol.ring import WorkerCalls

FENCE = Fence(3, 1)


def assignment(fence=FENCE):
    return Assignment(
        fence=fence, node_rank=0, nodes=1, rank_base=0, world_size=2, role_rank_base=0,
        role_world_size=2, master_addr="10.0.0.1", master_port=1, agent_store=True,
        restarts_used=2, max_restarts=3, reason="all are here",
    )  # fmt: skip


class Agent:
    def __init__(self, *, self_fencing=True, linked=True, **timing):
        self.now_s = self.slept_s = 0.0
        self.all_wait = False
        self.core = AgentCore(
            job_spec(timing=timing),
            node_spec("a"),
            PortOffer(1, True),
            0.0,
            self_fencing=self_fencing,
        )
        if linked:
            self.does(Linked())

    def does(self, event, met=0):
        readings = Readings(slept_s=self.slept_s, met=met, all_wait=self.all_wait)
        self.effects = self.core.handle(event, self.now_s, readings)
        return self.effects

    def told(self, message):
        return self.does(MessageReceived(message))

    def running(self):
        self.told(Assign(assignment()))
        return self

    def sent(self, kind):
        return [
            e.message
            for e in self.effects
            if isinstance(e, Transmit) and isinstance(e.message, kind)
        ]

    def effect(self, kind):
        return next((e for e in self.effects if isinstance(e, kind)), None)

    def passes(self, seconds, answer=None):
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1.0)
            if self.does(Tick()) and answer is not None and self.sent(Heartbeat):
                kept = self.effects
                self.told(Alive(answer))
                self.effects = kept + self.effects
            if self.effect(StopGroup) or self.effect(Exit):
                return


def failed(rank=0):
    failure = Failure(local_rank=rank, rank=rank, pid=1, exit_code=-9)
    return WorkerFailed(FENCE, failure, 0.0)


def test_with_its_registration_an_agent_says_where_its_workers_last_met():
    """A new coordinator must know that these workers hold the state, to continue without others."""
    agent = Agent().running()
    agent.does(Unlinked("gone"))
    agent.does(Linked(), met=FENCE.round)
    assert [join.holding.assignment.fence for join in agent.sent(Join)] == [FENCE]
    assert [(beat.fence, beat.met) for beat in agent.sent(Heartbeat)] == [(FENCE, FENCE.round)]


def test_failures_keep_their_order_however_long_each_waits_to_be_handled():
    agent = Agent().running()
    for now_s, local_rank, ended_s in ((5.0, 1, 1.0), (5.1, 0, 1.001)):
        agent.now_s = now_s
        one = Failure(local_rank=local_rank, rank=local_rank, pid=1, exit_code=1)
        agent.does(WorkerFailed(FENCE, one, ended_s))
    ages = {failure.local_rank: failure.age_s for failure in agent.sent(Failed)[-1].failures}
    assert ages[1] - ages[0] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("message", "evidence"),
    [
        ("RuntimeError: Connection closed by peer", "rank 1 had ended with exit code 0 before"),
        ("ValueError: loss is nan", ""),
    ],
)
def test_a_worker_that_lost_a_peer_says_who_had_ended_before(message, evidence):
    """A script that ends on one rank too early is the cause, not the ranks that miss it."""
    agent = Agent().running()
    agent.does(WorkerSucceeded(FENCE, 1))
    one = Failure(local_rank=0, rank=0, pid=1, exit_code=1, message=message)
    agent.does(WorkerFailed(FENCE, one, 0.0))
    assert [failure.evidence for failure in agent.sent(Failed)[-1].failures] == [evidence]


def test_an_agent_tells_which_program_has_returned_but_of_no_worker_that_it_stops():
    agent = Agent().running()
    agent.now_s = 5.0
    agent.does(WorkerSucceeded(FENCE, 1, pid=7, log_file="/logs/1", steps=3, ended_s=4.0))
    end = Failure(local_rank=1, rank=1, pid=7, exit_code=0, age_s=1.0, log_file="/logs/1", steps=3)
    assert agent.sent(Returned) == [Returned(fence=FENCE, end=end)]
    agent.told(Stop(fence=FENCE, grace_s=1.0, reason="a peer is gone"))
    agent.does(WorkerSucceeded(FENCE, 0))
    assert not agent.sent(Returned)


@pytest.mark.parametrize(("shown", "least"), [((9, 7), 7), ((9, 0), None)])
def test_with_the_end_of_its_workers_an_agent_says_how_many_steps_they_had_made(shown, least):
    """Heartbeats are up to a second older, and read no page of a worker that has ended."""
    agent = Agent().running()
    for local_rank, steps in enumerate(shown):
        agent.does(WorkerSucceeded(FENCE, local_rank, steps=steps))
    assert [message.steps for message in agent.sent(Succeeded)] == [least]


def test_an_agent_registers_with_its_workers_and_its_highest_fence():
    agent = Agent().running()
    agent.told(Welcome(phase="running", reason=""))
    agent.does(failed())
    agent.does(Unlinked("EOF"))
    agent.now_s = 2.0
    agent.does(Linked())
    (join,) = agent.sent(Join)
    assert join.holding.assignment.fence == FENCE and join.holding.state == "failed"
    assert join.holding.failures[0].age_s == 2.0
    assert join.welcomed and join.seen == FENCE and join.restarts_seen == 2


@pytest.mark.parametrize("able, in_place", [((0, 1), True), ((1,), False)])
def test_finished_workers_that_had_all_been_able_count_as_in_place(able, in_place):
    agent = Agent().running()
    for workers in (able, ()):
        agent.does(GroupAble(FENCE, workers, PortOffer(2, True)))
    agent.does(Unlinked("gone"))
    agent.does(Linked())
    held = agent.sent(Join)[-1].holding
    assert (held.able, held.in_place) == ((), in_place)


def test_while_the_coordinator_is_away_healthy_workers_continue():
    agent = Agent(self_fencing=False).running()
    agent.does(Unlinked("EOF"))
    agent.passes(3000.0)
    assert agent.core.group.phase == "running"


def test_failed_workers_are_not_kept_for_a_coordinator_that_never_comes():
    agent = Agent(self_fencing=False).running()
    agent.does(Unlinked("EOF"))
    agent.does(failed())
    agent.passes(601.0)
    assert agent.effect(StopGroup)
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.effect(Exit).code == 75


@pytest.mark.parametrize("rejoin_s", [0.0, 60.0])
@pytest.mark.parametrize("evidence", ["lost a peer", "all wait"])
def test_workers_that_wait_for_one_another_are_not_kept_for_a_coordinator_that_never_comes(
    evidence, rejoin_s
):
    agent = Agent(self_fencing=False, rejoin_timeout_s=rejoin_s).running()
    agent.does(Unlinked("EOF"))
    if evidence == "all wait":
        agent.all_wait = True
    else:
        agent.does(WorkerLost(FENCE, FENCE, "reset"))
    agent.passes((rejoin_s or 600.0) - 2.0)
    assert agent.core.group.phase == "running", "they keep their state"
    agent.passes(3.0)
    assert agent.effect(StopGroup)
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.effect(Exit).code == 75


@pytest.mark.parametrize("limit_s", [15.0, Timing().isolation_limit_s])
def test_an_agent_without_authority_for_too_long_stops_its_workers(limit_s):
    agent = Agent(isolation_limit_s=limit_s).running()
    agent.passes(limit_s - 1.0, answer=False)
    assert agent.core.group.phase == "running"
    agent.passes(2.0, answer=False)
    assert agent.effect(StopGroup).grace_s == ISOLATION_GRACE_S


def test_time_in_which_its_host_was_suspended_counts():
    """Its own clock stopped, but the nodes that wait for it to stop were not suspended."""
    agent = Agent().running()
    agent.passes(10.0, answer=True)
    agent.slept_s = 30.0
    agent.passes(Timing().isolation_limit_s - 32.0)
    assert not agent.effect(StopGroup)
    agent.passes(3.0)
    assert agent.effect(StopGroup)


def test_the_orphan_reapers_deadline_follows_proved_authority_and_counts_suspended_time():
    agent = Agent()
    assert agent.core.train_until_s is None, "there are no workers"
    agent.running()
    assert agent.core.train_until_s == Timing().standstill_limit_s
    agent.slept_s = 500.0  # Suspended before this agent's first look: it counts from there.
    agent.does(Tick())
    agent.passes(10.0, answer=True)
    proved_s = agent.core.train_until_s - Timing().standstill_limit_s
    assert 508.0 <= proved_s <= 510.0
    agent.passes(20.0, answer=False)
    assert agent.core.train_until_s == proved_s + Timing().standstill_limit_s
    agent.slept_s += 50.0  # The deadline stays where it is on the clock that counts sleep.
    agent.does(Tick())
    assert agent.core.train_until_s == proved_s + Timing().standstill_limit_s


def test_without_elections_the_orphan_reaper_has_no_deadline():
    agent = Agent(self_fencing=False).running()
    agent.passes(5 * Timing().isolation_limit_s)
    assert agent.core.train_until_s is None and not agent.effect(StopGroup)


def test_workers_that_the_orphan_reaper_killed_while_this_agent_stood_still_did_not_fail():
    agent = Agent().running()
    agent.passes(5.0, answer=True)
    agent.now_s += 2 * Timing().isolation_limit_s
    # The ends of the workers may be handled before the timer.
    killed = Failure(local_rank=0, rank=0, pid=1, exit_code=-9)
    agent.does(WorkerFailed(FENCE, killed, agent.now_s - 1.0))
    assert agent.effect(StopGroup) and not agent.sent(Failed)
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.sent(Stopped)[0].unasked


def test_a_worker_that_failed_before_this_agent_stood_still_is_reported():
    agent = Agent().running()
    agent.passes(5.0, answer=True)
    agent.now_s += 2 * Timing().isolation_limit_s
    agent.does(WorkerFailed(FENCE, Failure(local_rank=0, rank=0, pid=1, exit_code=1), 5.5))
    assert agent.sent(Failed)


def test_an_answer_to_a_heartbeat_from_before_a_suspension_proves_authority_only_for_that_time():
    agent = Agent().running()
    agent.passes(1.0)
    assert agent.sent(Heartbeat)
    agent.slept_s = Timing().isolation_limit_s
    agent.told(Alive(True))
    assert agent.effect(StopGroup)


def test_proved_authority_keeps_the_workers_running():
    agent = Agent().running()
    agent.passes(5 * Timing().isolation_limit_s, answer=True)
    assert agent.core.group.phase == "running"


def test_answers_that_waited_in_a_buffer_prove_no_authority():
    agent = Agent().running()
    agent.passes(1.0)
    agent.now_s += 2 * Timing().isolation_limit_s  # The host stood still.
    agent.told(Alive(True))
    assert agent.effect(StopGroup)


def test_an_assignment_with_a_closed_port_is_not_started():
    """The assignment was decided before the coordinator learned of the node's new port."""
    agent = Agent()
    stale = msgspec.structs.replace(assignment(), master_port=9)
    agent.told(Assign(stale))
    assert agent.effect(StartGroup) is None
    assert agent.effect(Decline).fence == FENCE
    agent.told(Assign(msgspec.structs.replace(stale, node_rank=1)))
    assert agent.effect(StartGroup), "the port of another node is not its own to know"


def test_an_assignment_that_waited_in_a_buffer_is_not_started():
    agent = Agent()
    agent.now_s += 2 * Timing().isolation_limit_s
    agent.told(Assign(assignment()))
    assert agent.effect(StartGroup) is None
    assert agent.effect(Decline).fence == FENCE
    # Others may wait at the port that was on offer: only another one is told.
    assert not agent.sent(Stopped)
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.sent(Stopped) == [Stopped(FENCE, PortOffer(6, True))]


@pytest.mark.parametrize("asks", [False, True])
def test_stopped_workers_show_their_last_collectives_if_the_coordinator_asks(asks):
    agent = Agent().running()
    agent.told(Stop(fence=FENCE, grace_s=1.0, reason="rank 2 received too much", asks_calls=asks))
    calls = (WorkerCalls(rank=0, pid=50),)
    agent.does(GroupGone(FENCE, PortOffer(6, True), calls=calls))
    [stopped] = agent.sent(Stopped)
    assert stopped.calls == (calls if asks else ())


def test_a_session_offers_a_new_port_also_while_workers_run():
    agent = Agent(linked=False)
    agent.does(Linked(PortOffer(7, True)))
    assert agent.sent(Join)[0].offer == PortOffer(7, True)
    agent.told(Assign(assignment()))
    agent.does(Unlinked("EOF"))
    agent.does(Linked(PortOffer(8, True)))
    assert agent.sent(Join)[0].offer == PortOffer(8, True)


def test_a_welcome_alone_proves_no_authority():
    agent = Agent().running()
    for _ in range(int(Timing().isolation_limit_s) + 1):
        agent.now_s += 1.0
        agent.does(Unlinked("EOF"))
        agent.does(Linked())
        agent.told(Welcome(phase="running", reason=""))
    assert agent.core.group.phase == "stopping"


def test_workers_that_have_succeeded_are_not_forgotten_in_isolation():
    agent = Agent().running()
    for rank in range(2):
        agent.does(WorkerSucceeded(FENCE, rank))
    assert agent.sent(Succeeded)
    agent.passes(2 * Timing().isolation_limit_s, answer=False)
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.state == "succeeded"


def test_a_stop_for_other_workers_is_not_obeyed():
    agent = Agent().running()
    agent.told(Stop(fence=Fence(3, 0), grace_s=1.0, reason="late"))
    assert agent.effect(StopGroup) is None


def test_a_stop_is_answered_when_nothing_is_left():
    agent = Agent().running()
    agent.told(Stop(fence=FENCE, grace_s=1.0, reason="a peer failed"))
    assert agent.effect(StopGroup) and not agent.sent(Stopped)
    agent.does(failed())
    assert not agent.sent(Failed)  # It died of being stopped.
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.sent(Stopped)[0].offer.port == 6
    assert not agent.sent(Stopped)[0].unasked


def test_an_agent_that_stopped_its_workers_unasked_says_so_despite_a_later_order():
    agent = Agent().running()
    agent.does(Unlinked("reset"))
    agent.does(Signalled("SIGTERM"))
    agent.does(Linked())
    agent.told(Stop(fence=FENCE, grace_s=0.5, reason="a peer failed"))
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.sent(Stopped)[0].unasked


def test_a_repeated_assignment_starts_the_workers_once():
    agent = Agent().running()
    agent.told(Assign(assignment()))
    assert agent.effect(StartGroup) is None


def test_a_drain_goes_through_the_workers():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="an arrival"))
    assert agent.effect(MarkGroup)
    agent.does(GroupMarked(FENCE, 1, 4))
    assert agent.sent(Marked)[0].calls == 4
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6))
    assert agent.effect(AimGroup).calls == 6
    agent.does(GroupDrained(FENCE, 1))
    assert agent.sent(Drained)


def test_a_repeated_drain_keeps_its_target():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="an arrival"))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6))
    agent.does(Unlinked("EOF"))
    agent.does(GroupDrained(FENCE, 1))
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.draining
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="going on"))
    assert agent.sent(Marked)[0].calls == 5
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6))
    assert agent.effect(AimGroup) is None and agent.sent(Drained)


def test_a_drain_that_later_stops_all_workers_asks_them_again():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="b to leave"))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6, stops=True))
    assert agent.effect(AimGroup).stops
    agent.does(GroupDrained(FENCE, 1))  # They wait; they have not saved.
    assert not agent.sent(Drained)
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=6, stops=True))
    assert agent.effect(AimGroup) is None and not agent.sent(Drained)
    agent.does(GroupDrained(FENCE, 1, stops=True))
    assert agent.sent(Drained)


@pytest.mark.parametrize("calls", [None, 7])
def test_only_workers_that_wait_at_the_target_are_asked_again(calls):
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="b to leave"))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=None if calls is None else 6))
    agent.does(GroupDrained(FENCE, 1))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=calls, stops=True))
    assert agent.effect(AimGroup) is None and agent.sent(Drained)


def test_a_signal_asks_to_leave_and_a_second_one_hurries():
    agent = Agent().running()
    agent.does(Signalled("SIGTERM"))
    assert agent.sent(Leave) and agent.effect(StopGroup) is None
    agent.does(Signalled("SIGTERM"))
    assert agent.effect(StopGroup).grace_s == 0.0
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.effect(Exit).code == 143


def test_a_notice_that_the_scheduler_repeats_shortens_no_drain():
    agent = Agent().running()
    agent.does(Signalled("SIGUSR1", may_repeat=True))
    assert agent.sent(Leave)
    agent.does(Signalled("SIGTERM", may_repeat=True))
    assert agent.effect(StopGroup) is None and not agent.sent(Leave)
    agent.does(Signalled("SIGINT"))
    assert agent.effect(StopGroup).grace_s == 0.0


def test_a_drain_that_takes_too_long_is_cut_short():
    agent = Agent().running()
    agent.does(Signalled("SIGTERM"))
    agent.passes(69.0, answer=True)
    assert agent.core.group.phase == "running"
    agent.passes(2.0, answer=True)
    assert agent.effect(StopGroup)


@pytest.mark.parametrize("how", ["away", "without authority"])
def test_a_leaving_agent_stops_its_workers_after_a_bounded_wait_for_a_coordinator(how):
    agent = Agent().running()
    agent.does(Signalled("SIGTERM"))
    if how == "away":
        agent.does(Unlinked("it was deleted"))
    agent.passes(8.0, answer=False)
    assert agent.core.group.phase == "running"
    agent.passes(3.0, answer=False)
    assert agent.effect(StopGroup).grace_s > 0.0
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.effect(Exit).code == 143


@pytest.mark.parametrize("linked", [True, False])
def test_an_agent_without_workers_leaves_at_once_or_once_released(linked):
    agent = Agent(linked=linked)
    agent.does(Signalled("SIGTERM"))
    if linked:
        assert agent.effect(Exit) is None
        agent.told(Release("drained"))
    assert agent.effect(Exit).code == 143


def test_an_agent_ends_with_the_exit_code_of_the_job():
    agent = Agent().running()
    outcome = Outcome(ok=False, reason="all restarts are used", exit_code=1)
    agent.told(Close(outcome))
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    assert agent.effect(Exit).code == 1 and agent.effect(Exit).outcome == outcome


def test_a_drain_that_the_job_does_not_answer_ends_without_workers_too():
    agent = Agent()
    agent.does(Signalled("SIGTERM"))
    assert agent.sent(Leave) and not agent.effect(Exit)
    agent.passes(3600.0, answer=True)
    assert not agent.effect(StopGroup), "there is no worker to stop"
    assert agent.effect(Exit).code == ExitCode.DRAINED
    assert "longer than it may" in agent.effect(Exit).reason
    assert agent.now_s < 120.0


def test_workers_that_had_ended_well_as_another_was_lost_report_it_of_the_next_world():
    agent = Agent().running()
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(2, True)))
    agent.does(WorkerFailed(FENCE, Failure(local_rank=0, rank=0, pid=7, exit_code=-9), 1.0))
    agent.does(GroupAble(FENCE, (), PortOffer(2, True)))
    agent.does(WorkerSucceeded(FENCE, 1))
    assert not agent.sent(Succeeded)
    after = msgspec.structs.replace(assignment(), fence=Fence(4, 0), workers=(1,), in_place=True)
    agent.told(Assign(after))
    assert [message.fence for message in agent.sent(Succeeded)] == [Fence(4, 0)]
    assert not agent.effect(RegroupWorkers)


def test_a_group_that_succeeded_runs_again_when_a_later_worker_gets_a_place():
    agent = Agent()
    first = msgspec.structs.replace(assignment(), workers=(0,))
    agent.told(Assign(first))
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(2, True)))
    agent.does(WorkerSucceeded(FENCE, 0))
    assert agent.core.group.phase == "succeeded"
    after = msgspec.structs.replace(first, fence=Fence(4, 0), workers=(1,), in_place=True)
    agent.told(Assign(after))
    assert agent.core.group.phase == "running"


def test_an_agent_tries_the_addresses_that_it_is_asked_for_and_reports_what_answers():
    agent = Agent()
    probe = Probe("10.0.0.2", 7001, 1)
    agent.told(Alive(True, (probe,)))
    assert agent.effect(TryAddresses).probes == (probe,)
    agent.does(AddressesTried((ProbeResult(probe, True),)))
    agent.passes(1.0)
    assert [beat.probed for beat in agent.sent(Heartbeat)] == [(ProbeResult(probe, True),)]
    agent.told(Alive(True))
    agent.passes(1.0)
    assert [beat.probed for beat in agent.sent(Heartbeat)] == [()], "it is no longer asked for"


def test_an_agent_tries_addresses_no_more_often_than_it_should_whatever_it_is_asked():
    agent = Agent()
    tried_s = []
    while agent.now_s < 60.0:
        number = int(agent.now_s)
        agent.told(Alive(True, (Probe("10.0.0.2", 7001, number),)))
        if found := agent.effect(TryAddresses):
            tried_s.append(agent.now_s)
            agent.does(AddressesTried(tuple(ProbeResult(p, False) for p in found.probes)))
        agent.now_s += 0.5
    assert len(tried_s) == 60 / PROBE_EVERY_S


def test_what_a_probe_found_for_another_coordinator_is_not_reported():
    agent = Agent()
    probe = Probe("10.0.0.2", 7001, 1)
    agent.told(Alive(True, (probe,)))
    agent.does(Unlinked("gone"))
    agent.does(Linked())
    agent.does(AddressesTried((ProbeResult(probe, True),)))
    agent.passes(1.0)
    assert [beat.probed for beat in agent.sent(Heartbeat)] == [()]
