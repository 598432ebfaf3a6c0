"""The reasons why pods do not run are reported, and a job that can never begin fails."""

import msgspec
import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import Pod


class Pending(Cluster):
    """A cluster whose pods do not start, by their status."""

    def __init__(self, reason, message="no", replicas=1):
        self.reason, self.message = reason, message
        super().__init__(spec=spec_of(replicas))

    def observed(self):
        seen = super().observed()
        pods = []
        for pod in seen.pods:
            raw = msgspec.to_builtins(pod)
            if raw["status"].get("phase", "Pending") == "Pending":
                raw["status"] = self._status()
            pods.append(msgspec.convert(raw, Pod))
        return msgspec.structs.replace(seen, pods=tuple(pods))

    def _status(self):
        if self.reason == "Unschedulable":
            said = {"reason": self.reason, "message": self.message}
            return {"conditions": [{"type": "PodScheduled", "status": "False"} | said]}
        waiting = {"waiting": {"reason": self.reason, "message": self.message}}
        image = {"name": "elasticjob-worker", "image": "train:1"}
        return {"containerStatuses": [image | {"state": waiting}]}

    def decide(self, after_s=0.0):
        self.now_s += after_s
        self.relist()
        return self.operate()[0]


TERMINAL = [
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError",
]  # fmt: skip


@pytest.mark.parametrize("reason", [*TERMINAL, "Unschedulable"])
def test_the_reason_why_a_pod_does_not_run_is_in_a_condition_and_an_event(reason):
    cluster = Pending(reason, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    cluster.decide()
    decision = cluster.decide()
    condition = cluster.status.condition("Running")
    assert (condition.status, condition.reason) == ("False", reason)
    assert "j-worker-0" in condition.message
    assert "Insufficient nvidia.com/gpu" in condition.message
    assert reason in [event.reason for event in decision.events]
    assert cluster.status.workers[0].reason == reason
    assert cluster.status.phase == "Pending"
    assert 0 < decision.again_in_s <= 30


@pytest.mark.parametrize("reason", TERMINAL)
def test_a_job_that_cannot_begin_for_its_template_fails_after_ten_minutes(reason):
    cluster = Pending(reason, "manifest unknown")
    cluster.decide()
    cluster.decide()
    cluster.decide(599)
    assert cluster.status.phase == "Pending"
    cluster.decide(1)
    failed = cluster.status.condition("Failed")
    assert failed.reason == "InvalidTemplate"
    assert failed.message.startswith("spec.replicaSpecs.Worker.template: j-worker-0: " + reason)
    assert "manifest unknown" in failed.message
    assert cluster.decide(60).again_in_s is None


def test_the_name_of_the_image_is_reported():
    cluster = Pending("ErrImagePull", "not found")
    cluster.decide()
    cluster.decide()
    assert "image train:1: not found" in cluster.status.condition("Running").message


def test_an_image_whose_name_is_no_name_fails_the_job_at_once():
    cluster = Pending("InvalidImageName", "couldn't parse image reference")
    cluster.decide()
    cluster.decide()
    assert cluster.status.condition("Failed").reason == "InvalidTemplate"


def test_a_job_without_room_waits_for_ever():
    cluster = Pending("Unschedulable")
    cluster.decide()
    cluster.decide(100_000)
    cluster.decide(100_000)
    assert cluster.status.phase == "Pending"


def test_waiting_for_room_does_not_count_as_waiting_for_the_image():
    cluster = Pending("Unschedulable")
    cluster.decide()
    cluster.decide(100_000)
    cluster.reason = "ErrImagePull"
    cluster.decide()
    cluster.decide(599)
    assert cluster.status.phase == "Pending"


def test_a_registry_that_is_away_does_not_end_a_job_that_ran():
    cluster = Pending("", replicas=2)
    cluster.decide()
    cluster.start(cluster.by_name("j-worker-0"), "n0")
    cluster.decide()
    cluster.reason = "ImagePullBackOff"
    cluster.decide()
    cluster.decide(100_000)
    assert cluster.status.is_("Running")
    assert cluster.status.condition("Degraded").reason == "ImagePullBackOff"


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", ""])
def test_coming_up_is_no_hindrance(reason):
    cluster = Pending(reason)
    cluster.decide()
    decision = cluster.decide()
    assert cluster.status.condition("Degraded") is None
    assert decision.events == ()


def test_one_reason_of_many_pods_is_reported_once_with_their_number():
    cluster = Pending("Unschedulable", "no room", replicas=4)
    cluster.decide()
    decision = cluster.decide()
    told = [event.message for event in decision.events if event.reason == "Unschedulable"]
    assert told == ["j-worker-0 and 3 more: Unschedulable: no room"]


def test_a_container_that_crashes_again_and_again_in_place_is_named():
    cluster = Pending("CrashLoopBackOff", "back-off 40s restarting failed container")
    cluster.decide()
    cluster.decide()
    assert cluster.status.condition("Running").reason == "CrashLoopBackOff"
