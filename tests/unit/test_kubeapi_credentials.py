"""The API server and the identity: from kubeconfig files, service accounts and plugins."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import sys
from pathlib import Path

import pytest

from elastane.errors import ConfigurationError
from elastane.kubernetes.client import find_access, identity
from elastane.kubernetes.client.credentials import ClusterAccess, Tls, read_kubeconfig
from elastane.kubernetes.client.identity import (
    ClientProof,
    Credential,
    FileIdentity,
    FixedIdentity,
    ServiceToken,
)
from elastane.kubernetes.client.identity import _proof as read_credential
from elastane.kubernetes.client.transport import ApiRequest, Transport

PLAIN = {
    "clusters": [{"name": "c", "cluster": {"server": "https://kube:6443/prefix/"}}],
    "users": [{"name": "u", "user": {"token": "secret-token"}}],
    "contexts": [
        {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "own"}},
        {"name": "two", "context": {"cluster": "c"}},
    ],
    "current-context": "one",
}


def written(path: Path, **changes: object) -> str:
    path.write_text(json.dumps({**PLAIN, **changes}))  # JSON is YAML.
    return str(path)


def user(tmp_path: Path, **fields: object) -> ClusterAccess:
    users = [{"name": "u", "user": fields}]
    return read_kubeconfig(written(tmp_path / "config", users=users), {})


def proof(access: ClusterAccess) -> ClientProof:
    return asyncio.run(access.proof())


def test_a_context_says_server_namespace_and_user(tmp_path):
    access = read_kubeconfig(written(tmp_path / "config"), {})
    assert (access.server, access.namespace) == ("https://kube:6443/prefix", "own")
    assert proof(access) == ClientProof("Bearer secret-token")
    assert "context one" in access.where and "secret" not in access.where + repr(proof(access))
    other = read_kubeconfig(str(tmp_path / "config"), {}, "two")
    assert (other.namespace, proof(other)) == ("default", ClientProof())


def test_without_httpx_the_error_names_the_extra_that_has_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    access = read_kubeconfig(written(tmp_path / "config"), {})
    transport = Transport(access, timeout_s=10.0, connections_max=1)
    with pytest.raises(ConfigurationError) as told:
        asyncio.run(transport.ask(ApiRequest("GET", "/version", "the version")))
    assert told.value.slug == "extra-missing"
    assert told.value.next_step == "pip install 'elastane[kubernetes]'"


def test_the_first_of_several_files_with_a_name_wins(tmp_path):
    first = written(tmp_path / "a", clusters=[], **{"current-context": ""})
    second = written(tmp_path / "b", users=[], **{"current-context": "two"})
    access = read_kubeconfig(f"{first}:{tmp_path / 'missing'}:{second}", {})
    assert access.where.startswith(f"kubeconfig {first}, context two")
    assert access.server == "https://kube:6443/prefix"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"current-context": "three"}, "one of one, two"),
        ({"current-context": ""}, "there is no current-context"),
        ({"clusters": []}, "there are no clusters"),
        ({"clusters": None}, "no cluster 'c'"),
        ({"users": "garbage"}, "no user 'u'"),
        ({"contexts": ["garbage", {"name": "one", "context": 3}]}, "no context 'one'"),
        ({"clusters": [{"name": "c", "cluster": {"server": "kube:6443"}}]}, "server 'kube:6443'"),
        ({"clusters": [{"name": "c", "cluster": {"server": "https://[x"}}]}, "server 'https://[x'"),
        ({"clusters": [{"name": "c", "cluster": None}]}, "server ''"),
        ({"users": [{"name": "u", "user": {"token": "a\nb"}}]}, "the token "),
        ({"users": [{"name": "u", "user": {"auth-provider": {}, "token": ""}}]}, ""),
        (
            {"users": [{"name": "u", "user": {"auth-provider": {"name": "gcp"}}}]},
            "gave up in 1.26",
        ),
        ({"users": [{"name": "u", "user": {"exec": {"args": []}}}]}, "exec without a command"),
        (
            {
                "users": [
                    {"name": "u", "user": {"exec": {"command": "x", "interactiveMode": "Always"}}}
                ]
            },
            "needs a terminal",
        ),
        (
            {"users": [{"name": "u", "user": {"client-certificate-data": "?"}}]},
            "client-certificate-data",
        ),
    ],
)
def test_mistakes_in_a_kubeconfig_are_named(tmp_path, changes, words):
    path = written(tmp_path / "config", **changes)
    if not words:
        read_kubeconfig(path, {})
        return
    with pytest.raises(ConfigurationError) as caught:
        read_kubeconfig(path, {})
    assert caught.value.slug == "kube-config"
    assert words in str(caught.value) and path in caught.value.what


@pytest.mark.parametrize(
    "text", ["- a\n- b", "{", "a: &a [*a]", "\x00", "x: !!python/object:os {}"]
)
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path, text):
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_kubeconfig(str(path), {})
    assert caught.value.slug == "kube-config"


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_kubeconfig(str(tmp_path / "missing"), {})


def test_a_users_files_are_beside_the_kubeconfig_and_read_again_when_they_change(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(identity, "LOOK_S", 0.0)
    (tmp_path / "t").write_text("first")
    access = user(tmp_path, tokenFile="t")

    async def check() -> None:
        assert (await access.proof()).authorization == "Bearer first"
        (tmp_path / "t").write_text("second")
        assert (await access.proof()).authorization == "Bearer second"
        (tmp_path / "t").unlink()
        assert (await access.proof()).authorization == "Bearer second", "what was read is kept"

    asyncio.run(check())


def test_a_file_that_was_never_readable_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        proof(user(tmp_path, tokenFile="nowhere"))
    assert caught.value.slug == "kube-no-token"
    assert str(tmp_path / "nowhere") in caught.value.where


def test_a_token_is_not_read_at_each_request(tmp_path):
    (tmp_path / "t").write_text("first")
    token = ServiceToken(tmp_path / "t")

    async def check() -> None:
        assert (await token.proof()).authorization == "Bearer first"
        (tmp_path / "t").write_text("second")
        assert (await token.proof()).authorization == "Bearer first"
        assert token.renew()
        assert (await token.proof()).authorization == "Bearer second"

    asyncio.run(check())


def test_a_name_and_a_password_are_basic_authentication(tmp_path):
    found = proof(user(tmp_path, username="me", password="p:w"))
    assert base64.b64decode(found.authorization.removeprefix("Basic ")) == b"me:p:w"


def test_a_pod_has_its_service_account(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigurationError) as caught:
        find_access(environ, service_account=tmp_path)
    assert caught.value.slug == "kube-no-token"
    (tmp_path / "token").write_text("t\n")
    access = find_access(environ, service_account=tmp_path)
    assert (access.server, access.namespace) == ("https://10.96.0.1:443", "default")
    (tmp_path / "namespace").write_text("own\n")
    assert find_access(environ, service_account=tmp_path).namespace == "own"
    assert find_access(environ, service_account=tmp_path, namespace="x").namespace == "x"
    assert proof(access).authorization == "Bearer t"
    assert access.tls.ca_file == str(tmp_path / "ca.crt")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    assert find_access(environ, service_account=tmp_path).server == "https://[fd00::1]:6443"


def test_given_settings_override_found_ones(tmp_path):
    (tmp_path / "token").write_text("t")
    (tmp_path / ".kube").mkdir()
    mine = written(tmp_path / ".kube" / "config")
    given = written(tmp_path / "given", **{"current-context": "two"})
    home = {"HOME": str(tmp_path)}
    pod = {**home, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}

    def found(environ, **more):
        return find_access(environ, service_account=tmp_path, **more).where

    assert mine in found(home)
    assert "service account" in found(pod)
    assert given in found({**pod, "KUBECONFIG": given})
    assert mine in found({**pod, "KUBECONFIG": given}, kubeconfig=mine)
    assert "context two" in found(pod, context="two"), "a context is one of a kubeconfig"
    with pytest.raises(ConfigurationError) as caught:
        find_access({"HOME": "/nonexistent"})
    assert caught.value.slug == "kube-no-cluster"


def test_unusable_certificates_are_a_configuration_error():
    access = ClusterAccess(
        "https://x", FixedIdentity(), namespace="n", where="here", tls=Tls(ca="no PEM")
    )
    with pytest.raises(ConfigurationError) as caught:
        access.context(ClientProof())
    assert caught.value.slug == "kube-tls"
    access = ClusterAccess("https://x", FixedIdentity(), namespace="n", where="here")
    with pytest.raises(ConfigurationError):
        access.context(ClientProof(certificate="no PEM", key="neither"))


def test_insecure_is_insecure_only_where_it_is_asked_for():
    for insecure in (False, True):
        access = ClusterAccess(
            "https://x", FixedIdentity(), namespace="n", where="here", tls=Tls(insecure=insecure)
        )
        context = access.context(ClientProof())
        assert isinstance(context, ssl.SSLContext)
        assert (context.verify_mode == ssl.CERT_NONE) == insecure
        assert context.check_hostname != insecure


def test_a_cluster_with_its_own_tls_name_is_verified_by_that_name(tmp_path):
    clusters = [
        {"name": "c", "cluster": {"server": "https://10.0.0.1", "tls-server-name": "kube.local"}}
    ]
    access = read_kubeconfig(written(tmp_path / "config", clusters=clusters), {})
    assert access.extensions() == {"sni_hostname": "kube.local"}
    assert not user(tmp_path, token="t").extensions()


@pytest.mark.parametrize("given", [{}, {"token": ""}, {"token": "a b\n\x01"}])
def test_a_plugin_without_a_usable_identity_is_refused(given):
    with pytest.raises(ValueError, match=r"token"):
        read_credential(Credential(**given))


def test_files_of_a_user_are_read_together(tmp_path):
    (tmp_path / "c").write_text("CERT")
    (tmp_path / "k").write_text("KEY")
    found = FileIdentity(
        {"certificate": tmp_path / "c", "key": tmp_path / "k"}, ClientProof("Bearer t")
    )
    assert asyncio.run(found.proof()) == ClientProof("Bearer t", "CERT", "KEY")
