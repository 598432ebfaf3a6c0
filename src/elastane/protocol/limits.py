"""The bounds that several rooms share: name, unit, default and reason, checked together.

A bound that one room uses stands in that room, as in `protocol.hangs` and `process.rpc.link`.

Durations are seconds, sizes are bytes. `Timing` holds the bounds that a user may set with
`--rdzv-conf`; the module's constants are fixed. `check` refuses a set whose bounds contradict each
other: at import for the defaults, when an agent starts for a user's.
"""

from __future__ import annotations

import math

import msgspec

# One frame of the wire protocol. The largest honest frame is a status report of 1,024 nodes, some
# 300 KB; anything larger is an attack or a bug.
FRAME_BYTES_MAX = 4 << 20
# Bytes that a peer may send before it has proved that it knows the job's secret.
HANDSHAKE_BYTES_MAX = 4 << 10
# An honest handshake is two small frames; a slower peer only occupies a descriptor.
HANDSHAKE_TIMEOUT_S = 5.0
# When as many unproven connections are open as a coordinator allows, one of this age is closed for
# the next.
UNPROVEN_TIMEOUT_S = 1.0
# Text that one worker's failure may carry: a traceback is about 4 KB.
FAILURE_TEXT_CHARS_MAX = 8 << 10
# Failures that one report may carry; a node has at most a few dozen workers.
FAILURES_MAX = 256
# Counts that cross the wire: rounds, ranks, calls of should_checkpoint(). JSON carries them
# exactly, and 64 bits hold a coordinator's increment of each.
COUNT_MAX = 1 << 53
# Text of an agent's request to leave or to end the job.
REASON_CHARS_MAX = 1000
# Characters of a job or node name: it becomes part of paths, which POSIX bounds at 255.
NAME_CHARS_MAX = 200
# Of the parts of the network that a node is in.
TOPOLOGY_CHARS_MAX = 400
# Workers of one node: more than any machine has of cores or accelerators worth a process each.
LOCAL_WORLD_SIZE_MAX = 4096
# The reconnect grace of a node whose session broke. A living agent is back after a TCP connect and
# two frames. It is short, since the survivors of a dead agent wait for it.
REJOIN_GRACE_S = 0.1
# How long to wait for the last coordinator's node once all others are back, unless its address
# refuses connections. Most likely it is dead; one that only lost its lease looks for the new
# coordinator as the others did.
HOLDER_GRACE_S = 0.5
# How long a coordinator waits before failures end the job: a report of a departure that caused the
# failures may still arrive.
VERDICT_S = 0.3
# How long a coordinator waits, after a worker lost a peer, for a report of how the peer ended.
# After that, a world that makes no step ends without a known cause.
LOST_PEER_S = 1.0
# Characters of the place where one worker waits: a collective, a file's name, a line and a
# function.
WHERE_CHARS_MAX = 200
# Workers of one node whose waiting place a heartbeat names; more names would not help a person.
WAITING_MAX = 128
# Addresses of one host.
ADDRESSES_MAX = 64
# Addresses that do not answer the workers of one node; more would not help a person.
UNANSWERED_MAX = 16
# How long a node is left out that others do not reach: the first time, and the longest. Each
# attempt to let it in stops all others for some 20 s.
LEFT_OUT_FIRST_S = 120.0
LEFT_OUT_MAX_S = 3600.0
# Addresses that one agent probes while nodes are left out, how often, and how long it waits for an
# answer. The first packet of a connection is sent again after 1 s and after 3 s.
PROBES_MAX = 4
PROBE_EVERY_S = 15.0
PROBE_TIMEOUT_S = 5.0
# The pauses between two attempts of a crash loop: the first one, and the longest.
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
# How long an agent may take, beyond the workers' own grace, to report them stopped.
STOP_MARGIN_S = 10.0
# The part of a notice's deadline that an agent keeps for its own end, or half of a shorter one: its
# workers are killed, and the memory of snapshots has a last moment to write.
NOTICE_MARGIN_S = 2.0
# The part of a leaving node's time that the coordinator keeps, or a quarter of a shorter one, so
# that its drain ends while its agent can still report.
LEAVE_MARGIN_S = 1.0
# How long the coordinator waits, after the job's end, for agents to take notice.
CLOSE_S = 5.0
# How long an agent that wants to leave waits for a coordinator to release it. If the coordinator's
# host has died, a new one is elected sooner.
LEAVE_ALONE_S = 10.0
# An agent without authority for Timing.isolation_limit_s gives its workers no longer than this to
# end, whatever --shutdown-timeout is.
ISOLATION_GRACE_S = 5.0
# The orphan reaper kills the workers of a stopped agent this long after the isolation limit. It is
# later than the end of the agent's own stop, ...
STANDSTILL_MARGIN_S = 6.0
# ... which leaves the orphan reaper this long to find and kill them, ...
STANDSTILL_SWEEP_S = 1.0
# ... before a coordinator that reaches no member of the last world stops waiting for it, although
# the clocks of two hosts may differ by this share. A quartz is wrong by less than 0.0001.
CLOCK_DRIFT_MAX = 0.03
# No isolation limit is shorter: coordinators retry their store and leaving agents wait for nearly
# as long, and no worker may be stopped meanwhile.
ISOLATION_LIMIT_MIN_S = 15.0
# The orphan reaper reads its deadline this often, since a suspended host delays its timer.
STANDSTILL_LOOK_S = 1.0
# One operation on a store; NFS and a dead server would otherwise block for minutes.
STORE_TIMEOUT_S = 5.0
# How long a coordinator retries to make one decision durable before it gives up leadership: the
# members of an etcd that lost its leader elect another in about two seconds.
SAVE_TIMEOUT_S = 10.0
# How often a watcher or a candidate polls the file store. Take-over after a SIGKILL of the holder
# costs the lease's time and at most 0.3 s with it.
STORE_POLL_S = 0.1
# This many nodes may poll a store every STORE_POLL_S without a noticeable load.
STORE_CROWD = 8
# A coordinator with too few nodes for a world steps down after this long: the lost nodes may reach
# each other and the store. Longer than the restart of a node, for which no other coordinator is
# needed.
STEP_DOWN_S = 5.0
# The pause after stepping down; others poll each STORE_POLL_S, or each second in a large job.
STEP_DOWN_PAUSE_S = 2.0
# How long the record of an ended job stays in a store with a server: an agent that a scheduler
# starts again just after the end must learn of it, and not begin the job again.
OUTCOME_KEPT_S = 900.0
# The share of a lease's time by which its holder stops deciding early: covers clocks that run at
# different speeds.
LEASE_MARGIN = 0.1
# A candidate ends a lease of at most this long if the holder's address refuses connections. If the
# holder is alive and reaches no store, it may confirm its authority for this long, which
# Timing.fence_wait_s covers. A longer lease has to run out. (Kubernetes has the longest default.)
ENDED_LEASE_S = 3.0


