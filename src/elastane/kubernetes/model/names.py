"""Names that are a contract: of the resource, its labels, its pods and what belongs to it.

Those without a prefix of ours are the original TorchElastic controller's, kept as they were.
"""

from __future__ import annotations

import re

GROUP = "elastic.pytorch.org"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ElasticJob"
PLURAL = "elasticjobs"
CONTAINER = "elasticjob-worker"
REPLICA_TYPE = "Worker"

LABEL_GROUP = "group-name"
LABEL_JOB = "job-name"
LABEL_TYPE = "replica-type"
LABEL_INDEX = "replica-index"
# The selector of all pods of ElasticJobs.
POD_SELECTOR = f"{LABEL_GROUP}={GROUP}"

# The ClusterRole that each job's account is bound to; `elastane kubernetes install` makes it.
JOB_ROLE = "elastane-job"

# On each object of the operator: a digest of its manifest, which shows a changed one.
MADE_OF = "elastane.dev/made-of"
# On each pod: a digest of the template that it was made from.
TEMPLATE_OF = "elastane.dev/template"

# Labels, host names and names of Services hold 63 characters; "-worker-4095" is 12 of them.
NAME_CHARS_MAX = 51
# A label of RFC 1123 that begins with a letter, as names of Services must.
NAME_PATTERN = "[a-z]([-a-z0-9]*[a-z0-9])?"

_POD = re.compile(r"-worker-(\d+)(?:-r(\d+))?$")


def pod_name(job: str, index: int, replacement: int = 0) -> str:
    """Return the name of pod `index`; `replacement` counts pods whose name was still taken."""
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


def selector(job: str) -> str:
    """Return the selector of a job's pods, as the scale subresource reports it."""
    return f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={job}"
