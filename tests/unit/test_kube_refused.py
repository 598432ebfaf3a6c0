"""Refused patches and deletions are reported in a condition, and retried with pauses."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import DeletePod, PatchObject, Refusal
from elastane.kubernetes.reconcile.bounds import REFUSED_FIRST_S, REFUSED_MAX_S

WHY = 'User "operator" cannot do this'


def ran():
    cluster = Cluster(spec=spec_of(2, 1, 2))
    cluster.settle()
    return cluster


def of(kind, actions):
    return [one for one in actions if isinstance(one, kind)]


def scaled_down(cluster):
    cluster.edit(spec_of(1, 1, 2))
    return DeletePod, ("delete", "Pod", "j-worker-1")


def objects_differ(cluster):
    cluster.objects["ConfigMap", "j-directive"]["data"]["max"] = "7"
    return PatchObject, ("patch", "ConfigMap", "j-directive")


def refused(what, cluster, code=403, times=1):
    verb, kind, name = what
    return Refusal(
        verb=verb,
        kind=kind,
        name=name,
        code=code,
        message=WHY,
        times=times,
        at_s=cluster.now_s,
    )


@pytest.mark.parametrize(("code", "reason"), [(403, "Forbidden"), (422, "Refused")])
@pytest.mark.parametrize("change", [scaled_down, objects_differ])
def test_a_refused_write_is_reported_by_name_and_waits_longer_each_time(change, code, reason):
    cluster = ran()
    kind, what = change(cluster)
    for times in (1, 3, 99):
        cluster.refused = (refused(what, cluster, code, times),)
        cluster.relist()
        decision, _ = cluster.operate()
        assert not of(kind, decision.actions)
        degraded = cluster.status.condition("Degraded")
        assert (degraded.status, degraded.reason) == ("True", reason)
        assert f"to {' '.join(what)} was refused: {WHY}" in degraded.message
        assert reason in [event.reason for event in decision.events]
        assert decision.again_in_s <= min(REFUSED_MAX_S, REFUSED_FIRST_S * 2 ** (times - 1))
        cluster.now_s += REFUSED_MAX_S
    # It is due again and still reported; once it succeeds, it is reported no more.
    cluster.relist()
    decision, _ = cluster.operate()
    assert of(kind, decision.actions)
    assert cluster.status.is_("Degraded")
    cluster.refused = ()
    cluster.settle()
    assert not cluster.status.is_("Degraded")


def test_a_refused_write_that_is_no_longer_wanted_is_not_reported():
    cluster = ran()
    cluster.refused = (refused(("delete", "Pod", "j-worker-1"), cluster),)
    cluster.settle()
    assert not cluster.status.is_("Degraded")


def test_a_deletion_that_was_refused_keeps_no_pod_from_being_made():
    cluster = ran()
    gone = cluster.by_name("j-worker-1")
    cluster.exit(gone, 137)
    cluster.settle()
    assert cluster.by_name("j-worker-1").uid != gone.uid
    again = cluster.by_name("j-worker-1")
    cluster.ask(again, 0)
    cluster.refused = (refused(("delete", "Pod", "j-worker-1"), cluster, code=422),)
    cluster.settle()
    assert cluster.by_name("j-worker-1").uid != again.uid
    assert cluster.status.phase == "Running"