def look_s(nodes: int, longest_s: float) -> float:
    """Return the interval at which each of `nodes` polls a store that all of them poll.

    A thousand nodes that polled as often as eight would keep the store busy, which serves other
    jobs too. One of a thousand nodes still polls within milliseconds.
    """
    return max(STORE_POLL_S, min(STORE_POLL_S * nodes / STORE_CROWD, longest_s))


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The durations that a job may set, in seconds; every node of a job has the same ones.

    Where torchrun has the same bound, the comment compares the defaults.
    """

    # Too few nodes for this long ends the job; torchrun's join_timeout.
    join_timeout_s: float = 600.0
    # The same after a departure, and without a coordinator; 0: join_timeout_s.
    rejoin_timeout_s: float = 0.0
    # With the minimum present, wait this long after the latest arrival for more, ...
    last_call_s: float = 3.0
    # ... but never longer than this in all; torchrun always waits 30 s.
    last_call_max_s: float = 30.0
    # Arrivals at a running job are gathered this long after the latest, ...
    gather_s: float = 1.0
    # ... and at most this long, so that five arrivals are one change.
    gather_max_s: float = 5.0
    # How often an agent and its coordinator exchange heartbeats.
    heartbeat_s: float = 1.0
    # A peer that was silent for this long counts as dead.
    silence_s: float = 3.0
    # Workers may take this long to checkpoint before a planned change.
    drain_timeout_s: float = 30.0
    # All workers of an unmodified script restart no sooner than this after their last start, to
    # add workers and nodes that wait. A node that comes and goes costs one restart in that time.
    # Doubled while such restarts fail.
    growth_interval_s: float = 60.0
    # SIGTERM to SIGKILL, wherever workers are stopped; torchrun's --shutdown-timeout.
    shutdown_timeout_s: float = 30.0
    # An attempt that failed sooner than this counts towards a crash loop; from the second in a row
    # there is a pause; 0 for none.
    crash_loop_s: float = 3.0
    # An attempt that failed sooner than this, in the same way as the last one (`Crash`), counts
    # towards SAME_CRASHES_MAX; 0 for never. A longer life counts only if the same number of steps
    # shows, since a script whose steps do not show may have made others.
    same_crash_s: float = 60.0
    # No worker counts as hanging sooner than this: a shared disk may take seconds to answer, and a
    # hang costs a restart of the budget.
    hang_floor_s: float = 20.0
    # A worker whose process group is not aborted after this is killed: it could enter no other
    # world, and the others wait for it. (NCCL took 0.3 to 0.6 s.)
    abort_limit_s: float = 1.5
    # A worker whose program an error has ended is killed if its process lives on for this long: the
    # others wait for it. An exit handler may save a state or upload a log meanwhile.
    error_exit_limit_s: float = 60.0
    # A new coordinator waits this long for the agents of the last world.
    reregister_s: float = 2.0
    # A lease on the store is void this long after its last renewal, ...
    lease_ttl_s: float = 2.0
    # ... and is renewed this often.
    lease_renew_s: float = 0.5
    # An agent of a job with a store stops its workers after this long without authority: another
    # side may have formed a world by then. Longer than a minute's outage of the store.
    isolation_limit_s: float = 120.0

    @property
    def lost_wait_s(self) -> float:
        """How long a job that has trained waits for nodes that it lost, or for its coordinator."""
        return self.rejoin_timeout_s or self.join_timeout_s

    @property
    def standstill_limit_s(self) -> float:
        """How long after the last proof of authority the orphan reaper lets workers train."""
        return self.isolation_limit_s + STANDSTILL_MARGIN_S

    @property
    def fence_wait_s(self) -> float:
        """How long a coordinator waits for a world of which it reaches no member: 138 by default.

        By then its workers are dead, by the clock of a host that runs slower than this one.
        """
        slowest_s = self.standstill_limit_s / (1 - CLOCK_DRIFT_MAX)
        return math.ceil((slowest_s + STANDSTILL_SWEEP_S + ENDED_LEASE_S) * (1 + CLOCK_DRIFT_MAX))


# A grace of 0 is SIGKILL at once, a crash loop of 0 never pauses, and so on.
_MAY_BE_ZERO = (
    "growth_interval_s",
    "shutdown_timeout_s",
    "crash_loop_s",
    "same_crash_s",
    "rejoin_timeout_s",
)
# Bounds that constrain each other: (small, large, factor, why) demands small * factor <= large.
PAIRS = (
    ("heartbeat_s", "silence_s", 2.0, "one lost heartbeat must not be a death"),
    ("lease_renew_s", "lease_ttl_s", 2.0, "one late renewal must not lose the lease"),
    ("last_call_s", "last_call_max_s", 1.0, "the bound of all last calls covers one"),
    ("gather_s", "gather_max_s", 1.0, "the bound of all gathering covers one arrival"),
    ("last_call_max_s", "join_timeout_s", 1.0, "a last call must end before the job gives up"),
    ("silence_s", "isolation_limit_s", 2.0, "the election of a coordinator must stop no worker"),
    ("lease_ttl_s", "isolation_limit_s", 2.0, "the election of a coordinator must stop no worker"),
)


def check(timing: Timing) -> list[str]:
    """Return the contradictions in `timing`, a sentence each; empty if it is sound."""
    faults = [
        f"{field} = {value:g} s: must be positive"
        for field in timing.__struct_fields__
        if field not in _MAY_BE_ZERO and not (value := getattr(timing, field)) > 0  # nor NaN
    ]
    faults += [
        f"{field} = {value:g} s: must not be negative"
        for field in _MAY_BE_ZERO
        if not (value := getattr(timing, field)) >= 0
    ]
    if not timing.isolation_limit_s >= ISOLATION_LIMIT_MIN_S:
        faults.append(
            f"isolation_limit_s = {timing.isolation_limit_s:g} s: must be at least"
            f" {ISOLATION_LIMIT_MIN_S:g} s: a store that elects another leader may be away for that"
            " long"
        )
    for small, large, factor, why in PAIRS:
        a, b = getattr(timing, small), getattr(timing, large)
        if a * factor > b:
            faults.append(f"{small} = {a:g} s needs {large} >= {a * factor:g} s, got {b:g}: {why}")
    return faults


assert not check(Timing()), check(Timing())
# The agent stops its workers before the orphan reaper would.
assert ISOLATION_GRACE_S < STANDSTILL_MARGIN_S
assert Timing().lease_ttl_s <= ENDED_LEASE_S
# A group that starts gets a deadline that the orphan reaper has read before it passes.
assert STANDSTILL_LOOK_S < STANDSTILL_MARGIN_S
assert Timing().silence_s + Timing().lease_ttl_s < LEAVE_ALONE_S < ISOLATION_LIMIT_MIN_S
assert REJOIN_GRACE_S < VERDICT_S < Timing().silence_s
assert Timing().reregister_s > HOLDER_GRACE_S
assert VERDICT_S < LOST_PEER_S
assert STORE_TIMEOUT_S < SAVE_TIMEOUT_S < ISOLATION_LIMIT_MIN_S
assert UNPROVEN_TIMEOUT_S < HANDSHAKE_TIMEOUT_S
