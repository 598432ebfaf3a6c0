"""Jobs that name a template: how their spec is made, once, and what is reported if it cannot be."""

import copy
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from kube_cluster import BEGIN_S, spec_of

from elastane.kubernetes.model import (
    ElasticJob,
    JobStatus,
    JobTemplate,
    Meta,
    Observed,
    PatchObject,
    Refusal,
    as_time,
    as_wire,
)
from elastane.kubernetes.reconcile import reconcile, template_to_read
from elastane.kubernetes.schema import definition, template_definition

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes-templates.md"

REF = {"name": "gpu"}


def template(edition=3, overridable=None, **job):
    whole = copy.deepcopy(spec_of(2, 1, 4)) | {"stalledSeconds": 60, "launcher": "elastane"} | job
    container = whole["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {
        "image": "own",
        "args": ["--max-restarts=9"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    }
    spec = {"job": whole} | ({} if overridable is None else {"overridable": overridable})
    return JobTemplate(metadata=Meta(name="gpu", edition=edition), spec=spec)


class Server:
    """A job that names a template, and the decisions about it."""

    def __init__(self, ref=REF, found=None, age_s=0.0, **beside):
        self.spec = {"templateRef": copy.deepcopy(ref)} | beside
        self.found = found
        self.status, self.edition = {}, 1
        self.now_s = BEGIN_S + age_s
        self.refused = ()

    def job(self):
        meta = Meta(
            name="j",
            namespace="ns",
            uid="u",
            edition=self.edition,
            resource_version="7",
            creation_timestamp=as_time(BEGIN_S),
        )
        return ElasticJob(metadata=meta, spec=copy.deepcopy(self.spec), status=self.status)

    def decide(self):
        seen = Observed(job=self.job(), template=self.found, refused=self.refused)
        decision = reconcile(seen, self.now_s)
        if decision.status is not None:
            self.status = as_wire(decision.status)
        for action in decision.actions:
            if isinstance(action, PatchObject) and action.kind == "ElasticJob":
                self.edition += 1
                _merge(self.spec, action.patch["spec"])
        return decision

    def failure(self):
        found = {one["type"]: one for one in self.status.get("conditions", ())}
        return found.get("Failed", {}).get("message")

    @property
    def container(self):
        return self.spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def _merge(into, patch):
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def test_a_job_gets_the_spec_of_its_template_with_its_own_values():
    ref = REF | {
        "image": "mine",
        "args": ["train.py"],
        "env": [{"name": "B", "value": "3"}],
        "replicas": 3,
        "maxReplicas": 8,
    }
    # The API server has written a default beside it.
    server = Server(ref, template(), stalledSeconds=600, suspend=True)
    (patch,) = server.decide().actions
    assert patch.patch["metadata"] == {"uid": "u", "resourceVersion": "7"}
    worker = server.spec["replicaSpecs"]["Worker"]
    assert (server.spec["minReplicas"], worker["replicas"], server.spec["maxReplicas"]) == (1, 3, 8)
    assert server.spec["stalledSeconds"] == 60 and server.spec["suspend"] is True
    assert server.container["image"] == "mine"
    assert server.container["args"] == ["--max-restarts=9", "train.py"]
    assert server.container["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]
    server.decide()
    assert server.status["phase"] == "Suspended"
    assert server.status["jobTemplate"] == "gpu, edition 3"


@pytest.mark.parametrize("found", [template(4, stalledSeconds=5), None])
def test_neither_an_edit_nor_the_deletion_of_a_template_changes_a_job_of_it(found):
    server = Server(found=template())
    server.decide()
    before = copy.deepcopy(server.spec)
    server.decide()
    server.found = found
    assert template_to_read(server.job()) is None
    server.decide()
    assert server.spec == before and server.failure() is None
    assert server.status["jobTemplate"] == "gpu, edition 3"


def test_an_edit_of_the_reference_makes_the_spec_of_the_present_template():
    server = Server(REF | {"args": ["a.py"]}, template())
    server.decide()
    server.spec["nodeLostSeconds"] = 99
    server.spec["templateRef"]["args"] = ["b.py"]
    server.found = template(4)
    server.decide()
    assert server.container["args"] == ["--max-restarts=9", "b.py"]
    assert server.spec["templateRef"]["made"]["edition"] == 4
    assert "nodeLostSeconds" not in server.spec
    assert template_to_read(server.job()) is None


def test_a_job_waits_for_its_template_and_begins():
    server = Server()
    decision = server.decide()
    what = 'spec.templateRef.name = "gpu": expected the name of an ElasticJobTemplate'
    assert server.failure() == f"{what} in namespace ns"
    assert decision.again_in_s == 1.0
    assert not server.decide().events, "it is said once"
    server.found = template()
    server.decide()
    decision = server.decide()
    assert server.failure() is None
    assert [one for one in decision.actions if type(one).__name__ == "CreatePod"]


@pytest.mark.parametrize(("age_s", "again_in_s"), [(0, 1.0), (100, 10.0), (10_000, 30.0)])
def test_a_missing_template_is_read_less_and_less_often(age_s, again_in_s):
    server = Server(age_s=age_s)
    assert server.decide().again_in_s == server.decide().again_in_s == again_in_s


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (
            Server(REF | {"image": "x"}, template(overridable=["args", "replicas"])),
            'spec.templateRef.image = "x": expected nothing: ElasticJobTemplate gpu lets a job'
            " set args, replicas",
        ),
        (Server(REF | {"args": ["x"]}, template(overridable=[])), "lets a job set nothing"),
        (
            Server(found=template(), stalledSeconds=5),
            "spec.stalledSeconds = 5: expected nothing beside templateRef: ElasticJobTemplate gpu"
            " has it",
        ),
        (
            Server(found=template(), runPolicy={"backoffLimit": 1}),
            "spec.backoffLimit = 1: expected nothing beside templateRef",
        ),
        (
            Server(REF | {"minReplicas": 9}, template()),
            "ElasticJobTemplate gpu, edition 3: spec.minReplicas = 9: expected at most"
            " maxReplicas, which is 4",
        ),
        (
            Server(found=template(spares=99)),
            "ElasticJobTemplate gpu, edition 3: spec.spares = 99",
        ),
        (
            Server(found=JobTemplate(metadata=Meta(name="gpu"), spec=None)),
            "an ElasticJobTemplate with spec.job",
        ),
        (Server({"name": "no/name"}), 'spec.templateRef.name = "no/name": expected the name'),
        (Server(REF | {"env": ["A=b"]}, template()), "spec.templateRef.env"),
    ],
)
def test_the_reason_why_no_spec_can_be_made_is_reported(server, said):
    decision = server.decide()
    assert not decision.actions and said in server.failure()
    assert [one.reason for one in decision.events] == ["InvalidSpec"]


