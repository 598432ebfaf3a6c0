"""A cluster as small as can be, for `reconcile`: an API server, kubelets, nodes, a user, a shell.

All of it is pure: time is a number, and the test says what happens next. The operator reads a copy
that lags behind the truth, object by object, but for its own writes. It may be killed between any
two writes; the next operator begins with a fresh list.
"""

import copy
from dataclasses import dataclass, field

import msgspec
from kube_pods import BEGIN_S, SimPod, spec_of

from elastane.kubernetes.model import (
    CreateObject,
    CreatePod,
    CreateToken,
    DeleteJob,
    DeleteObject,
    DeletePod,
    ElasticJob,
    Observed,
    OwnedObjects,
    PatchObject,
    SeenNode,
    SeenService,
    as_time,
    as_wire,
    merge_patch,
    read_status,
)
from elastane.kubernetes.model.observed import JobReport, MemberReport
from elastane.kubernetes.reconcile import reconcile

__all__ = ["BEGIN_S", "Cluster", "SimPod", "spec_of"]


@dataclass
class Cluster:
    """The truth, and what the operator knows of it."""

    spec: dict
    now_s: float = BEGIN_S
    pods: dict = field(default_factory=dict)
    zombies: dict = field(default_factory=dict)
    objects: dict = field(default_factory=dict)
    nodes: dict = field(default_factory=lambda: {f"n{i}": SeenNode(name=f"n{i}") for i in range(4)})
    report: object = None
    reports: bool = (
        False  # while it settles, the job's coordinator reports the members of its world
    )
    refused: tuple = ()
    unserved: dict = field(default_factory=dict)  # kinds that cannot be read, and why

    def __post_init__(self):
        self.count = 0
        self.removed = {}
        self.ever_fenced = set()
        self.job = {
            "metadata": {
                "name": "j",
                "namespace": "ns",
                "uid": "job00000-1",
                "generation": 1,
                "resourceVersion": "1",
                "creationTimestamp": as_time(self.now_s),
            },
            "spec": self.spec,
            "status": {},
        }
        self.events = []
        self.actions = []
        # Secrets, which the operator may create and never sees.
        self.tokens = set()
        self.start_operator()

    # The API server.

    def _next(self, what):
        self.count += 1
        return f"{what}-{self.count}"

    def _written(self):
        version = int(self.job["metadata"]["resourceVersion"]) + 1
        self.job["metadata"]["resourceVersion"] = str(version)

    def edit(self, spec):
        """A client writes the spec."""
        if self.job is not None and spec != self.job["spec"]:
            self.job["spec"] = copy.deepcopy(spec)
            self.job["metadata"]["generation"] += 1
            self._written()

    @property
    def status(self):
        return read_status(self.job["status"])

    @property
    def fenced(self):
        """Uids that the job itself knows to be fenced: whatever it once read in its directive."""
        directive = self.objects.get(("ConfigMap", "j-directive"))
        if directive:
            self.ever_fenced |= set(directive["data"]["fenced"].split())
        return self.ever_fenced

    def by_name(self, name):
        return next((pod for pod in self.pods.values() if pod.name == name), None)

    # Kubelets, nodes and people.

    def start(self, pod, node):
        """A kubelet starts a pod."""
        if pod.phase == "Pending" and pod.asked_s is None and _is_up(self.nodes[node]):
            pod.phase, pod.node, pod.alive, pod.waiting = "Running", node, True, ""
            pod.started_s = self.now_s

    def exit(self, pod, code, reason=""):
        """The process of a pod ends."""
        if pod.phase != "Running" or not _is_up(self.nodes[pod.node]):
            return
        in_place = self.job["spec"]["replicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
        if in_place and code and not reason:
            pod.restarts, pod.last_code, pod.started_s = pod.restarts + 1, code, self.now_s
            return
        pod.phase = "Failed" if code or reason else "Succeeded"
        pod.code, pod.reason, pod.alive, pod.finished_s = code, reason, False, self.now_s

    def ask(self, pod, grace_s):
        """A client deletes a pod."""
        if grace_s == 0 or pod.asked_s is None:
            pod.asked_s = pod.asked_s if pod.asked_s is not None else self.now_s
            pod.grace_s = grace_s
        if grace_s == 0 or not pod.node or pod.is_over:
            self._remove(pod)

    def _remove(self, pod):
        self.removed[pod.uid] = copy.deepcopy(self.pods.pop(pod.uid))
        if pod.alive and pod.node and not _is_up(self.nodes[pod.node]):
            self.zombies[pod.uid] = pod
        else:
            pod.alive = False

    def end_deleted(self):
        """Kubelets that can be reached end what was deleted."""
        for pod in list(self.pods.values()):
            node = self.nodes.get(pod.node)
            if pod.asked_s is not None and (node is None or _is_up(node)):
                pod.alive = False
                if pod.phase == "Running":
                    pod.phase, pod.code, pod.finished_s = "Failed", 143, self.now_s
                self._remove(pod)

    def lose(self, name):
        if _is_up(self.nodes[name]):
            self.nodes[name] = SeenNode(name=name, unreachable_since_s=self.now_s)

    def remove_node(self, name):
        self.nodes[name] = SeenNode(name=name, exists=False)

    def heal(self, name):
        self.nodes[name] = SeenNode(name=name)
        for pod in [pod for pod in self.zombies.values() if pod.node == name]:
            del self.zombies[pod.uid]
        self.end_deleted()

    def delete_job(self):
        """In the foreground: the garbage collector deletes what the job owns, then the job goes."""
        self.job["metadata"]["deletionTimestamp"] = as_time(self.now_s)
        self._written()

    def collect(self):
        """The garbage collector, of a job that is being deleted."""
        if self.job is None or "deletionTimestamp" not in self.job["metadata"]:
            return
        for pod in list(self.pods.values()):
            if pod.asked_s is None:
                self.ask(pod, 30)
        self.objects.clear()
        self.tokens.clear()
        if not self.pods:
            self.job = None

    # What the operator knows.

    def start_operator(self):
        """A new process knows what it lists, and of nothing how it went."""
        self.seen_gone = {}
        self.relist()

    def relist(self):
        """List all objects again; those deleted meanwhile are missing, without their last state."""
        self.seen_job = copy.deepcopy(self.job)
        self.seen_pods = {uid: copy.deepcopy(pod) for uid, pod in self.pods.items()}
        self.seen_objects = copy.deepcopy(self.objects)

    def deliver(self, uid):
        """News of one pod arrive."""
        if uid in self.pods:
            self.seen_pods[uid] = copy.deepcopy(self.pods[uid])
        else:
            self.seen_pods.pop(uid, None)
            if uid in self.removed:
                self.seen_gone[uid] = self.removed[uid]

    @property
    def dead(self):
        """Uids that the directive calls dead."""
        directive = self.objects.get(("ConfigMap", "j-directive"))
        return directive["data"]["dead"].split() if directive else []

    def deliver_job(self):
        self.seen_job = copy.deepcopy(self.job)

    def observed(self):
        objects = [
            OwnedObjects(
                kind=kind,
                metadata=msgspec.convert(one["metadata"], type(ElasticJob().metadata)),
                data=one.get("data", {}),
            )
            for (kind, _), one in self.seen_objects.items()
            if kind != "Service"
        ]
        services = [
            msgspec.convert({"metadata": one["metadata"]}, SeenService)
            for (kind, _), one in self.seen_objects.items()
            if kind == "Service"
        ]
        return Observed(
            job=msgspec.convert(copy.deepcopy(self.seen_job), ElasticJob),
            pods=tuple(pod.as_api() for pod in self.seen_pods.values()),
            gone=tuple(pod.as_api() for uid, pod in self.seen_gone.items() if uid not in self.dead),
            services=tuple(services),
            objects=tuple(objects),
            nodes=dict(self.nodes),
            report=self.report,
            refused=self.refused,
            unserved=self.unserved,
        )

    # The shell.

    def operate(self, writes_max=10_000, order=0):
        """Decide once and act, with at most `writes_max` writes; then the operator is killed.

        Returns the decision, and whether all of it was done.
        """
        if self.seen_job is None:
            return None, True
        decision = reconcile(self.observed(), self.now_s)
        steps = self._steps(decision, order)
        self.events += decision.events
        for done, step in enumerate(steps):
            if done == writes_max:
                self.start_operator()
                return decision, False
            if not step():
                return decision, False
        return decision, True

    def _steps(self, decision, order):
        after = decision.status
        patch = None if after is None else merge_patch(self.seen_job["status"], as_wire(after))
        steps = [lambda: self._write_status(patch)] if patch else []
        on_pods = [a for a in decision.actions if isinstance(a, (CreatePod, DeletePod, DeleteJob))]
        others = [a for a in decision.actions if a not in on_pods]
        if on_pods:
            turn = order % len(on_pods)
            on_pods = on_pods[turn:] + on_pods[:turn]
        return [*steps, *(lambda action=action: self.do(action) for action in others + on_pods)]

    def _write_status(self, patch):
        if self.job is None or self._versions_differ():
            self.deliver_job()
            return False
        self.job["status"] = _merged(self.job["status"], patch)
        self._written()
        self.deliver_job()
        return True

    def _versions_differ(self):
        versions = [one["metadata"]["resourceVersion"] for one in (self.job, self.seen_job)]
        return versions[0] != versions[1]

    def do(self, action):
        """Carry out one action, also one that was carried out already.

        Returns False where the rest of its decision is not done, as the shell does after a patch
        of what is another by now.
        """
        self.actions.append(action)
        if isinstance(action, (CreateObject, DeleteObject)):
            self._change_object(action)
        elif isinstance(action, CreateToken):
            self.tokens.add(action.name)
        elif isinstance(action, PatchObject):
            return self._patch(action)
        elif isinstance(action, CreatePod):
            self._create_pod(action)
        elif isinstance(action, DeletePod):
            pod = self.pods.get(action.uid)
            if pod is not None:
                self.ask(pod, 30 if action.grace_s is None else action.grace_s)
            self.deliver(action.uid)
        elif isinstance(action, DeleteJob) and self.job is not None:
            self.delete_job()
        return True

    def _change_object(self, action):
        key = action.kind, action.name
        if isinstance(action, DeleteObject):
            self.objects.pop(key, None)
        elif key not in self.objects:
            self.objects[key] = copy.deepcopy(action.manifest)
            self.objects[key]["metadata"]["uid"] = self._next("object")
        self._deliver_object(action)

    def _patch(self, action):
        uid = action.patch["metadata"]["uid"]
        if action.kind == "Pod":
            pod = self.by_name(action.name)
            is_it = pod is not None and pod.uid == uid
            if is_it:
                meta = pod.manifest["metadata"]
                pod.manifest["metadata"] = _merged(meta, action.patch["metadata"])
            self.deliver(uid)
            return is_it
        found = self.objects.get((action.kind, action.name))
        is_it = found is not None and found["metadata"]["uid"] == uid
        if is_it:
            self.objects[action.kind, action.name] = _merged(found, action.patch)
        self._deliver_object(action)
        return is_it

    def _deliver_object(self, action):
        key = action.kind, action.name
        if key in self.objects:
            self.seen_objects[key] = copy.deepcopy(self.objects[key])
        else:
            self.seen_objects.pop(key, None)

    def _create_pod(self, action):
        there = self.by_name(action.name)
        if there is not None:
            self.deliver(there.uid)
            return
        pod = SimPod(
            uid=self._next("pod"),
            name=action.name,
            index=action.index,
            manifest=copy.deepcopy(action.manifest),
            created_s=self.now_s,
        )
        self.pods[pod.uid] = pod
        self.deliver(pod.uid)

    def tell_who_is_in(self, without=(), **more):
        """The coordinator has all pods that run in its world, but those of some indices."""
        uids = [pod.uid for pod in self.pods.values() if pod.alive and pod.index not in without]
        members = [MemberReport(pod=uid, state="joined", rank=i) for i, uid in enumerate(uids)]
        more = {"world_size": len(uids)} | more
        self.report = JobReport(at_s=self.now_s, members=tuple(members), **more)

    def _all(self):
        pods = sorted((uid, pod.phase, pod.asked_s) for uid, pod in self.pods.items())
        return copy.deepcopy((self.job, self.objects)), pods

    def settle(self, turns=60, pass_s=400.0):
        """Let everything happen that happens by itself, until nothing does any more.

        Nothing has changed for two passes by then: a crash loop is over only after ten minutes.
        """
        quiet = 0
        for _ in range(turns):
            before = self._all()
            self.collect()
            self.end_deleted()
            up = [name for name, node in self.nodes.items() if _is_up(node)]
            for pod in list(self.pods.values()):
                if up and not pod.waiting:
                    self.start(pod, up[pod.index % len(up)])
            self.relist()
            self.now_s += pass_s
            if self.reports:
                self.tell_who_is_in()
            decision, _ = self.operate()
            quiet = quiet + 1 if self._all() == before else 0
            if quiet == 2:
                return decision
        raise AssertionError(f"nothing settles: {decision}")


def _is_up(node):
    return node.exists and node.unreachable_since_s is None


def _merged(before, patch):
    """RFC 7396, as the API server does it."""
    made = dict(before)
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict):
            made[key] = _merged(made.get(key) if isinstance(made.get(key), dict) else {}, value)
        else:
            made[key] = copy.deepcopy(value)
    return made
