"""The bounds of a snapshot server, of its workers' requests and of its replicas.

Pure. Each has a name, a unit and a reason; the last lines say how they constrain each other.
"""

from elastane.protocol.limits import HANDSHAKE_TIMEOUT_S, UNPROVEN_TIMEOUT_S

# One message of a worker to its snapshot server: the small files of a state. A tree of many
# thousand tensors takes a few megabytes, and so do other objects.
REQUEST_BYTES_MAX = 128 << 20
# ... and one answer to it: the small files of all whole snapshots together.
ANSWER_BYTES_MAX = 1 << 30
# Slots of one worker: three are enough, see snapshots/rules/slot_table.py.
SLOTS_MAX = 16
# Connections of one snapshot server; each is a sleeping thread.
CONNECTIONS_MAX = 1024
# Groups of workers with states of their own; a job has one, or a few.
GROUPS_MAX = 64
# Bytes that a worker may send before it has identified itself.
HELLO_BYTES_MAX = 32 << 10
# How many layouts without a snapshot are kept: a worker sends one before its first snapshot.
LAYOUTS_MAX = 64
# Failures that a snapshot server remembers for workers that wait for a save.
FAILURES_MAX = 8
# A snapshot server answers at once, unless its host swaps or it was stopped.
ANSWER_S = 30.0
# ... except for new slots: the host backs fresh memory at a third of a GB a second.
SLOTS_S = 600.0
# How long a save waits for a silent snapshot server, once per silence. Then saves are dropped until
# it answers: steps of a few tenths of a second are common, and the wait must not be many.
REQUEST_TIMEOUT_S = 0.5
# How long a snapshot server waits in the middle of a worker's message; once.
SEND_S = 5.0
# The agent checks this often whether a signal has stopped its snapshot server, ...
CHECK_S = 1.0
# ... and replaces one that was stopped at every check for this long: no worker can save meanwhile.
STOPPED_S = 5.0
# The time for the rest of a message that has begun to arrive.
STALL_S = 30.0
# How long all workers of a node are gone before their last snapshot is written to storage.
# Restarted workers come back before that, and continue.
RETURN_S = 5.0
# A save that lacks a piece which no connected worker will keep is lost after this long: a worker
# joins its snapshot server as it begins to save, and may be slow.
ORPHANED_S = 60.0
# How long a snapshot server writes after its agent is gone or leaving; then it ends. Storage that
# takes 4 GB at 50 MB/s takes 80 s.
END_S = 120.0
# ... and waits no longer than this for the other writers of a save: they end now, too.
HURRY_S = 20.0
# A snapshot server that left the final flush to another checks for it this often, and does it after
# this time.
CLAIM_POLL_S = 0.2
CLAIM_S = 40.0
# The first and the longest pause between two starts of a snapshot server: one that cannot live is
# cheap.
RESTART_PAUSE_S = 0.1
RESTART_PAUSE_MAX_S = 30.0
# Memory that new slots leave free on the host or in the cgroup: a worker's next allocation must not
# get it killed.
SPARE_BYTES = 64 << 20
# Of checkpoints closer together than this, the event log has only the last.
SAVED_EVENT_S = 10.0
# The shortest time between two reports of the newest copies to the agent. The agent sends them on
# with its heartbeats, which are at least as far apart.
HELD_NEWS_S = 1.0
# The limits of sending or receiving a copy: to connect, without a byte on its way (of 16 MiB: half
# a MB a second is too slow to be of use), and in all.
CONNECT_S = 5.0
REPLICA_STALL_S = 15.0
REPLICA_S = 600.0
# Snapshot servers of other nodes that send a copy at a time: there is one replica store, and few
# others while the world changes.
SENDERS_MAX = 16
# Unproven connections to a snapshot server; each is a thread. More wait in the kernel's queue, for
# no longer than an honest caller can wait.
PEERS_UNPROVEN_MAX = 64
PEERS_BACKLOG = 128
assert (PEERS_BACKLOG / PEERS_UNPROVEN_MAX + 1) * UNPROVEN_TIMEOUT_S < HANDSHAKE_TIMEOUT_S
assert CONNECT_S < REPLICA_STALL_S < REPLICA_S
assert max(ANSWER_S, HURRY_S + CLAIM_S) < END_S < SLOTS_S
assert RESTART_PAUSE_S < RESTART_PAUSE_MAX_S
assert REQUEST_TIMEOUT_S < CHECK_S < STOPPED_S < ANSWER_S
