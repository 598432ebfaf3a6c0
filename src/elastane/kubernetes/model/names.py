"""Names that users and other programs rely on: of the resource, its labels, its pods, its objects.

Names without our prefix are those of the original TorchElastic controller.
"""

from __future__ import annotations

import re

GROUP = "elastic.pytorch.org"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ElasticJob"
PLURAL = "elasticjobs"
TEMPLATE_KIND = "ElasticJobTemplate"
TEMPLATE_PLURAL = "elasticjobtemplates"
CONTAINER = "elasticjob-worker"
REPLICA_TYPE = "Worker"

LABEL_GROUP = "group-name"
LABEL_JOB = "job-name"
LABEL_TYPE = "replica-type"
LABEL_INDEX = "replica-index"
# The selector of all pods of ElasticJobs.
POD_SELECTOR = f"{LABEL_GROUP}={GROUP}"

# The value of spec.managedBy for a job of this operator; also the meaning of none.
MANAGER = "elastane.dev/operator"

# On each pod that was created for a pod group: its kind, as in spec.schedulingPolicy.podGroup.
POD_GROUP = "elastane.dev/pod-group"
# The APIs of each kind of pod group, the preferred version first.
POD_GROUP_APIS = {
    "Coscheduling": ("scheduling.x-k8s.io/v1alpha1",),
    "Kubernetes": (
        "scheduling.k8s.io/v1beta1",
        "scheduling.k8s.io/v1alpha3",
        "scheduling.k8s.io/v1alpha2",
    ),
    "Volcano": ("scheduling.volcano.sh/v1beta1",),
}

# The ClusterRole that each job's account is bound to; `elastane kubernetes install` makes it.
JOB_ROLE = "elastane-job"

# On each object of the operator: a digest of its manifest, by which a change is noticed.
MADE_OF = "elastane.dev/made-of"
# On each pod: a digest of the template that it was made from.
TEMPLATE_OF = "elastane.dev/template"

# Labels, host names and names of Services have at most 63 characters; "-worker-4095" takes 12.
NAME_CHARS_MAX = 51
# A label of RFC 1123 that begins with a letter, as names of Services must.
NAME_PATTERN = "[a-z]([-a-z0-9]*[a-z0-9])?"

# A label of RFC 1123: the name of a namespace or a container, of at most 63 characters.
_LABEL = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_CHARS_MAX = 63
# A subdomain of RFC 1123: such labels, joined by dots.
_SUBDOMAIN_CHARS_MAX = 253

_POD = re.compile(r"-worker-(\d+)(?:-r(\d+))?$")


def is_label(name: str) -> bool:
    """Whether a namespace or a container can have this name."""
    return len(name) <= _LABEL_CHARS_MAX and _LABEL.fullmatch(name) is not None


def is_subdomain(name: str) -> bool:
    """Whether an object of most kinds can have this name, such as a template or a claim."""
    parts = name.split(".")
    return len(name) <= _SUBDOMAIN_CHARS_MAX and all(_LABEL.fullmatch(part) for part in parts)


def pod_name(job: str, index: int, replacement: int = 0) -> str:
    """Return the name of pod `index`; `replacement` numbers further names while those are taken."""
    name = f"{job}-worker-{index}"
    return f"{name}-r{replacement}" if replacement else name


def index_in(name: str) -> int | None:
    """Return the index that the name of a pod ends with, or None."""
    found = _POD.search(name)
    return int(found[1]) if found else None


def job_labels(job: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return {LABEL_GROUP: GROUP, LABEL_JOB: job}


def pod_labels(job: str, index: int) -> dict[str, str]:
    """Return the labels of pod `index` of a job."""
    return job_labels(job) | {LABEL_TYPE: REPLICA_TYPE.lower(), LABEL_INDEX: str(index)}


def pod_group_kind(api_version: str) -> str:
    """Return the kind of an API's pod groups, in kubectl's spelling: all are named PodGroup."""
    group, _, version = api_version.partition("/")
    return f"PodGroup.{version}.{group}"


def selector(job: str) -> str:
    """Return the selector of a job's pods, as the scale subresource reports it."""
    return f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={job}"
