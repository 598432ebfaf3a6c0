"""A membership for programs with their own workers: places, changes, ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from jobs import until
from ports import free_port

from elastane.agent.membership import MemberConfig, MemberPlace, Membership
from elastane.agent.membership_agent import MembershipAgent
from elastane.errors import (
    JobClosedError,
    JoinTimeoutError,
    MembershipError,
    RendezvousRefusedError,
)
from elastane.process.endpoint import Endpoint
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobSpec
from elastane.stores.file import FileStore

LED = Path(__file__).parent / "scripts" / "member_process.py"
WAIT_S = 90.0
# Two nodes of two meet at once, however late the second comes on a busy machine; one of two soon.
QUICK, ALONE = Timing(last_call_s=10.0, gather_s=0.2), Timing(last_call_s=0.3, gather_s=0.2)
# With these, what is learned within AT_ONCE_S was not learned from silence.
PATIENT = Timing(last_call_s=10.0, gather_s=0.2, silence_s=60.0)
AT_ONCE_S = PATIENT.silence_s / 2


class Cluster:
    """Memberships of one job in this process, each call in a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.made: list[Membership] = []
        self.processes: list[subprocess.Popen[str]] = []
        self._pool = pool

    def new(
        self, nodes: tuple[int, int] = (2, 2), timing: Timing = QUICK, **more: object
    ) -> Membership:
        name = f"node{len(self.made)}"
        spec = JobSpec(
            job="led", min_nodes=nodes[0], max_nodes=nodes[1], max_restarts=100, timing=timing
        )
        config = MemberConfig(spec=spec, endpoint=self.endpoint, **more)  # type: ignore[arg-type]
        self.made.append(Membership(config, lambda: f"{name}-{time.monotonic_ns()}"))
        return self.made[-1]

    def run(self, call: Callable[[], object]) -> Future[object]:
        return self._pool.submit(call)

    def all_of(self, *calls: Callable[[], object]) -> list:
        futures = [self.run(call) for call in calls]
        return [future.result(WAIT_S) for future in futures]

    def host(self, membership: Membership) -> Future[object]:
        """Let this node join first, so that the coordinator is in this process."""
        joining = self.run(membership.join)
        self.wait_served()
        return joining

    def wait_served(self) -> None:
        """Wait until a node serves the coordinator."""
        address = (self.endpoint.host, self.endpoint.port)
        until(lambda: _answers(address), "a coordinator is there")

    def process(self, nodes: str = "2:2", timing: Timing = QUICK) -> subprocess.Popen[str]:
        words = self.endpoint.port, nodes, timing.last_call_s, timing.silence_s
        led = subprocess.Popen(
            [sys.executable, str(LED), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(led)
        assert led.stdout is not None and led.stdout.readline() == "ready\n"
        return led


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ThreadPoolExecutor(16) as pool:
        made = Cluster(pool)
        yield made
        for membership in made.made:
            membership.leave()
        for led in made.processes:
            led.kill()
            led.communicate()


def say(led: subprocess.Popen[str], word: str) -> None:
    assert led.stdin is not None
    led.stdin.write(f"{word}\n")
    led.stdin.flush()


def hear(led: subprocess.Popen[str]) -> str:
    assert led.stdout is not None
    return led.stdout.readline().strip()


def wait_changed(membership: Membership, within_s: float = WAIT_S) -> str:
    assert membership.wait_change(within_s), "no change was told"
    return membership.change


def test_all_get_a_place_after_the_store_of_rank_0_listens(
    cluster: Cluster,
) -> None:
    a, b = cluster.new(), cluster.new()
    places = sorted(cluster.all_of(a.join, b.join), key=lambda place: place.node_rank)
    assert [(p.node_rank, p.nodes) for p in places] == [(0, 2), (1, 2)]
    assert places[0].listener is not None and places[1].listener is None
    where = places[1].assignment
    assert places[0].listener.getsockname()[1] == where.master_port
    socket.create_connection((where.master_addr, where.master_port), WAIT_S).close()
    assert not a.has_changed and not b.has_changed


def test_a_failure_of_one_ends_the_world_of_all_and_the_next_attempt_has_another_port(
    cluster: Cluster,
) -> None:
    a, b = cluster.new(), cluster.new()
    first: MemberPlace = cluster.all_of(a.join, b.join)[0]
    again = cluster.run(lambda: a.join("boom"))
    assert "exit code 1" in wait_changed(b)
    second = cluster.all_of(b.join)[0]
    assert again.result(WAIT_S) is not None
    fence = second.assignment.fence
    assert (fence.round, fence.attempt) == (first.assignment.fence.round, 1)
    assert second.assignment.master_port != first.assignment.master_port
    assert not a.has_changed and not b.has_changed


def test_heartbeats_continue_between_calls(cluster: Cluster) -> None:
    quick = Timing(last_call_s=0.3, heartbeat_s=0.2, silence_s=1.5)
    a, b = cluster.new(timing=quick), cluster.new(timing=quick)
    cluster.all_of(a.join, b.join)
    assert not a.wait_change(2 * quick.silence_s)
    assert not b.has_changed


def test_a_killed_process_departs_at_once_and_the_others_continue(cluster: Cluster) -> None:
    a, dying = cluster.new((1, 2), PATIENT), cluster.process("1:2", PATIENT)
    joining = cluster.host(a)
    say(dying, "join")
    place = joining.result(WAIT_S)
    assert hear(dying).split()[1] == "2"
    begun = time.monotonic()
    dying.kill()
    assert "departed" in wait_changed(a)
    after = a.join()
    assert time.monotonic() - begun < AT_ONCE_S
    assert isinstance(place, MemberPlace) and after.nodes == 1
    assert after.assignment.fence.round == place.assignment.fence.round + 1


def test_a_process_that_exits_leaves_at_once(cluster: Cluster) -> None:
    a, ending = cluster.new((1, 2)), cluster.process("1:2")
    joining = cluster.host(a)
    say(ending, "join")
    joining.result(WAIT_S)
    say(ending, "end")
    assert "stopped its workers by itself" in wait_changed(a)
    assert ending.wait(WAIT_S) == 0
    assert a.join().nodes == 1


def test_an_arrival_is_a_change_and_a_node_that_leaves_is_one(cluster: Cluster) -> None:
    a, b = cluster.new((1, 2), ALONE), cluster.new((1, 2), ALONE)
    assert a.join().nodes == 1
    arriving = cluster.run(b.join)
    assert "adding workers of" in wait_changed(a)
    assert a.join().nodes == 2
    arriving.result(WAIT_S)
    b.leave()
    wait_changed(a)
    assert a.join().nodes == 1


def test_a_surplus_node_waits_and_replaces_one_that_leaves(cluster: Cluster) -> None:
    a, b, spare = (cluster.new() for _ in range(3))
    cluster.all_of(a.join, b.join)
    waiting = cluster.run(spare.join)
    a.leave()
    wait_changed(b)
    assert cluster.all_of(b.join)[0].nodes == 2
    assert isinstance(waiting.result(WAIT_S), MemberPlace)


def test_finish_waits_until_all_nodes_have_finished(cluster: Cluster) -> None:
    a, b = cluster.new(), cluster.new()
    cluster.all_of(a.join, b.join)
    first = cluster.run(a.finish)
    assert not b.wait_change(0.5)
    assert not first.done()
    assert cluster.all_of(b.finish)[0].ok
    assert first.result(WAIT_S).ok
    with pytest.raises(JobClosedError, match=r"all 2 workers .* succeeded"):
        a.join()


def test_a_failure_after_another_node_finished_ends_a_fixed_job(cluster: Cluster) -> None:
    a, b = cluster.new(), cluster.new()
    cluster.all_of(a.join, b.join)
    finishing = cluster.run(a.finish)
    with pytest.raises(JobClosedError, match="cannot start again"):
        b.join("boom")
    assert not finishing.result(WAIT_S).ok


def test_closing_with_a_failure_ends_all_nodes_at_once(cluster: Cluster) -> None:
    a, b = cluster.new(timing=PATIENT), cluster.new(timing=PATIENT)
    cluster.all_of(a.join, b.join)
    begun = time.monotonic()
    closing = cluster.run(lambda: a.close(False, "its restarts are used up"))
    assert "restarts are used up" in wait_changed(b)
    assert time.monotonic() - begun < AT_ONCE_S
    with pytest.raises(JobClosedError, match="restarts are used up"):
        b.join()
    assert closing.result(WAIT_S) is True
    with pytest.raises(JobClosedError):
        a.join()


def test_closing_with_success_leaves_the_others_time_to_finish(cluster: Cluster) -> None:
    a, b = cluster.new(close_grace_s=3.0), cluster.new(close_grace_s=3.0)
    cluster.all_of(a.join, b.join)
    closing = cluster.run(lambda: a.close(True, "done"))
    until(b.has_ended, "b hears of it")
    assert not b.wait_change(0.4)
    assert b.wait_change(WAIT_S)
    with pytest.raises(JobClosedError):
        b.join()
    assert closing.result(WAIT_S) is True


def test_too_few_nodes_are_counted(cluster: Cluster) -> None:
    timing = Timing(join_timeout_s=0.5, last_call_s=0.1, last_call_max_s=0.2)
    with pytest.raises(JoinTimeoutError, match=r"1 of at least 2 nodes joined within 0\.5 s"):
        cluster.new(timing=timing).join()


def test_a_node_of_another_shape_is_refused(cluster: Cluster) -> None:
    a = cluster.new((1, 2), ALONE)
    a.join()
    with pytest.raises(RendezvousRefusedError, match="max_nodes"):
        cluster.new((1, 3), ALONE).join()
    assert not a.has_changed


def test_a_coordinator_that_dies_while_others_join_is_replaced(cluster: Cluster) -> None:
    host = cluster.process("2:2")
    say(host, "join")
    cluster.wait_served()
    a, b = cluster.new(), cluster.new()
    host.send_signal(signal.SIGSTOP)
    joining = [cluster.run(a.join), cluster.run(b.join)]
    host.kill()
    assert {future.result(WAIT_S).nodes for future in joining} == {2}


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True


def test_the_host_of_the_coordinator_may_die_in_a_running_world(cluster: Cluster) -> None:
    host, a, b = cluster.process("2:3"), cluster.new((2, 3)), cluster.new((2, 3))
    say(host, "join")
    cluster.wait_served()
    before = cluster.all_of(a.join, b.join)[0]
    hear(host)
    host.kill()
    for survivor in (a, b):
        wait_changed(survivor)
    after = cluster.all_of(a.join, b.join)
    assert {place.nodes for place in after} == {2}
    assert after[0].assignment.fence > before.assignment.fence


def test_a_close_survives_the_coordinator_that_received_it(cluster: Cluster) -> None:
    host, a, b = cluster.process("2:3"), cluster.new((2, 3)), cluster.new((2, 3))
    say(host, "join")
    cluster.wait_served()
    cluster.all_of(a.join, b.join)
    hear(host)
    host.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, host.pid, os.WSTOPPED)  # A thread of it might still answer.
    closing = cluster.run(lambda: a.close(False, "its restarts are used up"))
    assert not b.wait_change(0.3)
    host.kill()
    until(lambda: b.outcome is not None, "b hears of it by another coordinator")
    assert "restarts are used up" in b.outcome.reason
    b.leave()
    assert closing.result(WAIT_S) is True


def test_an_interrupted_join_leaves_and_the_next_one_joins(cluster: Cluster) -> None:
    a, b = cluster.new(), cluster.new()

    def interrupt() -> None:
        cluster.wait_served()  # by the join of `a`, which waits for another node
        os.kill(os.getpid(), signal.SIGINT)

    cluster.run(interrupt)
    with pytest.raises(KeyboardInterrupt):
        a.join()
    assert a.place is None
    meeting = cluster.run(b.join)
    done, _ = wait([meeting], timeout=0.5)
    assert not done, "b met one who had gone"
    assert cluster.all_of(a.join)[0].nodes == meeting.result(WAIT_S).nodes == 2


def test_a_forked_child_is_no_member_and_does_not_hide_its_parents_death(cluster: Cluster) -> None:
    a, parent = cluster.new((1, 2), PATIENT), cluster.process("1:2", PATIENT)
    joining = cluster.host(a)
    say(parent, "join")
    joining.result(WAIT_S)
    hear(parent)
    say(parent, "fork")
    slug, child = hear(parent).split()
    assert slug == "membership-forked"
    begun = time.monotonic()
    parent.kill()
    wait_changed(a)
    assert time.monotonic() - begun < AT_ONCE_S
    os.kill(int(child), signal.SIGKILL)


def test_an_error_of_the_thread_is_logged_and_raised(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = cluster.new((1, 1))
    a.join()
    monkeypatch.setattr(MembershipAgent, "_perform", lambda *_: 1 / 0)
    assert wait_changed(a) == "the membership has ended"
    with pytest.raises(ZeroDivisionError):
        a.join()


def test_a_closed_job_in_a_store_refuses_later_nodes(cluster: Cluster, tmp_path: Path) -> None:
    def in_folder() -> Membership:
        return cluster.new((1, 1), open_store=lambda: FileStore(tmp_path / "store"))

    a = in_folder()
    assert not in_folder().has_ended()
    a.join()
    a.finish()
    late = in_folder()
    assert late.has_ended()
    with pytest.raises(JobClosedError):
        late.join()


def test_a_store_that_is_away_is_raised_by_the_call_that_needs_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    away = cluster.new((1, 1), open_store=lambda: FileStore(tmp_path / "file" / "store"))
    with pytest.raises(Exception, match="file") as caught:
        away.join()
    assert getattr(caught.value, "slug", "") == "store-unreachable"


def test_finish_without_a_place_is_refused(cluster: Cluster) -> None:
    with pytest.raises(MembershipError, match="without a place"):
        cluster.new().finish()


def test_an_unreferenced_membership_leaves(cluster: Cluster) -> None:
    a, dropped = cluster.new((1, 2)), cluster.new((1, 2))
    cluster.all_of(a.join, dropped.join)
    cluster.made.remove(dropped)
    del dropped
    wait_changed(a)
    assert a.join().nodes == 1


def test_no_thread_is_left_by_jobs_that_ended(cluster: Cluster) -> None:
    a, b = cluster.new(), cluster.new()
    cluster.all_of(a.join, b.join)
    cluster.all_of(a.finish, b.finish)
    mine = [t for t in threading.enumerate() if t.name.startswith("elastane-member-node")]
    until(lambda: not any(t.is_alive() for t in mine), "the threads end")
