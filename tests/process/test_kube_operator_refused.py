"""Final refusals of the API server are reported, and not retried endlessly."""

from kube_operators import GROUP_OF_JOBS, job, operator_over, play, pods, status

from elastane.kubernetes.model.names import API_VERSION, TEMPLATE_KIND, TEMPLATE_PLURAL
from elastane.kubernetes.reconcile import reconcile
from elastane.kubernetes.reconcile.bounds import REFUSED_MAX_S


def soon(seen, now_s):
    """Decide as of a later time, so that delayed actions are due."""
    return reconcile(seen, now_s + REFUSED_MAX_S if degraded_in(seen.job.status) else now_s)


def degraded_in(status):
    found = (status or {}).get("conditions", [])
    return next((c for c in found if c["type"] == "Degraded" and c["status"] == "True"), None)


def degraded(kube):
    return degraded_in(status(kube))


def test_a_missing_right_is_a_condition_until_it_is_granted():
    async def scenario(kube):
        message = 'pods "x-worker-1" is forbidden: User "o" cannot delete resource "pods"'
        fault = kube.inject("DELETE", "/pods/", status=403, reason="Forbidden", message=message)
        kube.create("elasticjobs", job(minReplicas=1), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=soon) as running:
            await kube.wait(lambda: len(pods(kube)) == 2)
            worker = {"replicaSpecs": {"Worker": {"replicas": 1}}}
            kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
            told = await kube.wait(lambda: degraded(kube))
            assert told["reason"] == "Forbidden" and message in told["message"]
            await kube.wait(lambda: len(pods(kube)) == 1)
            assert fault.times == 0, "it was tried again"
            running.operator.session.queue.add("default/x")
            await kube.wait(lambda: not degraded(kube))

    play(scenario)


def test_a_namespace_that_is_being_deleted_is_no_fault_of_the_rights(caplog):
    async def scenario(kube):
        details = {"causes": [{"reason": "NamespaceTerminating", "message": "it is"}]}
        refused = {"status": 403, "reason": "Forbidden", "details": details, "times": 99}
        kube.inject("POST", "/pods$", **refused)
        fault = kube.inject("POST", "/events$", **refused)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=reconcile) as running:
            value = running.operator.metrics.value
            await kube.wait(lambda: value("elastane_reconciles_total", result="failed") >= 2)
            assert not degraded(kube)
            assert fault.times == 99, "a namespace that goes takes no event"

    caplog.set_level("INFO")
    play(scenario)
    assert "its namespace is being deleted" in caplog.text
    assert "forbidden" not in caplog.text.lower()


def test_a_refused_spec_of_a_template_is_an_event_and_a_condition_until_it_is_accepted():
    async def scenario(kube):
        whole = job()["spec"]
        head = {"apiVersion": API_VERSION, "kind": TEMPLATE_KIND, "metadata": {"name": "gpu"}}
        template = head | {"spec": {"job": whole}}
        kube.create(TEMPLATE_PLURAL, template, group=GROUP_OF_JOBS)
        message = 'ElasticJob "x" is invalid: spec.stalledSeconds: Invalid value: 1'
        refused = {"status": 422, "reason": "Invalid", "message": message, "times": 99}
        kube.inject("PATCH", "/elasticjobs/x$", **refused)
        asked = job() | {"spec": {"templateRef": {"name": "gpu"}}}
        kube.create("elasticjobs", asked, group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=reconcile):
            (event,) = await kube.wait(lambda: kube.all("events"))
            assert (event["type"], event["reason"]) == ("Warning", "InvalidSpec")
            assert message in event["message"]
            await kube.wait(lambda: status(kube).get("phase") == "Failed")
            (failed,) = [one for one in status(kube)["conditions"] if one["type"] == "Failed"]
            assert message in failed["message"]
            kube.faults.clear()
            await kube.wait(lambda: len(pods(kube)) == 2)
            assert status(kube)["jobTemplate"] == "gpu, edition 1"

    play(scenario)


def test_a_refused_status_is_reported_once_and_retried_when_the_job_changes():
    async def scenario(kube):
        path, message = "/elasticjobs/x/status", "spec.replicas: Invalid value"
        kube.inject("PATCH", path, status=422, reason="Invalid", message=message, times=99)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=reconcile) as running:
            events = await kube.wait(lambda: kube.all("events"))
            assert (events[0]["reason"], events[0]["message"]) == ("StatusRefused", message)
            value = running.operator.metrics.value
            assert value("elastane_reconciles_total", result="refused") == 1
            assert not running.operator.session.queue._failures, "it is not tried again"
            assert not pods(kube), "nothing is done that is not accounted for"
            kube.faults.clear()
            change = {"metadata": {"labels": {"touched": "yes"}}}
            kube.patch("elasticjobs", "x", change, group=GROUP_OF_JOBS)
            await kube.wait(lambda: len(pods(kube)) == 2)

    play(scenario)
