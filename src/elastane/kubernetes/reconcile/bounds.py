"""Bounds of the operator's decisions: name, unit, default and reason."""

from __future__ import annotations

# A pod that lived for less than this ended quickly; kubelets forget crashes after as long.
QUICK_S = 600.0
# A rendezvous of the user's (an etcd of the same manifest) may come up later than the job: it has
# to be scheduled, and its image pulled. Until then launchers other than elastane's end with code 1,
# within a minute: those of torch import it, and try for some seconds.
FIRST_START_S = 300.0
FIRST_START_LIVED_S = 60.0
# Failures of workers, containers and pods in a row, without a new step, that are a crash loop. One
# failure is none, and a second may have the same cause as the first.
CRASH_LOOP_MIN = 3
# Pause before the replacement of a pod that ended quickly twice in a row, doubled each further
# time; the first is replaced at once. As kubelets do with containers, up to their bound.
BACKOFF_FIRST_S = 10.0
BACKOFF_MAX_S = 300.0
# A creation that was refused for a reason that may pass (quota, a service account that the server
# has not seen yet) is tried again after this, doubled up to the second.
REFUSED_FIRST_S = 1.0
REFUSED_MAX_S = 60.0
# If no pod of a job ever ran, and pods lack an image or a volume for this long, the job fails. A
# registry that is away for a moment must not end it.
STARTLESS_S = 600.0
# A finalizer holds a pod that still exists this long after its deletion was due, though its
# containers have ended. Its replacement takes another name.
HELD_S = 10.0
# A coordinator's report of who is in the world counts for this long.
REPORT_FRESH_S = 30.0
# Where all nodes of a job are unreachable at once, the control plane is cut off rather than they;
# as long as Kubernetes' own tolerations bear it by default.
ALL_LOST_S = 300.0
# Grace of pods whose template names none: 30 s to drain, 30 s for workers to stop after SIGTERM,
# and as long for a checkpoint that is being written.
GRACE_S = 120
# The next decision without any event; all other times are computed.
LOOK_AGAIN_S = 30.0
# Pods in the status; 200 bytes each.
WORKERS_TOLD_MAX = 64
# Uids of pods that are gone, kept in case that an old list of pods is served once more.
COUNTED_KEPT = 32
# Uids of fenced pods that are gone from the API server; their processes may still live somewhere.
FENCED_KEPT = 256
# Uids of dead pods that are gone, in the directive, or maxReplicas where that is more. The next
# coordinator needs those of the last world.
DEAD_KEPT = 64
# Nodes with failures that are remembered, and of these the ones that a pod avoids.
NODES_KEPT = 128
# Text of a container, a server or a report, as a condition repeats it.
TEXT_CHARS_MAX = 400
# Events of one decision; of a thousand pods that fail at once the first few are enough, and
# the counters the rest.
EVENTS_MAX = 64
# Mistakes of one manifest in one message.
FAULTS_SHOWN_MAX = 8
