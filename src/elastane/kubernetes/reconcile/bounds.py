"""Bounds of the operator's decisions: name, unit, default and reason."""

from __future__ import annotations

# A pod that lived for less than this ended quickly. Kubelets forget crashes after the same time.
QUICK_S = 600.0
# The user's own rendezvous (an etcd in the same manifest) may start later than the job: it has to
# be scheduled, and its image pulled. Until then torch's launcher tries for some seconds and ends
# with code 1, within a minute of its start.
FIRST_START_S = 300.0
FIRST_START_LIVED_S = 60.0
# So many failures of workers, containers and pods in a row, without a new step, are a crash loop.
# A single failure is not one, and a second may have the same cause as the first.
CRASH_LOOP_MIN = 3
# The pause before the replacement of a pod that ended quickly twice in a row, doubled each further
# time up to the second value; after its first end it is replaced at once. Kubelets have the same
# pauses for containers.
BACKOFF_FIRST_S = 10.0
BACKOFF_MAX_S = 300.0
# A creation that was refused for a passing reason (quota, a service account that the server does
# not know yet) is retried after the first of these times, doubled up to the second.
REFUSED_FIRST_S = 1.0
REFUSED_MAX_S = 60.0
# If no pod of a job ever ran, and pods lack an image or a volume for this long, the job fails. A
# registry that is away for a moment must not end it.
STARTLESS_S = 600.0
# A pod is held by a finalizer if it still exists this long after its deletion was due, and its
# containers have ended. Its replacement takes another name.
HELD_S = 10.0
# A coordinator's report of the world's pods is used for this long.
REPORT_FRESH_S = 30.0
# How long the operator waits when all nodes of a job are unreachable: then the control plane is
# probably cut off, and not the nodes. Kubernetes' default tolerations last as long.
ALL_LOST_S = 300.0
# Grace of pods whose template names none: 30 s to drain, 30 s for workers to stop after SIGTERM,
# and as long for a checkpoint that is being written.
GRACE_S = 120
# The next decision is made after this time if no event comes before; other times are computed.
LOOK_AGAIN_S = 30.0
# Pods in the status; 200 bytes each.
WORKERS_TOLD_MAX = 64
# Uids of counted pods that are kept after their deletion, since an API server may still return an
# old list.
COUNTED_KEPT = 32
# Uids of fenced pods that are kept after their deletion: their processes may still run.
FENCED_KEPT = 256
# Uids of dead pods that the directive keeps after their deletion, or maxReplicas if that is more.
# The next coordinator needs those of the last world.
DEAD_KEPT = 64
# Nodes with failures that the status remembers; pods avoid some of them.
NODES_KEPT = 128
# Characters of a container's, a server's or a report's text that a condition repeats.
TEXT_CHARS_MAX = 400
# Events of one decision. If a thousand pods fail at once, the first ones and the counters suffice.
EVENTS_MAX = 64
# How many mistakes of a manifest one message lists.
FAULTS_SHOWN_MAX = 8
# A job template that is missing or wrong is read again after a tenth of the job's age, between
# these bounds: it may be applied a moment after the job, or never.
TEMPLATE_LOOK_MIN_S = 1.0
TEMPLATE_LOOK_MAX_S = 30.0
