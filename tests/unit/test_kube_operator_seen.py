"""The operator's caches, and the objects that they give to a decision."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.kubernetes.model import ElasticJob, Meta, Owner, Pod, Refusal
from elastane.kubernetes.model.names import job_labels
from elastane.kubernetes.model.observed import PodSpec
from elastane.kubernetes.operator import informer as cache_module
from elastane.kubernetes.operator import view as view_module
from elastane.kubernetes.operator.informer import Cache
from elastane.kubernetes.operator.probes import Probes, make_metrics
from elastane.kubernetes.operator.queue import KeyedQueue
from elastane.kubernetes.operator.view import ClusterView, KubernetesNode, OwnedKind, node_state


def pod(name="p", version=1, uid="u", namespace="n", **labels):
    meta = Meta(
        name=name, namespace=namespace, uid=uid, resource_version=str(version), labels=labels
    )
    return Pod(metadata=meta)


def cache():
    changes = []
    return Cache(lambda before, after: changes.append((before, after))), changes


def test_written_objects_stay_cached_until_the_watch_catches_up():
    held, changes = cache()
    held.wrote(pod(version=5))
    held.saw(pod(version=3))
    assert held.get("n/p").metadata.resource_version == "5"
    held.saw(pod(version=5))
    assert len(changes) == 1, "its echo is no change"
    held.saw(pod(version=6))
    assert held.get("n/p").metadata.resource_version == "6"


def test_an_answer_that_is_late_brings_nothing_back():
    held, _ = cache()
    held.saw(pod(version=2))
    held.saw_gone(pod(version=4))
    held.wrote(pod(version=3))
    assert held.get("n/p") is None


def test_a_successor_of_the_name_is_not_removed_with_its_predecessor():
    held, _ = cache()
    held.saw(pod(uid="old", version=2))
    held.wrote(pod(uid="new", version=5))
    held.saw_gone(pod(uid="old", version=4))
    held.saw(pod(uid="old", version=3))
    assert held.get("n/p").metadata.uid == "new"


def test_a_list_removes_what_is_gone_and_keeps_what_was_written_after_it():
    held, _ = cache()
    held.saw(pod("gone", uid="a", version=2))
    held.wrote(pod("young", uid="b", version=9))
    held.retain(set(), "7")
    assert held.get("n/gone") is None
    assert held.get("n/young") is not None


def test_versions_that_are_no_numbers_leave_the_watch_right():
    held, _ = cache()
    held.wrote(pod(version="x1"))
    held.saw(pod(version="x2"))
    assert held.get("n/p").metadata.resource_version == "x2"


@given(st.lists(st.tuples(st.sampled_from("wsg"), st.integers(1, 4), st.integers(1, 30))))
def test_indexes_hold_what_the_cache_holds(steps):
    held, _ = cache()
    by_name = held.index(lambda one: one.metadata.labels.get("job", ""))
    for what, number, version in steps:
        one = pod(f"p{number}", version=version, uid=f"u{version % 3}", job=f"j{version % 2}")
        {"w": held.wrote, "s": held.saw, "g": held.saw_gone}[what](one)
    in_index = sorted(one.metadata.name for key in ("j0", "j1") for one in by_name[key])
    assert in_index == sorted(one.metadata.name for one in held)


@given(st.permutations(range(6)))
def test_the_newest_version_stays_for_any_order_of_answers_and_watch_events(order):
    """The watch reports a pod's life in order; answers to writes come in any order."""
    held, _ = cache()
    watched = iter(range(1, 7))
    for number in order:
        if number % 2:
            held.wrote(pod(version=number))
        else:
            held.saw(pod(version=next(watched)))
    for version in watched:
        held.saw(pod(version=version))
    assert held.get("n/p").metadata.resource_version == "6"


