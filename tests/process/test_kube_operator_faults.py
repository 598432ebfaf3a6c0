"""The operator over an API server with every kind of failure."""

import asyncio

import pytest
from kube_operators import (
    GROUP_OF_JOBS,
    decide,
    job,
    operator_over,
    play,
    pods,
    settled,
    status,
)

from elastane.kubernetes.model import Decision, JobStatus, ReportedEvent
from elastane.kubernetes.reconcile import reconcile


def created(kube, plural="pods"):
    return [name for method, what, name in kube.writes if (method, what) == ("POST", plural)]


def lists(kube):
    gets = [one for one in kube.requests if one.method == "GET" and not one.is_watch]
    return [one.path for one in gets if not one.where.name]


def watched(kube):
    """The versions that jobs were watched from."""
    asked = [one for one in kube.requests if one.is_watch and one.path.endswith("/elasticjobs")]
    return [int(one.query["resourceVersion"]) for one in asked]


def test_a_job_gets_its_pods_and_a_status_and_then_nothing_is_written():
    async def scenario(kube):
        kube.create("elasticjobs", job(replicas=3), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube, replicas=3)
            writes = len(kube.writes)
            await running.operator.session.queue.wait_returned(10, all_ready=True)
            assert status(kube)["phase"] == "Running"
            assert len(created(kube)) == 3
            # A change of a label that the operator does not read causes no write.
            kube.patch(
                "elasticjobs", "x", {"metadata": {"labels": {"a": "b"}}}, group=GROUP_OF_JOBS
            )
            done = running.operator.metrics.value
            before = done("elastane_reconciles_total", result="done")
            await kube.wait(lambda: done("elastane_reconciles_total", result="done") > before)
            assert len(kube.writes) == writes

    play(scenario)


def test_a_job_is_scaled_up_and_down():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube):
            await settled(kube)
            for replicas in (4, 1):
                worker = {"replicaSpecs": {"Worker": {"replicas": replicas}}}
                kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
                await settled(kube, replicas=replicas)

    play(scenario)


FAULTS = {
    "busy": {"status": 503, "times": 2},
    "too many": {"status": 429, "times": 2, "headers": {"Retry-After": "0"}},
    "conflict": {"status": 409, "reason": "Conflict", "times": 2},
    "lost before": {"before": True, "times": 2},
    "lost after": {"after": True, "times": 2},
    "garbage": {"garbage": True, "times": 2},
}


@pytest.mark.parametrize("path", ["/pods$", "/configmaps$", "/status$"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_write_is_repeated_and_creates_nothing_twice(path, fault):
    async def scenario(kube):
        method = "PATCH" if path == "/status$" else "POST"
        injected = kube.inject(method, path, **FAULTS[fault])
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube):
            await settled(kube)
        assert injected.times < FAULTS[fault].get("times", 1)
        assert len(kube.all("services")) == 1

    play(scenario)


@pytest.mark.parametrize(
    ("plural", "fault"),
    [
        *[("pods", fault) for fault in (*FAULTS, "gone")],
        *[(plural, "busy") for plural in ("elasticjobs", "services", "configmaps", "nodes")],
    ],
)
def test_a_list_that_fails_is_read_again(plural, fault):
    async def scenario(kube):
        what = {"status": 410, "reason": "Expired"} if fault == "gone" else FAULTS[fault]
        kube.inject("GET", f"/{plural}$", **{**what, "times": 1})
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube):
            await settled(kube)

    play(scenario)


@pytest.mark.parametrize("fault", [*FAULTS, "gone"])
def test_a_watch_that_fails_is_taken_up_again(fault):
    async def scenario(kube):
        what = {"status": 410, "reason": "Expired"} if fault == "gone" else FAULTS[fault]
        kube.inject("WATCH", "/elasticjobs$", **{**what, "times": 1})
        async with operator_over(kube) as running:
            await kube.wait(lambda: running.operator.session is not None)
            kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
            await settled(kube)

    play(scenario)


def test_watches_that_break_continue_where_they_were():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube)
            listed = len(lists(kube))
            for replicas in (3, 1):
                kube.cut_watches()
                worker = {"replicaSpecs": {"Worker": {"replicas": replicas}}}
                kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
                await settled(kube, replicas=replicas)
            assert len(lists(kube)) == listed, "nothing was listed anew"
            label = {"metadata": {"labels": {"a": "b"}}}
            told = kube.patch("elasticjobs", "x", label, group=GROUP_OF_JOBS)
            version = told["metadata"]["resourceVersion"]
            jobs = running.operator.session.view.jobs
            await kube.wait(lambda: jobs.get("default/x").metadata.resource_version == version)
            kube.cut_watches()
            # From the last version that was seen, so that no event comes twice.
            await kube.wait(lambda: int(version) in watched(kube))
            await kube.wait(lambda: running.operator.session.faults == [])

    play(scenario)


