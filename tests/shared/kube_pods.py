"""Specs and pods for tests of `reconcile`: as a user writes them, and as kubelets tell them."""

import copy
from dataclasses import dataclass

import msgspec

from elastane.kubernetes.model import Pod, as_time

BEGIN_S = 1_000_000_000.0
CONTAINER = "elasticjob-worker"


def spec_of(replicas=2, least=1, most=4, policy="ExitCode", **more):
    """A spec as a user writes it."""
    container = {"name": CONTAINER, "image": "train:1", "args": ["train.py"]}
    template = {"spec": {"containers": [container]}}
    worker = {"replicas": replicas, "restartPolicy": policy, "template": template}
    bounds = {"minReplicas": least, "maxReplicas": most}
    return bounds | {"replicaSpecs": {"Worker": worker}} | more


@dataclass
class SimPod:
    """A pod, and whether its process lives, which no API server knows."""

    uid: str
    name: str
    index: int
    manifest: dict
    created_s: float
    phase: str = "Pending"
    node: str = ""
    alive: bool = False
    reason: str = ""
    code: int | None = None
    started_s: float = 0.0
    finished_s: float = 0.0
    asked_s: float | None = None
    grace_s: int = 0
    restarts: int = 0
    last_code: int | None = None
    waiting: str = ""
    ended_as: str = ""
    init_started_s: float = 0.0
    said: str = ""

    @property
    def is_over(self):
        return self.phase in ("Succeeded", "Failed")

    @property
    def failed_by_itself(self):
        """Failed, and for no reason of the cluster's."""
        return self.phase == "Failed" and self.reason == "" and self.asked_s is None

    def as_api(self):
        """The pod as the API server tells it."""
        meta = copy.deepcopy(self.manifest["metadata"]) | {
            "uid": self.uid,
            "creationTimestamp": as_time(self.created_s),
        }
        if self.asked_s is not None:
            meta["deletionTimestamp"] = as_time(self.asked_s + self.grace_s)
            meta["deletionGracePeriodSeconds"] = self.grace_s
        status = {"phase": self.phase, "reason": self.reason}
        state = self._state()
        if state:
            last = (
                {"terminated": {"exitCode": self.last_code, "message": self.said}}
                if self.restarts
                else {}
            )
            status["containerStatuses"] = [
                {
                    "name": CONTAINER,
                    "restartCount": self.restarts,
                    "state": state,
                    "lastState": last,
                }
            ]
        if self.init_started_s:
            ran = {"running": {"startedAt": as_time(self.init_started_s)}}
            status["initContainerStatuses"] = [{"name": "init", "state": ran}]
        spec = {"nodeName": self.node}
        return msgspec.convert({"metadata": meta, "spec": spec, "status": status}, Pod)

    def _state(self):
        if self.phase == "Running":
            return {"running": {"startedAt": as_time(self.started_s)}}
        if self.code is not None:
            times = {"startedAt": as_time(self.started_s), "finishedAt": as_time(self.finished_s)}
            times |= {"reason": self.ended_as} if self.ended_as else {}
            return {"terminated": {"exitCode": self.code, "message": self.said} | times}
        return {"waiting": {"reason": self.waiting}} if self.waiting else {}