def view_with_job():
    told = []
    view = ClusterView(told.append, lambda key, delay_s: told.append((key, delay_s)))
    meta = Meta(name="x", namespace="n", uid="J", resource_version="1", edition=1)
    view.jobs.saw(ElasticJob(metadata=meta))
    told.clear()
    return view, meta, told


def test_all_that_carries_the_jobs_label_is_given_to_its_decision():
    view, _, told = view_with_job()
    mine = pod("x-worker-0", **job_labels("x"))
    view.pods.saw(mine)
    view.pods.saw(pod("y-worker-0", uid="v", **job_labels("y")))
    view.pods.saw(pod("x-worker-1", uid="w", namespace="m", **job_labels("x")))
    seen = view.observed("n/x")
    assert seen.pods == (mine,)
    assert told == ["n/x", "n/y", "m/x"]
    assert view.observed("n/y") is None


def test_a_deleted_pod_is_kept_as_its_watch_saw_it_last_until_the_directive_names_it():
    view, _, told = view_with_job()
    view.pods.saw(pod("x-worker-0", **job_labels("x")))
    view.pods.lacks("n/x-worker-0", "u")  # Our own deletion was answered before the watch told.
    told.clear()
    last = pod("x-worker-0", version=7, **job_labels("x"))
    view.pods.saw_gone(last)
    view.pods.saw_gone(pod("y-worker-0", uid="v", **job_labels("y")))
    assert told == ["n/x"] and view.observed("n/x").gone == (last,)
    labels = Meta(name="x-directive", namespace="n", uid="D", labels=job_labels("x"))
    view.owned["ConfigMap"].saw(OwnedKind(metadata=labels, data={"dead": "u w"}))
    assert view.observed("n/x").gone == ()


def test_kept_deleted_pods_of_a_job_are_bounded_by_its_size(monkeypatch):
    monkeypatch.setattr(view_module, "GONE_MAX", 3)
    view, _, _ = view_with_job()
    for number in range(5):
        view.pods.saw_gone(pod(f"x-worker-{number}", uid=f"u{number}", **job_labels("x")))
    assert [one.metadata.uid for one in view.observed("n/x").gone] == ["u2", "u3", "u4"]


def report(meta, version, **said):
    text = msgspec.json.encode({"atS": 1.0, **said}).decode()
    labels = job_labels("x")
    held = Meta(
        name="x-report",
        namespace="n",
        uid="R",
        labels=labels,
        resource_version=str(version),
        owner_references=_owners(meta),
    )
    return OwnedKind(metadata=held, data={"report": text})


def _owners(meta):
    return (Owner(uid=meta.uid, kind="ElasticJob", name=meta.name, controller=True),)


def test_a_report_of_more_steps_can_wait_and_any_other_cannot():
    view, meta, told = view_with_job()
    view.owned["ConfigMap"].saw(report(meta, 2, round=1, step=5))
    assert told == ["n/x"]
    view.owned["ConfigMap"].saw(report(meta, 3, round=1, step=9))
    assert told[1][0] == "n/x" and told[1][1] > 0
    view.owned["ConfigMap"].saw(report(meta, 4, round=2, step=9))
    assert told[2] == "n/x"
    assert view.observed("n/x").report.round == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "x"}', "[" * 100_000])
def test_an_unreadable_report_is_none(text):
    view, meta, _ = view_with_job()
    held = report(meta, 2)
    view.owned["ConfigMap"].saw(OwnedKind(metadata=held.metadata, data={"report": text}))
    assert view.observed("n/x").report is None


