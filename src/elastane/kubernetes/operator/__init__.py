"""The operator: sees the cluster, asks `reconcile` what is to be done, and does it.

The shell around a pure function. `informer` and `cache` hold what was seen, `view` makes of it all
that concerns one job, `queue` says which job is looked at next, `deeds` carries decisions out,
`telling` writes events, `elector` decides which of several operators acts, `session` is one
operator's work while it has the lease, `running` its life from start to end, `metrics` and `probes`
what others may ask of it.

It keeps nothing: all that must outlive it is in the objects. It may be killed anywhere, and two
may run at once.
"""

from elastane.kubernetes.operator.logs import set_up_logs
from elastane.kubernetes.operator.running import LEASE_NAME, OperatorSettings, identity, run

__all__ = ["LEASE_NAME", "OperatorSettings", "identity", "run", "set_up_logs"]
