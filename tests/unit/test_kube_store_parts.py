"""Names, objects and errors of the Kubernetes store, without a server."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from elastane.errors import ConfigurationError, StoreError
from elastane.kubernetes.client.errors import Status, refusal, unreachable
from elastane.kubernetes.store import store
from elastane.kubernetes.store.objects import (
    ConfigMapObject,
    LeaseObject,
    SecretObject,
    StoredMeta,
    job_label,
    lease_of,
    manifest_of,
    object_name,
    resource_of,
    token_of,
)
from elastane.kubernetes.store.settings import read_settings
from elastane.kubernetes.store.store import AllowedAccess


def test_a_plain_job_has_readable_names():
    assert object_name("run-7/record") == "elastane-run-7.record"
    assert token_of("run-7") == "elastane-run-7.token"
    assert lease_of("run-7") == "elastane-run-7.leadership"
    assert job_label("run-7/record") == "run-7"


def test_only_the_token_of_a_job_is_a_secret():
    """An account that runs workers needs no right to read Secrets."""
    kinds = {key: resource_of(f"run-7/{key}").kind for key in ("coordinator", "record", "token")}
    assert kinds == {"coordinator": "ConfigMap", "record": "ConfigMap", "token": "Secret"}
    secret = manifest_of("run-7/token", b"\0x", 0, None)
    record = manifest_of("run-7/record", b"\0x", 0, None)
    assert (secret["kind"], secret["data"]) == ("Secret", {"value": b"\0x"})
    assert (record["kind"], record["binaryData"]) == ("ConfigMap", {"value": b"\0x"})


ODD = ["A/b", "a/b", "a.b", "a_b", "a-/b", "-a/b", "x" * 200 + "/" + "y" * 190, "a", "a-b", "A-b"]


def test_any_key_has_a_name_that_objects_may_have_and_no_two_share_one():
    names = [object_name(key) for key in ODD]
    assert len(set(names)) == len(ODD)
    for name in names:
        assert len(name) <= 253
        for part in name.split("."):
            assert part and part[0].isalnum() and part[-1].isalnum()
            assert set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("job", ["run-7", "x" * 64, "Mixed.Case_1", "-begins", "ends-"])
def test_a_jobs_label_is_one(job):
    label = job_label(f"{job}/record")
    assert 0 < len(label) <= 63 and label[0].isalnum() and label[-1].isalnum()


def test_a_namespace_is_given_once():
    assert read_settings("a", {}, {}).namespace == "a"
    assert read_settings("", {"namespace": "a"}, {}).namespace == "a"
    assert read_settings("a", {"namespace": "a"}, {}).namespace == "a"
    with pytest.raises(ConfigurationError, match="two namespaces"):
        read_settings("b", {"namespace": "a"}, {})


def test_only_a_pod_of_an_elastic_job_belongs_to_one():
    pod = {"ELASTANE_ELASTICJOB": "mnist", "ELASTANE_POD_UID": "u"}
    assert read_settings("", {}, pod).elastic_job == "mnist"
    assert read_settings("", {}, {"ELASTANE_ELASTICJOB": "run-7"}).elastic_job == ""


def test_a_lease_that_a_person_edited_is_read_as_far_as_it_is_valid():
    def lease(spec=None, **annotations):
        found = {"metadata": {"annotations": annotations}, "spec": spec or {}}
        return msgspec.convert(found, LeaseObject)

    assert (lease().holder, lease().term, lease().value, lease().ttl_s) == ("", 0, b"", 1.0)
    assert lease({"holderIdentity": None, "leaseDurationSeconds": None}).holder == ""
    for term in ("x", "-1", "1" * 40, "٣", ""):
        assert lease(**{"elastane.dev/term": term}).term == 0
    assert lease(**{"elastane.dev/value": "zz"}).value == b""
    assert lease({"leaseDurationSeconds": 10**9}).ttl_s == 86_400
    assert lease({"leaseDurationSeconds": -5}).ttl_s == 1.0
    assert msgspec.convert({"metadata": {}, "data": None}, SecretObject).value == b""
    assert msgspec.convert({"metadata": {}}, ConfigMapObject).value == b""


@pytest.mark.parametrize("written", ["", "x", "-1", "1e3", "٣"])
def test_a_version_that_is_no_number_is_a_store_error(written):
    with pytest.raises(StoreError, match="no number"):
        assert StoredMeta(name="n", resourceVersion=written).version


async def failing(error):
    raise error


def told(memory, deed, error):
    async def ask():
        await memory.answer(deed, "ns", failing(error))

    return ask()


def forbidden():
    words = 'secrets is forbidden: User "u" cannot get resource "secrets"'
    return refusal("get secrets/x in namespace ns", 403, Status(message=words), where="here")


def test_a_refusal_is_for_good_only_after_a_moment(monkeypatch):
    async def check():
        memory = AllowedAccess()
        with pytest.raises(StoreError) as caught:
            await told(memory, "get secrets", forbidden())
        assert caught.value.slug == "kube-forbidden"
        monkeypatch.setattr(store, "REFUSED_S", 0.0)
        with pytest.raises(ConfigurationError) as caught:
            await told(memory, "get secrets", forbidden())
        error = str(caught.value)
        assert 'User "u" cannot get' in error
        assert "kubectl -n ns create role elastane --verb=get,list,watch," in error

    asyncio.run(check())


def test_a_request_that_was_allowed_once_is_never_refused_for_good(monkeypatch):
    monkeypatch.setattr(store, "REFUSED_S", 0.0)

    async def fine():
        return 1

    async def check():
        memory = AllowedAccess()
        assert await memory.answer("get secrets", "ns", fine()) == 1
        for _ in range(3):
            with pytest.raises(StoreError):
                await told(memory, "get secrets", forbidden())
        with pytest.raises(ConfigurationError):
            await told(memory, "update leases", forbidden())

    asyncio.run(check())


@pytest.mark.parametrize(
    ("deed", "error", "slug"),
    [
        ("get secrets", unreachable("x", "y", where="", sent=False), "store-unreachable"),
        ("create secrets", unreachable("x", "y", where="", sent=False), "store-unreachable"),
        ("create secrets", unreachable("x", "y", where="", sent=True), "store-unsure"),
        ("get secrets", refusal("x", 500, Status(), where=""), "store-unreachable"),
        ("update secrets", refusal("x", 500, Status(), where=""), "store-unsure"),
        ("update secrets", refusal("x", 429, Status(), where=""), "store-unreachable"),
        ("update secrets", refusal("x", 422, Status(), where=""), "store-refused"),
    ],
)
def test_an_error_of_the_api_is_one_of_the_store(deed, error, slug):
    with pytest.raises(StoreError) as caught:
        asyncio.run(told(AllowedAccess(), deed, error))
    assert caught.value.slug == slug