def test_a_refusal_is_kept_until_the_object_is_there_or_the_spec_is_another():
    view, meta, _ = view_with_job()
    for expected in (1, 2):
        view.refuse("n/x", Refusal(kind="Pod", name="x-worker-0", code=403, message="quota"))
        assert view.observed("n/x").refused[0].times == expected
    mine = pod("x-worker-0", **job_labels("x"))
    owned = msgspec.structs.replace(mine.metadata, owner_references=_owners(meta))
    view.pods.saw(msgspec.structs.replace(mine, metadata=owned))
    assert view.observed("n/x").refused == ()
    view.refuse("n/x", Refusal(kind="Pod", name="x-worker-1", code=422, message="no"))
    status_written = msgspec.structs.replace(meta, resource_version="2")
    view.jobs.saw(ElasticJob(metadata=status_written))
    assert view.observed("n/x").refused
    edited = msgspec.structs.replace(meta, resource_version="3", edition=2)
    view.jobs.saw(ElasticJob(metadata=edited))
    assert view.observed("n/x").refused == ()


def test_a_node_counts_as_deleted_only_after_a_fresh_read():
    view, _, _ = view_with_job()
    on_node = msgspec.structs.replace(pod(**job_labels("x")), spec=PodSpec(node_name="new"))
    view.pods.saw(on_node)
    assert view.nodes_in_doubt("n/x") == [], "nodes that may not be read are all well"
    view.nodes.cache.retain(set(), "9")
    assert view.observed("n/x").nodes == {}
    assert view.nodes_in_doubt("n/x") == ["new"]


def test_lost_nodes_have_the_time_of_their_loss():
    def node(status, since=None):
        ready = {"type": "Ready", "status": status, "lastTransitionTime": since}
        raw = {"metadata": {"name": "a"}, "status": {"conditions": [ready]}}
        return node_state(msgspec.convert(raw, KubernetesNode))

    lost = node("Unknown", "1970-01-01T00:01:00Z")
    assert lost.unreachable_since_s == 60.0
    assert node("False", "1970-01-01T00:01:00Z").unreachable_since_s is None
    assert node_state(KubernetesNode(metadata=Meta(name="a"))).unreachable_since_s is None


def test_uids_of_what_is_gone_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(cache_module, "GONE_REMEMBERED_MAX", 3)
    held, _ = cache()
    for number in range(10):
        held.saw_gone(pod(uid=str(number)))
    assert len(held._gone) == 3


def test_each_job_has_gauges_of_what_its_status_says():
    view = ClusterView(lambda key: None, lambda key, delay_s: None)
    status = {"step": 457, "stepsPerSecond": 2.5, "lastProgressTime": "1970-01-01T00:01:40Z"}
    for name, said in (("a", status), ("b", {}), ("c", None)):
        meta = Meta(name=name, namespace="n", uid=name, resource_version="1")
        view.jobs.saw(ElasticJob(metadata=meta, status=said))
    probes = Probes(make_metrics(), list, lambda: SimpleNamespace(view=view, queue=KeyedQueue()))
    text = probes.answer("GET", "/metrics").body.decode()
    told = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("elastane_job_")
    )
    of_a = '{job="a",namespace="n"}'
    assert told == {
        f"elastane_job_step{of_a}": "457",
        f"elastane_job_steps_per_second{of_a}": "2.5",
        f"elastane_job_last_progress_timestamp_seconds{of_a}": "100",
    }


def test_a_refused_creation_and_an_api_that_comes_or_goes_ask_for_a_decision():
    told = []
    view = ClusterView(told.append, lambda key, delay_s: None)
    view.jobs.saw(ElasticJob(metadata=Meta(name="x", namespace="n", uid="u", resource_version="1")))
    told.clear()
    view.refuse("n/x", Refusal(kind="Pod", name="x-worker-0", code=403, message="no quota"))
    assert told == ["n/x"], "no event of the cluster follows a refusal"
    groups = view.cache_of("PodGroup.v1beta1.scheduling.volcano.sh")
    for change, reason in (
        (lambda: groups.withdraw("404"), "404"),
        (lambda: groups.retain(set(), "2"), None),
    ):
        told.clear()
        change()
        assert told == ["n/x"]
        assert view.observed("n/x").unserved.get("PodGroup.v1beta1.scheduling.volcano.sh") == reason
