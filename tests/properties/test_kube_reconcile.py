"""The operator under random events of a cluster, in any order, of which it misses some.

A failure prints the sequence of rules. `--hypothesis-seed` and the printed blob replay it.
"""

import copy
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import CreatePod, DeletePod, ReleaseLease, as_wire, merge_patch
from elastane.kubernetes.model.names import POD_GROUP, POD_GROUP_APIS, pod_group_kind
from elastane.kubernetes.reconcile import pods, reconcile

SOME = st.integers(0, 11)
CODES = st.sampled_from([0, 0, 1, 69, 75, 137, 137, 139, 143, 255])
EDITS = (
    st.fixed_dictionaries({"replicas": st.integers(0, 7)})
    | st.fixed_dictionaries({"replicas": st.integers(0, 7)})
    | st.fixed_dictionaries({"minReplicas": st.integers(1, 3), "maxReplicas": st.integers(2, 6)})
    | st.just({"minReplicas": 1, "maxReplicas": 4})
    | st.fixed_dictionaries({"suspend": st.booleans()})
    | st.fixed_dictionaries({"image": st.sampled_from(["train:1", "train:2"])})
    | st.fixed_dictionaries(
        {
            "schedulingPolicy": st.sampled_from(
                [{}, {"podGroup": "Volcano"}, {"podGroup": "Kubernetes"}]
            )
        }
    )
)


@dataclass(frozen=True)
class Asked:
    """The requests of a spec, read without the code under test."""

    most: int
    desired: int
    is_suspended: bool
    is_sliced: bool


def asked_by(job):
    """Return the requests of a spec; None if its bounds contradict each other."""
    spec = job.spec
    least, most = spec["minReplicas"], spec["maxReplicas"]
    if least > most:
        return None
    replicas = spec["replicaSpecs"]["Worker"]["replicas"]
    return Asked(
        most=most,
        desired=sorted((least, replicas, most))[1],
        is_suspended=spec.get("suspend", False),
        is_sliced=spec["scaleDownPolicy"] == "HighestIndex",
    )


