"""Every bound of the control plane: name, unit, default and reason, checked against each other.

Durations are seconds, sizes are bytes. `Timing` holds the bounds that a user may set through
`--rdzv-conf`; the module's constants are fixed. `check` refuses a set whose bounds contradict
one another, at import for the defaults and at the door for a user's.
"""

from __future__ import annotations

import msgspec

# One frame of the wire protocol. The largest honest frame is a status reply about 1,024 nodes,
# some 300 KB; anything larger is an attack or a bug.
FRAME_BYTES_MAX = 4 << 20
# What a peer may send before it has proved that it knows the job's secret.
HANDSHAKE_BYTES_MAX = 4 << 10
# An honest handshake is two small frames; a peer that needs longer holds a descriptor for nothing.
HANDSHAKE_TIMEOUT_S = 5.0
# Connections that have not proved it yet, at once; more wait in the kernel's backlog. An honest
# handshake takes about a millisecond, so 1,024 agents pass through this in a second.
UNPROVEN_MAX = 256
# At that bound, one that has been there for this long makes room for the next.
UNPROVEN_TIMEOUT_S = 1.0
# Sessions of one coordinator; sixteen times the largest job that was measured.
SESSIONS_MAX = 16_384
# Descriptors that a coordinator leaves to the agent it runs in, for pidfds, logs and pipes.
DESCRIPTORS_SPARED = 128
# Bytes that wait for a peer that does not read, before it is cut; holds the largest frame twice.
SEND_BYTES_MAX = 8 << 20
# A peer for which bytes have waited in this process for so long, without a break, is cut.
SEND_STALL_S = 10.0
# Received bytes that wait for their turn; beyond, the session is not read any further.
INBOX_BYTES_MAX = 64 << 10
# What one session may ask of the coordinator; an honest agent sends about one message a second,
# and a few dozen at once when its workers fail.
MESSAGES_PER_S_MAX = 100.0
MESSAGES_BURST_MAX = 400
# Sent bytes that a peer's kernel leaves unacknowledged for this long break the connection; the
# backstop of heartbeats, which notice in a few seconds.
TCP_USER_TIMEOUT_S = 20.0
# Notes about refused connections in one such interval; the rest are counted.
REFUSAL_NOTES_MAX = 10
REFUSAL_NOTES_INTERVAL_S = 10.0
# Text that one worker's failure may carry: a traceback is about 4 KB.
FAILURE_TEXT_CHARS_MAX = 8 << 10
# Failures of which all agents are told at the job's end, and the text that each of them carries
# beyond the first ones: 64 KB to each agent at most, once.
OUTCOME_FAILURES_MAX = 64
OUTCOME_FAILURES_WHOLE = 4
OUTCOME_FAILURE_CHARS_MAX = 500
# Failures that one report may carry; a node has at most a few dozen workers.
FAILURES_MAX = 256
# Counts that cross the wire: rounds, ranks, calls of should_checkpoint(). JSON carries them
# exactly, and 64 bits hold the one more that a coordinator makes of each.
COUNT_MAX = 1 << 53
# Rounds beyond this are nobody's: one a second for 34 years, as of the highest that is believed.
ROUND_MAX = 1 << 30
# Text of an agent's wish to leave or to end the job, as it is kept and told.
REASON_CHARS_MAX = 1000
# Characters of a job or node name: it becomes part of paths, which POSIX bounds at 255.
NAME_CHARS_MAX = 200
# Workers of one node: more than any machine has of cores or accelerators worth a process each.
LOCAL_WORLD_SIZE_MAX = 4096
# A session that broke may come back as quickly as a TCP connect and two frames; until then its
# node is not yet a departure. Short, since a dead agent's broken session must count at once.
REJOIN_GRACE_S = 0.1
# The node of a coordinator that was followed by another has so long to come back, once all others
# have: dead it most likely is, but one that only lost its lease looks for the seat as they did.
HOLDER_GRACE_S = 0.5
# A second agent with a node id that is in use has it once the first was silent for this long.
CONTEST_S = 1.0
# Before a job is ended for its failures, evidence of a departure that caused them may come.
VERDICT_S = 0.3
# A worker that lost a peer waits for the news of what became of it; after that a world that makes
# no step is ended without a cause.
LOST_PEER_S = 1.0
# Workers that recover in place are looked at this often for signs of progress ...
HANG_LOOK_S = 0.25
# ... and asked whether they wait for others once they have shown none for this long, again each
# such time; who does not answer within the second is held to be busy.
HANG_ASK_S = 0.5
HANG_ANSWER_S = 1.0
# One that a signal has stopped (state T; not a debugger's t) hangs, whatever it was at.
HANG_STOPPED_S = 1.0
# Nobody else hangs before Timing.hang_floor_s, nor before this many times of what the same work
# took at the longest, of late; ...
HANG_FACTOR = 10.0
HANG_WINDOW_S = 1800.0
# ... and everybody does after this: torch gives up a collective over gloo then. It is the limit
# too for a process's first steps, which warm up and compile, and for all compilation.
HANG_CEILING_S = 1800.0
HANG_STEPS_FIRST = 3
# What users do between two steps (evaluation, checkpoints) may take as long as this.
HANG_BETWEEN_S = 3600.0
# Members that all wait for one another in a collective, while no byte moves between them and nobody
# is busy. A network's hiccup may well take seconds. Where bytes cannot be counted (NCCL), this is
# the floor of what is learned from earlier waits.
HANG_STALL_S = 10.0
# Characters of where one worker waits: a collective, a file's name, a line and a function.
WHERE_CHARS_MAX = 200
# Workers of one node of which a heartbeat says where they wait; more do not make it clearer.
WAITING_MAX = 128
# Members that all wait to meet, while nobody is missing, cannot reach one another.
HANG_ENTER_S = 120.0
# A worker that hangs is asked for its stack by SIGABRT, and killed after this; one that SIGKILL
# does not end within the same time again is told as failed while it lives.
HANG_STACK_S = 0.5
# So many worlds in a row whose members only wait for one another, without a step between: their
# machines do not let them connect, and no further world will.
STALLS_MAX = 3
# The longest pause between two attempts of a crash loop, and the first.
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
# What an agent may take beyond the workers' own grace to report them stopped.
STOP_MARGIN_S = 10.0
# How long the coordinator waits, after the job's end, for agents to take notice.
CLOSE_S = 5.0
# An agent that is to leave waits so long for a coordinator that can let it go, and which another
# follows sooner if its host has died.
LEAVE_ALONE_S = 10.0
# An agent of a store-backed job that has heard of no authority for this long stops its workers:
# another side may have formed a world by then. Longer than a minute's outage of the store.
ISOLATION_LIMIT_S = 120.0
# ... and gives them no longer than this to end, however long --shutdown-timeout is.
ISOLATION_GRACE_S = 5.0
# The warden kills the workers of an agent that stands still once authority was confirmed this long
# ago. Later than the agent's own stop ends, ...
STANDSTILL_LIMIT_S = 126.0
# ... which leaves the warden this long to find and kill them, ...
STANDSTILL_SWEEP_S = 1.0
# ... before a coordinator that reaches no member of the last world stops waiting for it, ...
FENCE_WAIT_S = 135.0
# ... though clocks of two hosts run at speeds that differ by this share from the true one. A
# quartz is wrong by less than 0.0001.
CLOCK_DRIFT_MAX = 0.03
# The warden reads its deadline this often, since a suspended host delays its timer.
STANDSTILL_LOOK_S = 1.0
# A store's value: the record of 1,024 nodes is some 120 KB; etcd refuses more than 1.5 MiB.
STORE_VALUE_BYTES_MAX = 1 << 20
STORE_KEY_CHARS_MAX = 512
# One operation on a store; NFS and a dead server would otherwise block for minutes.
STORE_TIMEOUT_S = 5.0
# A coordinator tries for so long to make one decision durable before it gives its seat up: members
# of an etcd that lost its leader elect another in two seconds or so.
SAVE_TIMEOUT_S = 10.0
# A coordinator that lost so many nodes that no world can be formed gives up its seat after this
# long: those that it does not reach may reach each other, and the store. Longer than a restart of
# a node, which is nothing to move a coordinator for.
STEP_DOWN_S = 5.0
# How often a watcher or a candidate of the file store looks: with it, take-over after a SIGKILL
# of the holder costs the lease's time and at most 0.3 s.
STORE_POLL_S = 0.1
# A store answers the looks of so many, each STORE_POLL_S, without noticing.
STORE_CROWD = 8
# How long the record of a job that ended stays in a store with a server of its own: an agent that
# a scheduler starts again just after the end must be told of it, and not begin the job anew.
OUTCOME_KEPT_S = 900.0
# The share of a lease's time after which its holder stops deciding before anybody may take it:
# covers clocks that run at different speeds.
LEASE_MARGIN = 0.1
# Blocking calls of one process that may hang at a time (each holds a thread) before more fail.
OFFLOAD_THREADS_MAX = 8
# One look-up of a name; the resolver's own default is 5 s a server and two tries.
RESOLVE_TIMEOUT_S = 10.0
# A checkpoint's file: 1 PiB, far beyond any. A record that says more is garbage, and is refused
# before anything is allocated for it.
CHECKPOINT_FILE_BYTES_MAX = 1 << 50
# Files of one checkpoint: 16 for each of the 16,384 sessions that a coordinator takes.
CHECKPOINT_FILES_MAX = 1 << 18
# Writers of one checkpoint, one a node; names of parts have five digits.
CHECKPOINT_PARTS_MAX = 100_000
# A manifest: 36 bytes for each 16 MiB, so this is of 28 TiB; an object store takes it in one put.
CHECKPOINT_RECORD_BYTES_MAX = 64 << 20
# Tensors of one state, the pieces into which they are cut (of 4 MiB, so 16 TiB), and dimensions of
# one tensor, which is torch's own bound.
CHECKPOINT_TENSORS_MAX = 1 << 20
CHECKPOINT_PIECES_MAX = 1 << 22
CHECKPOINT_DIMENSIONS_MAX = 64
# A save without a manifest to which nothing was written for this long is of writers that died. One
# put to a slow store may take minutes, and while it lasts nothing is seen of it.
CHECKPOINT_LITTER_S = 3600.0
# Between two looks for the other writers' records: the first, and the longest. A look costs a
# fraction of a millisecond on a disk, and a request on an object store.
CHECKPOINT_POLL_S = 0.01
CHECKPOINT_POLL_MAX_S = 0.5
# Checkpoints by the clock are no more frequent than this, whatever they cost, ...
CHECKPOINT_INTERVAL_MIN_S = 10.0
# ... and no rarer: estimates of what is rare are poor, and nobody likes to lose an hour.
CHECKPOINT_INTERVAL_MAX_S = 1800.0
# Where saves are due more often than storage takes them, it is written so much of the time, or a
# little more: that slows the steps beside it (an optimizer's, bound by memory, by an eighth), ...
CHECKPOINT_WRITING_SHARE = 0.0625
# ... but it rests no longer than this: what a slow storage takes is not made rarer.
CHECKPOINT_REST_MAX_S = 10.0
# Before anything has failed, a job is taken to be one that fails once a day: between the 3 hours of
# Llama 3's 16,384 GPUs and the weeks of one machine.
CHECKPOINT_MTBF_S = 86_400.0

