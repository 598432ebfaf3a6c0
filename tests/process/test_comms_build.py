"""A world can be aborted while it is built; it leaves nothing and cuts no other connection."""

import pytest
from comms_bodies import TIMEOUT_S
from comms_crew import Crew

# As in test_comms_abort.
OUT_S = TIMEOUT_S / 2


@pytest.mark.parametrize("peer", ["silent", "dead", "stopped"])
def test_aborting_ends_a_construction_that_waits_for_a_lost_member(peer, record_property):
    """Silent: it never reaches the store. Dead: its port is closed. Stopped: it never accepts."""
    with Crew(1, "builds_with", peer) as crew:
        outcomes = [crew.hear(0) for _ in range(4)]
        # The kernel takes connections for a stopped member: then only operations wait for it.
        allowed = {"group-not-built", "built"} if peer == "stopped" else {"group-not-built"}
        assert {slug for slug, _ in outcomes} <= allowed
        record_property("out_ms", [round(1000 * took, 1) for _, took in outcomes])
        assert max(took for _, took in outcomes) < OUT_S
        assert crew.hear(0) is True, "a construction that was given up did not end"


def test_two_hundred_worlds_leave_no_descriptor_thread_or_memory_behind():
    with Crew(2, "rebuilds", 200) as crew:
        for first, last in crew.hear_all():
            assert last[:2] == first[:2]
            assert last[2] - first[2] < 8 << 20, (first, last)


def test_connections_of_the_users_own_threads_are_never_cut():
    with Crew(2, "user_sockets", 60) as crew:
        for faults, rounds in crew.hear_all():
            assert not faults, faults[:3]
            assert min(rounds) > 5, rounds