def test_a_dropped_version_leads_to_a_new_list_with_the_missed_changes():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        kube.create("elasticjobs", job("y"), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube)
            await settled(kube, "y")
            await kube.stop()
            kube.delete("pods", "x-worker-1")
            kube.delete("elasticjobs", "y", group=GROUP_OF_JOBS)
            kube.objects.collect()
            kube.objects.compact()
            await kube.start_again()
            await settled(kube)
            assert pods(kube, "y") == []
            assert created(kube).count("x-worker-1") == 2
            relists = running.operator.metrics.value("elastane_relists_total", kind="Pod")
            assert relists >= 1

    play(scenario)


def test_a_delayed_watch_does_not_create_a_pod_twice():
    """The watch reports no pod while decisions about the job are made."""

    async def scenario(kube):
        kube.silent = {"pods", "services", "configmaps"}
        async with operator_over(kube) as running:
            kube.create("elasticjobs", job(replicas=5), group=GROUP_OF_JOBS)
            await settled(kube, replicas=5)
            session = running.operator.session
            for _ in range(5):
                session.queue.add("default/x")
                await session.queue.wait_returned(10, all_ready=True)
            assert sorted(created(kube)) == [f"x-worker-{index}" for index in range(5)]
            assert created(kube, "services") == ["x"]

    play(scenario)


def test_a_refused_template_is_sent_once_and_reaches_the_next_decision():
    async def scenario(kube):
        kube.inject("POST", "/pods$", status=422, reason="Invalid", message="spec.x: no", times=99)
        kube.create("elasticjobs", job(replicas=20), group=GROUP_OF_JOBS)
        seen = []

        def watching(observed, now_s):
            seen.append(observed.refused)
            return refusing(observed, now_s)

        def refusing(observed, now_s):
            if observed.refused:
                return Decision(status=JobStatus(phase="Failed"))
            return decide(observed, now_s)

        async with operator_over(kube, decide=watching):
            await kube.wait(lambda: status(kube).get("phase") == "Failed")
            assert created(kube) == ["x-worker-0"], "the other 19 were not asked for"
            refused = seen[-1][0]
            assert (refused.code, refused.name) == (422, "x-worker-0")
            assert refused.message == "spec.x: no"
            # Another spec is another thing: what was refused is forgotten.
            kube.faults.clear()
            worker = {"replicaSpecs": {"Worker": {"replicas": 2}}}
            kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
            await settled(kube)

    play(scenario)


def test_a_name_of_another_owners_object_is_refused_and_one_of_the_job_adopted():
    async def scenario(kube):
        made = kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        kube.create("pods", {"metadata": {"name": "x-worker-0"}, "spec": {}})
        ours = {
            "name": "x-worker-1",
            "labels": {"other": "label"},  # so that no watch of ours tells of it
            "ownerReferences": [{"uid": made["metadata"]["uid"], "controller": True}],
        }
        kube.create("pods", {"metadata": ours, "spec": {}})
        async with operator_over(kube):
            await kube.wait(lambda: "x-worker-0-r1" in created(kube))
            await kube.wait(lambda: status(kube).get("phase") == "Invalid")
        assert [one for one in created(kube) if one == "x-worker-0-r1"] == ["x-worker-0-r1"]

    play(scenario)


def test_a_missing_right_is_an_event_that_names_it():
    async def scenario(kube):
        message = 'pods "x-worker-0" is forbidden: User "o" cannot delete resource "pods"'
        kube.inject("DELETE", "/pods/", status=403, reason="Forbidden", message=message, times=99)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube):
            await settled(kube)
            worker = {"replicaSpecs": {"Worker": {"replicas": 1}}}
            kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
            events = await kube.wait(lambda: kube.all("events"))
            assert (events[0]["reason"], events[0]["message"]) == ("Forbidden", message)

    play(scenario)


def test_an_operator_without_a_right_to_nodes_works():
    async def scenario(kube):
        kube.inject("GET", "/nodes$", status=403, reason="Forbidden", times=99)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube)
            assert running.operator.not_ready() == []

    play(scenario)