# What one worker may ask of its keeper in one message: a state's small files, of which a tree of
# many thousand tensors and what is no tensor take a few megabytes each.
KEEPER_FRAME_BYTES_MAX = 128 << 20
# So a reader refuses a small file of a checkpoint that is larger, before it reads any of it.
CHECKPOINT_SMALL_BYTES_MAX = KEEPER_FRAME_BYTES_MAX
# ... and what it may be answered: all whole snapshots' small files together.
KEEPER_ANSWER_BYTES_MAX = 1 << 30
# Slots of one worker: three are enough, see snapshots/rules/snapshots.py.
KEEPER_SLOTS_MAX = 16
# Connections of one keeper; each is a thread that sleeps.
KEEPER_CONNECTIONS_MAX = 1024
# Groups of workers with states of their own; a job has one, or a few.
KEEPER_GROUPS_MAX = 64
# What a worker may send before it has said who it is.
KEEPER_HELLO_BYTES_MAX = 32 << 10
# Layouts that no snapshot refers to (yet) are kept up to this number: one a worker is sent first.
KEEPER_LAYOUTS_MAX = 64
# Failures that a keeper remembers for whoever waits for one of them.
KEEPER_FAILURES_MAX = 8
# A keeper answers at once, unless its host swaps or it was stopped.
KEEPER_ANSWER_S = 30.0
# ... but for new slots: the host backs memory that was never used at a third of a GB a second.
KEEPER_SLOTS_S = 600.0
# A save waits so long for a keeper that does not answer, once for each silence. Then saves are
# dropped until it does: steps of a few tenths of a second are common, and this is not to be many.
KEEPER_PATIENCE_S = 0.5
# What a keeper stands still for in the middle of a message that a worker sends; once.
KEEPER_SAY_S = 5.0
# The agent looks this often whether a signal has stopped its keeper, ...
KEEPER_LOOK_S = 1.0
# ... and replaces one that has been stopped at each look for so long: nobody can save meanwhile.
KEEPER_STOPPED_S = 5.0
# A peer in the middle of a message has so long for the rest of it.
KEEPER_STALL_S = 30.0
# All workers of a node are gone for this long before what they saved last is written to storage:
# workers that are started anew are there before that, and go on.
KEEPER_RETURN_S = 5.0
# A keeper whose agent is gone, or is to go, writes for so long at most; then it ends. Storage that
# takes 4 GB at 50 MB/s takes 80 s.
KEEPER_END_S = 120.0
# ... and waits no longer than this for the other writers of a save: they end now, too.
KEEPER_HURRY_S = 20.0
# A keeper that left the last gasp to another looks for it this often, and does it after this time.
KEEPER_CLAIM_POLL_S = 0.2
KEEPER_CLAIM_S = 40.0
# Between two starts of a keeper, the first and the longest pause: one that cannot live is cheap.
KEEPER_PAUSE_S = 0.1
KEEPER_PAUSE_MAX_S = 30.0
# What is left of the memory of the host or the cgroup beside new slots: a worker's next allocation
# must not be the one that has it killed.
KEEPER_SPARE_BYTES = 64 << 20
# Of checkpoints that follow each other more closely than this, the event log has the last.
KEEPER_NEWS_S = 10.0
# A keeper that sends a copy to another node's, or waits for one: to be connected, without a byte on
# its way (of 16 MiB: half a MB a second is too slow to be of use), and in all.
KEEPER_DIAL_S = 5.0
KEEPER_COPY_STALL_S = 15.0
KEEPER_COPY_S = 600.0
# Snapshot servers of other nodes that send a copy at one time: there is one neighbour, and few
# others while the world changes.
KEEPER_CALLERS_MAX = 16
# Connections to a snapshot server that have not proved themselves yet; each is a thread. More wait
# in the kernel's queue, which is no longer than what an honest caller can wait for.
KEEPER_UNPROVEN_MAX = 64
KEEPER_BACKLOG = 128
assert (KEEPER_BACKLOG / KEEPER_UNPROVEN_MAX + 1) * UNPROVEN_TIMEOUT_S < HANDSHAKE_TIMEOUT_S
assert KEEPER_DIAL_S < KEEPER_COPY_STALL_S < KEEPER_COPY_S
assert max(KEEPER_ANSWER_S, KEEPER_HURRY_S + KEEPER_CLAIM_S) < KEEPER_END_S < KEEPER_SLOTS_S
assert KEEPER_PAUSE_S < KEEPER_PAUSE_MAX_S
assert KEEPER_PATIENCE_S < KEEPER_LOOK_S < KEEPER_STOPPED_S < KEEPER_ANSWER_S