def test_the_refusal_of_a_spec_that_was_made_is_reported_once_and_the_spec_made_again_later():
    server = Server(found=template())
    why = 'ElasticJob "j" is invalid: spec.minReplicas: Invalid value: 1'
    server.refused = (
        Refusal(verb="patch", kind="ElasticJob", name="j", code=422, message=why, at_s=BEGIN_S),
    )
    decision = server.decide()
    assert not decision.actions
    assert server.failure() == (
        'spec.templateRef.name = "gpu": expected an ElasticJobTemplate of which the API server'
        f" accepts a job; it answered: {why}"
    )
    (event,) = decision.events
    assert (event.type, event.reason) == ("Warning", "InvalidSpec") and why in event.message
    server.now_s += 0.25
    decision = server.decide()
    assert not decision.events and decision.again_in_s == 0.75
    server.now_s += decision.again_in_s
    assert server.decide().actions, "it is made again"
    server.refused = ()
    server.decide()
    assert server.failure() is None


def test_another_fault_of_a_template_replaces_the_first():
    server = Server(found=template(spares=99))
    server.decide()
    server.found = template(4, stalledSeconds=-1)
    server.decide()
    assert "edition 4: spec.stalledSeconds" in server.failure()


def test_a_job_that_has_ended_keeps_its_spec():
    server = Server(found=template())
    server.decide()
    end = {"type": "Succeeded", "status": "True", "reason": "x", "message": "y"}
    server.status = as_wire(JobStatus()) | {"conditions": [end]}
    server.spec["templateRef"]["args"] = ["other.py"]
    assert not server.decide().actions


def test_the_job_of_the_page_is_made_of_its_template():
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    offered, asked = map(yaml.safe_load, blocks)
    for made, manifest in ((template_definition(), offered), (definition(), asked)):
        schema = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        jsonschema.validate(manifest, schema)
    found = JobTemplate(metadata=Meta(name="gpu-8", edition=1), spec=offered["spec"])
    server = Server(asked["spec"]["templateRef"], found)
    server.decide()
    assert server.failure() is None
    assert server.spec["replicaSpecs"]["Worker"]["replicas"] == 4
    assert server.container["args"] == [
        "--nproc-per-node=8", "--max-restarts=100", "train.py", "--dir=/checkpoints/train"
    ]  # fmt: skip