class ClusterMachine(RuleBasedStateMachine):
    """Rules are possible events. Invariants and `settle` are the checked properties."""

    @initialize(
        replicas=st.integers(1, 4),
        policy=st.sampled_from(["ExitCode", "OnFailure", "ExitCode", "Never"]),
        scale_down=st.sampled_from(["HighestIndex", "PendingFirst"]),
        limit=st.none() | st.integers(0, 3),
        clean=st.sampled_from([None, "All", "Running"]),
        is_running=st.sampled_from([True, True, False]),
        update=st.sampled_from(["OnDelete", "RollingUpdate"]),
    )
    def begin(self, *, replicas, policy, scale_down, limit, clean, is_running, update="OnDelete"):
        more = {"scaleDownPolicy": scale_down, "nodeQuarantine": {"failures": 2}}
        more["updateStrategy"] = update
        if limit is not None:
            more["backoffLimit"] = limit
        if clean is not None:
            more["runPolicy"] = {"cleanPodPolicy": clean}
        self.cluster = Cluster(spec=spec_of(replicas, policy=policy, **more), reports=True)
        self.ever_counted = set()
        self.ended = None
        if is_running:
            self.all_settles()

    def pod(self, some, wanted=lambda pod: True):
        pods = [pod for _, pod in sorted(self.cluster.pods.items()) if wanted(pod)]
        return pods[some % len(pods)] if pods else None

    def node(self, some):
        names = sorted(self.cluster.nodes)
        return names[some % len(names)]

    # Events of pods and nodes.

    @rule(some=SOME, node=SOME)
    def a_pod_starts(self, some, node):
        pod = self.pod(some, lambda pod: pod.phase == "Pending")
        if pod:
            self.cluster.start(pod, self.node(node))

    @rule(shift=SOME)
    def all_pods_start(self, shift):
        for pod in list(self.cluster.pods.values()):
            self.cluster.start(pod, self.node(pod.index + shift))

    @rule(some=SOME, code=CODES, is_seen=st.booleans())
    def a_pod_ends(self, some, code, is_seen):
        pod = self.pod(some, lambda pod: pod.phase == "Running")
        if pod and self.cluster.job:
            self.cluster.exit(pod, code)
            if is_seen:
                self.cluster.deliver(pod.uid)

    @rule(some=SOME)
    def a_pod_is_evicted(self, some):
        pod = self.pod(some, lambda pod: pod.phase == "Running")
        if pod and self.cluster.job:
            self.cluster.exit(pod, 137, "Evicted")

    @rule(some=SOME)
    def somebody_deletes_a_pod(self, some):
        pod = self.pod(some)
        if pod:
            self.cluster.ask(pod, 30)

    @rule()
    def kubelets_end_what_was_deleted(self):
        self.cluster.end_deleted()

    @rule(some=SOME, seconds=st.sampled_from([0.0, 5.0, 12.0, 60.0]))
    def a_node_is_lost(self, some, seconds):
        self.cluster.lose(self.node(some))
        self.cluster.now_s += seconds

    @rule(some=SOME, is_back=st.booleans())
    def a_node_comes_back_or_is_removed(self, some, is_back):
        if is_back:
            self.cluster.heal(self.node(some))
        else:
            self.cluster.remove_node(self.node(some))

    @rule(seconds=st.sampled_from([0.5, 1.0, 12.0, 45.0, 700.0]))
    def time_passes(self, seconds):
        self.cluster.now_s += seconds

    # Changes of the job by users.

    @rule(edit=EDITS, is_seen=st.booleans())
    def somebody_edits(self, edit, is_seen):
        if self.cluster.job is None:
            return
        spec = copy.deepcopy(self.cluster.job["spec"])
        for key, value in edit.items():
            worker = spec["replicaSpecs"]["Worker"]
            container = worker["template"]["spec"]["containers"][0]
            place = {"replicas": worker, "image": container}.get(key, spec)
            place[key] = value
        self.cluster.edit(spec)
        if is_seen:
            self.cluster.deliver_job()

    @rule(name=st.sampled_from(["j-directive", "j-directive", "j"]), is_seen=st.booleans())
    def somebody_removes_an_object(self, name, is_seen):
        _ = self.cluster.fenced  # The job has read the resize before.
        for key in [key for key in self.cluster.objects if key[1] == name]:
            del self.cluster.objects[key]
            if is_seen:
                self.cluster.seen_objects.pop(key, None)

    @precondition(lambda self: self.cluster.job is not None)
    @rule(surely=st.integers(0, 9))
    def somebody_deletes_the_job(self, surely):
        if surely == 0 and "deletionTimestamp" not in self.cluster.job["metadata"]:
            self.cluster.delete_job()

    # Observations and actions of the operator.

    @rule(some=SOME, of_the_job=st.booleans())
    def news_arrive(self, some, of_the_job):
        uids = sorted({*self.cluster.pods, *self.cluster.seen_pods})
        if uids and not of_the_job:
            self.cluster.deliver(uids[some % len(uids)])
        else:
            self.cluster.deliver_job()

    @rule()
    def all_is_read_anew(self):
        self.cluster.relist()

    @rule(writes=st.integers(0, 6), order=SOME)
    def the_operator_is_killed_in_the_midst(self, writes, order):
        self.operate(writes, order)

    @rule(order=SOME, is_anew=st.booleans())
    def the_operator_decides(self, order, is_anew):
        if is_anew:
            self.cluster.relist()
        self.operate(10_000, order)

    @rule(order=SOME)
    def what_was_decided_is_done_twice(self, order):
        self.cluster.relist()
        decision = self.operate(10_000, order)
        before = copy.deepcopy((self.cluster.job, sorted(self.cluster.pods), self.cluster.objects))
        for action in decision.actions if decision else ():
            self.cluster.do(action)
        after = (self.cluster.job, sorted(self.cluster.pods), self.cluster.objects)
        assert after == before

    def operate(self, writes, order):
        cluster = self.cluster
        if cluster.seen_job is None:
            return None
        seen, now_s = cluster.observed(), cluster.now_s
        assert reconcile(seen, now_s) == reconcile(seen, now_s)
        known = copy.deepcopy(cluster.seen_pods)
        asked = asked_by(seen.job)
        before, done_before = cluster.job and cluster.status, len(cluster.actions)
        decision, is_done = cluster.operate(writes, order)
        self.check_counts(before, known, is_done)
        for action in cluster.actions[done_before:]:
            self.check_deletion(action, known, seen.job.metadata.is_leaving)
            if isinstance(action, CreatePod):
                self.check_creation()
            if isinstance(action, ReleaseLease):
                processes = {**cluster.pods, **cluster.zombies}
                assert not [uid for uid in action.pods if uid in processes and processes[uid].alive]
        if is_done and asked is not None and cluster.job is not None:
            self.check_number(asked)
        return decision if is_done else None

    def check_counts(self, before, known, is_done):
        """Check that each failure is counted in `failures` exactly once."""
        if before is None or self.cluster.job is None:
            return
        after = self.cluster.status
        new = set(after.counted) - set(before.counted)
        assert not new & self.ever_counted
        self.ever_counted |= new
        assert len(set(after.counted)) == len(after.counted)
        in_place = sum(
            one.restarts - {old.uid: old.restarts for old in before.in_place}.get(one.uid, 0)
            for one in after.in_place
        )
        gone = {one.uid for one in before.in_place} - {one.uid for one in after.in_place}
        assert not gone & known.keys()
        failed = {
            uid
            for uid in new
            if uid in known
            and known[uid].failed_by_itself
            and uid not in after.fenced
            # 143: the pod ended by the requested SIGTERM.
            and known[uid].code != 143
        }
        assert after.failures - before.failures == len(failed) + in_place
        assert after.restarts >= before.restarts
        assert after.disruptions >= before.disruptions

    def check_deletion(self, action, known, job_is_leaving):
        """Check that pods are deleted after they are counted, and only fenced ones by force."""
        if not isinstance(action, DeletePod) or job_is_leaving or self.cluster.job is None:
            return
        # A refused write has changed nothing.
        if action.uid in self.cluster.pods and self.cluster.pods[action.uid].asked_s is None:
            return
        assert action.uid in self.cluster.status.counted
        if action.grace_s == 0:
            assert action.uid in self.cluster.fenced

    def check_creation(self):
        """Check that no pod is created for a job that has ended, succeeded, or is suspended."""
        if self.cluster.job is not None:
            status = self.cluster.status
            assert status.ended_well_time is None
            assert status.phase not in ("Succeeded", "Failed", "Suspended")

    def check_number(self, asked):
        staying = [
            pod
            for pod in self.cluster.pods.values()
            if not pod.is_over and pod.asked_s is None and pod.uid not in self.cluster.fenced
        ]
        # Pods of a job that succeeded may finish, whatever number is requested by then.
        if self.cluster.status.ended_well_time is None:
            assert len(staying) <= asked.most
            assert len(staying) <= asked.desired or asked.is_suspended
        if asked.is_suspended or self.cluster.status.phase in ("Succeeded", "Failed"):
            assert not [pod for pod in staying if pod.uid in self.cluster.seen_pods]

    # Checked properties.

    @invariant()
    def no_two_pods_of_one_index_live_unless_one_is_fenced(self):
        cluster = self.cluster
        living = [pod for pod in cluster.pods.values() if not pod.is_over]
        living += [pod for pod in cluster.zombies.values() if pod.alive]
        indices = [pod.index for pod in living if pod.uid not in cluster.fenced]
        assert cluster.job is None or len(indices) == len(set(indices))

    @invariant()
    def no_two_living_pods_are_in_groups_of_two_kinds(self):
        """Each of them would be too small, and a replacement would wait for ever."""
        living = [pod for pod in self.cluster.pods.values() if not pod.is_over and not pod.asked_s]
        living = [pod for pod in living if pod.uid not in self.cluster.fenced]
        kinds = {pod.manifest["metadata"]["annotations"].get(POD_GROUP) for pod in living}
        assert self.cluster.job is None or len(kinds) <= 1

    @invariant()
    def no_pod_that_the_directive_calls_dead_has_processes(self):
        cluster = self.cluster
        processes = {**cluster.pods, **cluster.zombies}
        assert not [uid for uid in cluster.dead if uid in processes and processes[uid].alive]

    @invariant()
    def an_end_is_final(self):
        if self.cluster.job is None:
            return
        status = self.cluster.status
        ended = [kind for kind in ("Succeeded", "Failed") if status.is_(kind)]
        assert len(ended) <= 1
        reason = ended and status.condition(ended[0]).reason
        if self.ended and self.ended[1] not in ("InvalidSpec", "InvalidTemplate"):
            assert [ended, reason] == [[self.ended[0]], self.ended[1]]
        self.ended = (ended[0], reason) if ended else None

    @rule()
    def all_settles(self):
        """Check that without more events the cluster reaches the requested state and keeps it."""
        cluster = self.cluster
        for name in cluster.nodes:
            cluster.heal(name)
        if cluster.job is None:
            return
        before = cluster.status
        decision = cluster.settle()
        if cluster.job is None:
            assert not cluster.pods
            return
        self.ever_counted |= set(cluster.status.counted)
        assert cluster.status.failures >= before.failures
        cluster.relist()
        again = reconcile(cluster.observed(), cluster.now_s)
        assert not again.actions
        assert merge_patch(cluster.job["status"], as_wire(again.status)) is None
        asked = asked_by(cluster.observed().job)
        if asked is not None and decision is not None:
            self.check_settled(asked)

    def check_settled(self, asked):
        cluster = self.cluster
        running = [pod for pod in cluster.pods.values() if pod.phase == "Running"]
        status = cluster.status
        groups = {kind for kind, _ in cluster.objects if kind.startswith("PodGroup")}
        named = {pod.manifest["metadata"]["annotations"].get(POD_GROUP) for pod in running}
        assert groups == {pod_group_kind(POD_GROUP_APIS[name][0]) for name in named if name}
        if asked.is_suspended or status.phase in ("Succeeded", "Failed"):
            assert not running
            return
        if status.ended_well_time is not None:
            return
        if cluster.job["spec"]["updateStrategy"] == "RollingUpdate":
            assert status.outdated == 0
        assert len(running) == asked.desired
        assert len(cluster.pods) == asked.desired
        if asked.is_sliced:
            assert {pod.index for pod in running} == set(range(asked.desired))
        assert status.phase == "Running"
        assert status.is_("Running")
        assert not status.is_("Degraded")
        assert not status.is_("Restarting")
        assert status.ready_replicas == status.replicas == asked.desired

    def teardown(self):
        if hasattr(self, "cluster"):
            self.all_settles()