def test_pods_that_need_a_scheduler_that_is_missing_are_made_once_it_is_installed():
    policy = {"podGroup": "Volcano"}

    def conditions(kube):
        return {one["type"]: one["reason"] for one in status(kube).get("conditions", [])}

    async def scenario(kube):
        missing = kube.inject("GET", "/podgroups$", status=404, reason="NotFound", times=10**6)
        kube.create("elasticjobs", job(schedulingPolicy=policy), group=GROUP_OF_JOBS)
        kube.create("elasticjobs", job("plain"), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=reconcile) as running:
            await kube.wait(lambda: conditions(kube).get("Degraded") == "PodGroupUnavailable")
            await kube.wait(lambda: "plain-worker-1" in created(kube), "pods without a group")
            assert "x-worker-0" not in created(kube)
            assert running.operator.not_ready() == []
            count = running.operator.metrics.value
            assert not count(
                "elastane_watch_errors_total", kind="PodGroup.v1beta1.scheduling.volcano.sh"
            )
            missing.times = 0
            await kube.wait(lambda: "x-worker-1" in created(kube), "pods in the group")
            (group,) = kube.all("podgroups", group="scheduling.volcano.sh")
            assert group["spec"] == {"minMember": 2}
            await kube.wait(lambda: conditions(kube)["Running"] == "PodsPending")
            # An API that goes away again is noticed, and its objects with it.
            for method in ("GET", "WATCH"):
                kube.inject(method, "/podgroups$", status=404, reason="NotFound", times=10**6)
            kube.cut_watches()
            cache = running.operator.session.view.cache_of("PodGroup.v1beta1.scheduling.volcano.sh")
            await kube.wait(lambda: cache.unserved and not len(cache), "the API is away")

    play(scenario)


def test_an_operator_without_the_definition_waits_and_logs_it():
    async def scenario(kube):
        fault = kube.inject("GET", "/elasticjobs$", status=404, reason="NotFound", times=10**6)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            session = await kube.wait(lambda: running.operator.session)
            await kube.wait(lambda: session.faults)
            assert "elasticjobs" in running.operator.not_ready()[0]
            fault.times = 0
            await settled(kube)
            assert running.operator.not_ready() == []

    play(scenario)


def test_a_failed_decision_only_stops_its_own_job(caplog):
    async def scenario(kube):
        def failing(observed, now_s):
            if observed.job.metadata.name == "bad":
                raise ZeroDivisionError
            return decide(observed, now_s)

        kube.create("elasticjobs", job("bad"), group=GROUP_OF_JOBS)
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=failing) as running:
            await settled(kube)
            bugs = running.operator.metrics.value
            await kube.wait(lambda: bugs("elastane_reconciles_total", result="bug") >= 2)

    play(scenario)


def test_an_event_exists_once_and_is_counted():
    async def scenario(kube):
        def telling(observed, now_s):
            told = ReportedEvent(type="Normal", reason="Waits", message="for pods")
            return Decision(status=JobStatus(phase="Pending"), events=(told,))

        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=telling) as running:
            await kube.wait(lambda: kube.all("events"))
            running.operator.session.queue.add("default/x")
            await running.stop()
        async with operator_over(kube, token="two", decide=telling):
            await kube.wait(lambda: kube.all("events")[0]["count"] >= 2)
        (event,) = kube.all("events")
        assert event["involvedObject"]["name"] == "x"
        assert event["type"] == "Normal"

    play(scenario)


def test_an_operator_of_one_namespace_reads_no_other():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        kube.create("elasticjobs", job("y"), namespace="other", group=GROUP_OF_JOBS)
        async with operator_over(kube, namespace="default"):
            await settled(kube)
        wide = [r.path for r in kube.requests if "/namespaces/default" not in r.path]
        assert {path.rpartition("/")[2] for path in wide} == {"nodes"}

    play(scenario)


def test_probes_answer_also_after_garbage():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube)
            answer = running.operator.probes.answer
            assert answer("GET", "/healthz").status == 200
            assert answer("GET", "/readyz").status == 200
            assert answer("GET", "/x").status == 404
            assert answer("POST", "/metrics").status == 405
            assert answer("", "").status == 400
            text = answer("GET", "/metrics").body.decode()
            assert 'elastane_jobs{phase="Running"} 1' in text
            assert 'elastane_pods{phase="Pending"} 2' in text
            assert 'elastane_writes_total{code="2xx",what="CreatePod"} 2' in text
            assert "elastane_operator_leader 1" in text

    play(scenario)


def test_sigterm_gives_the_lease_back():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube) as running:
            await settled(kube)
            async with asyncio.timeout(90):
                await running.stop()
        lease = kube.one("leases", "elastane-operator", group="coordination.k8s.io")
        assert not lease["spec"].get("holderIdentity")

    play(scenario)


def test_a_pod_on_a_node_unknown_to_the_watch_is_left_alone():
    async def scenario(kube):
        states = []

        def noting(observed, now_s):
            states.append(dict(observed.nodes))
            return decide(observed, now_s)

        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=noting) as running:
            await settled(kube)
            await kube.wait(running.operator.session.synced.is_set)
            kube.inject("WATCH", "/nodes$", hang=True, times=99)
            kube.cut_watches()
            kube.create("nodes", {"metadata": {"name": "fresh"}}, namespace="")
            kube.patch("pods", "x-worker-0", {"spec": {"nodeName": "fresh"}})
            await kube.wait(lambda: states[-1])
            assert states[-1]["fresh"].exists
            kube.delete("nodes", "fresh", namespace="")
            kube.faults.clear()
            await kube.stop()
            await kube.start_again()
            await kube.wait(lambda: "fresh" in states[-1] and not states[-1]["fresh"].exists)

    play(scenario)
