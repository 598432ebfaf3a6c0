"""The types on the wire: no field is lost or written twice, and no value stops a job."""

import copy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import (
    ElasticJob,
    JobStatus,
    Meta,
    as_time,
    as_wire,
    merge_patch,
    read_status,
    since_epoch,
)
from elastane.kubernetes.model.names import index_in, pod_name

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from("abc"), inner.filter(lambda v: v is not None), max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), JSON.filter(lambda v: v is not None), max_size=3)


def merged(before, patch):
    """Merge a patch by the algorithm of RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(OBJECTS, OBJECTS)
def test_a_patch_makes_of_one_what_the_other_is(before, after):
    patch = merge_patch(before, after)
    if patch is None:
        assert before == after
    else:
        assert merged(copy.deepcopy(before), patch) == after


def test_a_status_that_was_written_is_read_as_it_was_and_needs_no_patch():
    cluster = Cluster(spec=spec_of())
    cluster.settle()
    written = msgspec.json.decode(msgspec.json.encode(cluster.job["status"]))
    assert merge_patch(written, as_wire(read_status(written))) is None


def test_an_unreadable_field_does_not_lose_the_others():
    raw = {"failures": 3, "restarts": "many", "counted": ["a"], "conditions": [{"type": 1}]}
    status = read_status(raw)
    assert (status.failures, status.counted) == (3, ("a",))
    assert (status.restarts, status.conditions) == (0, ())


@pytest.mark.parametrize("raw", [None, [], "x", {}, {"phase": None}, {"unknown": 1}])
def test_no_status_however_strange_raises(raw):
    assert read_status(raw) == JobStatus()


@pytest.mark.parametrize("time", [None, "", "yesterday", "2026-13-01T00:00:00Z"])
def test_an_invalid_time_is_none(time):
    assert since_epoch(time) is None


def test_times_are_the_servers():
    assert as_time(1_000_000_000.9) == "2001-09-09T01:46:40Z"
    assert since_epoch("2001-09-09T01:46:40Z") == 1_000_000_000
    assert since_epoch("2001-09-09T03:46:40+02:00") == 1_000_000_000
    assert since_epoch("2001-09-09T01:46:40") == 1_000_000_000


def test_unknown_fields_of_a_job_are_kept():
    text = b'{"metadata": {"generation": 3}, "spec": {"new": [1]}, "status": {"other": 2}}'
    job = msgspec.json.decode(text, type=ElasticJob)
    assert (job.metadata.edition, job.spec, job.status) == (3, {"new": [1]}, {"other": 2})


def test_a_controller_is_the_owner_that_says_so():
    owners = [{"uid": "a"}, {"uid": "b", "controller": True}]
    assert msgspec.convert({"ownerReferences": owners}, Meta).controller == "b"
    assert Meta().controller == ""


def test_names_of_pods_tell_their_index():
    assert pod_name("a-worker-7", 3) == "a-worker-7-worker-3"
    assert index_in(pod_name("a-worker-7", 3)) == 3
    assert index_in(pod_name("j", 12, 2)) == 12
    assert index_in("j-worker-x") is None