def look_s(nodes: int, longest_s: float) -> float:
    """Return how often each of so many nodes looks at what all of them look at.

    A thousand that looked as often as eight do would keep a store busy, which has other jobs to
    serve; the first of them still looks within milliseconds.
    """
    return max(STORE_POLL_S, min(STORE_POLL_S * nodes / STORE_CROWD, longest_s))


# Attempts in a row that fail in the same way end the job: a third has shown that it is no chance.
SAME_CRASHES_MAX = 3


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The durations that a job may set, in seconds; every node of a job has the same ones.

    Precedent for each default is torchrun's, which ARCHITECTURE.md compares side by side.
    """

    # Too few nodes for this long ends the job; torchrun's join_timeout.
    join_timeout_s: float = 600.0
    # With the minimum present, wait this long after the latest arrival for more, ...
    last_call_s: float = 3.0
    # ... but never longer than this in all; torchrun always waits 30 s.
    last_call_max_s: float = 30.0
    # Arrivals at a running job are gathered this long after the latest, ...
    gather_s: float = 1.0
    # ... and at most this long, so that five arrivals are one change.
    gather_max_s: float = 5.0
    # How often an agent and its coordinator tell each other that they live.
    heartbeat_s: float = 1.0
    # A peer that was silent for this long is dead.
    silence_s: float = 3.0
    # Workers may take this long to checkpoint before a planned change.
    drain_timeout_s: float = 30.0
    # SIGTERM to SIGKILL, wherever workers are stopped; torchrun's --shutdown-timeout.
    shutdown_timeout_s: float = 30.0
    # An attempt that failed sooner than this after its start counts towards a crash loop, and
    # from the second in a row on there is a pause; 0 for none.
    crash_loop_s: float = 3.0
    # An attempt that failed sooner than this, by the same error at the same line as those before
    # it and without a step, counts towards SAME_CRASHES_MAX; 0 for never. A script that shows no
    # steps may have made some, so what lived longer does not count.
    same_crash_s: float = 60.0
    # No worker is taken to hang sooner than this: a shared disk may well take seconds to answer,
    # and who is taken to hang costs a restart of the budget.
    hang_floor_s: float = 20.0
    # A new coordinator waits this long for the agents of the last world.
    reregister_s: float = 2.0
    # A lease on the store, where there is one, is void so long after it was last renewed, ...
    lease_ttl_s: float = 2.0
    # ... and is renewed this often.
    lease_renew_s: float = 0.5


# A grace of nothing is SIGKILL at once, and a crash loop of nothing never pauses.
_MAY_BE_ZERO = ("shutdown_timeout_s", "crash_loop_s", "same_crash_s")
# Bounds that constrain each other: (small, large, factor, why) demands small * factor <= large.
PAIRS = (
    ("heartbeat_s", "silence_s", 2.0, "one lost heartbeat must not be a death"),
    ("lease_renew_s", "lease_ttl_s", 2.0, "one late renewal must not lose the lease"),
    ("last_call_s", "last_call_max_s", 1.0, "the bound of all last calls covers one"),
    ("gather_s", "gather_max_s", 1.0, "the bound of all gathering covers one arrival"),
    ("last_call_max_s", "join_timeout_s", 1.0, "a last call must end before the job gives up"),
)


def check(timing: Timing) -> list[str]:
    """Return what is contradictory in `timing`, a sentence each; empty when it is sound."""
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
    for small, large, factor, why in PAIRS:
        a, b = getattr(timing, small), getattr(timing, large)
        if a * factor > b:
            faults.append(f"{small} = {a:g} s needs {large} >= {a * factor:g} s, got {b:g}: {why}")
    return faults


assert not check(Timing()), check(Timing())
assert Timing().silence_s < ISOLATION_LIMIT_S
# The agent stops its workers before the warden would, and the warden before others may train.
assert ISOLATION_LIMIT_S + ISOLATION_GRACE_S < STANDSTILL_LIMIT_S
assert STANDSTILL_LIMIT_S / (1 - CLOCK_DRIFT_MAX) + STANDSTILL_SWEEP_S < FENCE_WAIT_S / (
    1 + CLOCK_DRIFT_MAX
)
# A group that starts gets a deadline that the warden has read before it passes.
assert STANDSTILL_LOOK_S < STANDSTILL_LIMIT_S - ISOLATION_LIMIT_S
assert Timing().silence_s + Timing().lease_ttl_s < LEAVE_ALONE_S < ISOLATION_LIMIT_S
assert REJOIN_GRACE_S < VERDICT_S < CONTEST_S < Timing().silence_s
assert Timing().reregister_s > HOLDER_GRACE_S
assert VERDICT_S < LOST_PEER_S
assert HANG_LOOK_S < HANG_ASK_S < HANG_ANSWER_S < Timing().hang_floor_s < HANG_CEILING_S
assert HANG_LOOK_S < HANG_STOPPED_S < HANG_STALL_S < HANG_ENTER_S < HANG_CEILING_S < HANG_BETWEEN_S
assert HANDSHAKE_BYTES_MAX < INBOX_BYTES_MAX < FRAME_BYTES_MAX
assert STORE_TIMEOUT_S < SAVE_TIMEOUT_S < ISOLATION_LIMIT_S
assert SEND_BYTES_MAX >= 2 * FRAME_BYTES_MAX
assert UNPROVEN_TIMEOUT_S < HANDSHAKE_TIMEOUT_S
assert CHECKPOINT_POLL_S < CHECKPOINT_POLL_MAX_S < CHECKPOINT_LITTER_S
assert CHECKPOINT_INTERVAL_MIN_S < CHECKPOINT_INTERVAL_MAX_S < CHECKPOINT_MTBF_S