ClusterMachine.TestCase.settings = settings(
    max_examples=75,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestAnyOrderOfAnything(ClusterMachine.TestCase):
    """Run the state machine above."""


def test_ten_minutes_without_a_failure_end_a_crash_loop():
    """Found by the machine: restarts in place do not change other decisions of the operator."""
    machine = ClusterMachine()
    machine.begin(
        replicas=1,
        policy="OnFailure",
        scale_down="HighestIndex",
        limit=None,
        clean=None,
        is_running=True,
    )
    for _ in range(3):
        machine.a_pod_ends(code=1, is_seen=False, some=0)
    machine.the_operator_decides(is_anew=True, order=0)
    assert machine.cluster.status.phase == "CrashLooping"
    machine.all_settles()


@pytest.mark.parametrize("replicas", [0, 2, 3])
def test_a_pod_that_succeeds_before_its_planned_deletion_is_still_deleted(replicas):
    """Found by the machine: another action failed before the planned deletion."""
    machine = ClusterMachine()
    machine.begin(
        replicas=2,
        policy="ExitCode",
        scale_down="HighestIndex",
        limit=None,
        clean=None,
        is_running=True,
    )
    machine.somebody_edits(edit={"replicas": 0}, is_seen=True)
    machine.somebody_removes_an_object(is_seen=False, name="j-directive")
    machine.the_operator_decides(is_anew=False, order=0)
    if replicas:
        machine.somebody_edits(edit={"replicas": replicas}, is_seen=False)
    machine.a_pod_ends(code=0, is_seen=False, some=1)
    machine.all_settles()


@pytest.mark.parametrize("is_planted", [False, True])
def test_the_invariant_finds_a_pod_called_dead_whose_end_was_not_seen(monkeypatch, is_planted):
    """Planted bug: the pod is deleted by force, and its node is unreachable."""
    if is_planted:
        monkeypatch.setattr(pods, "_was_seen_to_end", lambda worker: True)
    machine = ClusterMachine()
    machine.begin(
        replicas=2,
        policy="ExitCode",
        scale_down="HighestIndex",
        limit=None,
        clean=None,
        is_running=True,
    )
    pod = machine.cluster.by_name("j-worker-1")
    machine.cluster.lose(pod.node)
    machine.cluster.ask(pod, 0)
    machine.cluster.deliver(pod.uid)
    machine.the_operator_decides(order=0, is_anew=False)
    check = machine.no_pod_that_the_directive_calls_dead_has_processes
    if not is_planted:
        check()
        return
    with pytest.raises(AssertionError):
        check()
