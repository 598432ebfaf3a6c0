"""The operator's bounds: intervals, timeouts and numbers, each with its reason."""

from __future__ import annotations

# Jobs that are reconciled at a time. Each mostly waits for the API server, which by default accepts
# some dozens of requests of one user at a time.
WORKERS = 16
# Writes at a time, over all jobs. So a job of a thousand pods leaves room for others, and the API
# server does not throttle the operator.
WRITES_IN_FLIGHT_MAX = 32
# Creations of one decision at a time: one, then four, then sixteen. So a quota that refuses the
# first pod of a thousand gets one request, not a thousand.
BATCH_FIRST = 1
BATCH_FACTOR = 4
# A key that failed waits this long before it is tried again, doubling up to the longest.
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 120.0
# All jobs are checked again this often, in case an event was missed.
RESYNC_S = 300.0
# A job whose report only has a new step is reconciled no more often than this.
PROGRESS_S = 5.0
# A node that seems lost is read again, unless it was read this recently.
NODE_LOOK_S = 2.0
# Nodes whose last look is remembered; each is a few bytes.
NODES_ABSENT_MAX = 16_384
# Pause before a list or watch is tried again, doubling up to the longest.
RELIST_FIRST_S = 0.25
RELIST_MAX_S = 30.0
# Uids of deleted objects that each cache remembers: a late answer to a write must not bring one
# back.
GONE_REMEMBERED_MAX = 8192
# Other operators may take the lease this long after its last renewal, ...
LEASE_S = 15.0
# ... its holder stops acting this long after the request of its last renewal, ...
LEASE_HOLD_S = 10.0
# ... and renewed this often. Kubernetes' own controllers have 15, 10 and 2.
LEASE_RENEW_S = 2.0
# A waiting operator reads the lease this often.
LEASE_LOOK_S = 1.0
# One request of the election; much less than the holder's time.
LEASE_REQUEST_S = 4.0
# Work under way may take this long to end, on SIGTERM, before the lease is released.
END_S = 5.0
# ... and events that are not written yet may take this long.
EVENTS_FLUSH_S = 1.0
# Events of one job: EVENTS_BURST at once, and after that one each EVENTS_REFILL_S. The clients of
# Kubernetes have 25 and 300 s.
EVENTS_BURST = 25
EVENTS_REFILL_S = 30.0
# A repeated event is counted; the count is written this often at most.
EVENT_COUNT_S = 10.0
# The API server drops events after an hour, by default.
EVENT_KEPT_S = 3600.0
# Events whose counts are remembered, and events that wait to be written.
EVENTS_REMEMBERED_MAX = 4096
EVENTS_WAITING_MAX = 1000
# Characters of an event's message; the API server refuses more than 1,024 bytes.
EVENT_MESSAGE_CHARS_MAX = 1000

assert LEASE_RENEW_S + LEASE_REQUEST_S < LEASE_HOLD_S < LEASE_S
assert RETRY_FIRST_S < RETRY_MAX_S and RELIST_FIRST_S < RELIST_MAX_S
assert RETRY_MAX_S < RESYNC_S
