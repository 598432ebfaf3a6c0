"""The operator: reads the cluster, asks `reconcile` for a decision, and carries it out.

The shell around a pure function. `informer` and `cache` hold the objects, `view` collects those of
one job, `queue` orders the jobs, `executor` carries decisions out, `reporting` writes events,
`elector` decides which of several operators acts. `session` is one operator's work while it has the
lease, `running` its life from start to end, `metrics` and `probes` its HTTP interface.

It has no state of its own: everything that must outlive it is in the objects. It may be killed at
any point, and two may run at once.
"""

from elastane.kubernetes.operator.logs import set_up_logs
from elastane.kubernetes.operator.running import LEASE_NAME, OperatorSettings, identity, run

__all__ = ["LEASE_NAME", "OperatorSettings", "identity", "run", "set_up_logs"]
