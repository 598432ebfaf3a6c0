"""The operator: reads the cluster, asks `reconcile` for a decision, and carries it out.

The shell around a pure function. `informer` holds the objects of a kind, `view` collects those of
one job, `queue` orders the jobs, `executor` carries decisions out, `reporting` writes events.
`session` is one operator's work while it has the lease, `running` its life from start to end, with
the election of the one that acts. `metrics` and `probes` are its HTTP interface.

It has no state of its own: everything that must outlive it is in the objects. It may be killed at
any point, and two may run at once.
"""

from elastane.kubernetes.operator.running import (
    LEASE_NAME,
    OperatorSettings,
    identity,
    run,
    set_up_logs,
)

__all__ = ["LEASE_NAME", "OperatorSettings", "identity", "run", "set_up_logs"]
