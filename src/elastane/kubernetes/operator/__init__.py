"""The operator: reads the cluster, asks `reconcile` for a decision, and carries it out.

It is the shell around that pure function. `informer` keeps the objects of a kind, `view` collects
those of one job, `queue` orders the jobs, `executor` carries decisions out, `reporting` writes
events. `session` is one operator's work while it has the lease; `running` elects the operator that
acts, and runs it from start to end. `metrics` and `probes` are its HTTP interface.

The operator has no state of its own: everything that must outlive it is in Kubernetes' objects. It
may be killed at any point, and two operators may run at once.
"""

from elastane.kubernetes.operator.running import (
    LEASE_NAME,
    OperatorSettings,
    identity,
    run,
    set_up_logs,
)

__all__ = ["LEASE_NAME", "OperatorSettings", "identity", "run", "set_up_logs"]
