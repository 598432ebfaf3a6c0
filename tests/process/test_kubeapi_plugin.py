"""Credential plugins of a kubeconfig, as real programs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from elastane.errors import ConfigurationError
from elastane.kubernetes.client import identity
from elastane.kubernetes.client.credentials import read_kubeconfig


def plugin(tmp_path: Path, body: str, **more: object):
    """The identity of a user whose plugin is this Python program, beside the kubeconfig."""
    program = tmp_path / "plugin"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    program.chmod(0o755)
    spec = {
        "command": "./plugin",
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "env": [{"name": "MINE", "value": "here"}],
        "args": ["a", 1],
        **more,
    }
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://kube:6443"}}],
        "users": [{"name": "u", "user": {"exec": spec}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    return read_kubeconfig(str(tmp_path / "config"), {"PATH": "/usr/bin:/bin"}).identity


def said(**status: object) -> str:
    return f"print(json.dumps({{'kind': 'ExecCredential', 'status': {status!r}}}))"


COUNTED = "open('{}', 'a').write('x')\n"


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text())


def test_a_plugin_gets_its_input_and_returns_a_token(tmp_path):
    body = (
        "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        "word = [info['apiVersion'][-7:], str(info['spec']['interactive']), os.environ['MINE']]\n"
        "word += [info['spec']['cluster']['server'], *sys.argv[1:]]\n"
        "print(json.dumps({'status': {'token': '.'.join(word)}}))"
    )
    found = asyncio.run(plugin(tmp_path, body, provideClusterInfo=True).proof())
    assert found.authorization == "Bearer v1beta1.False.here.https://kube:6443.a.1"


def test_concurrent_and_later_callers_share_one_run_of_the_plugin(tmp_path):
    identity = plugin(tmp_path, COUNTED.format(tmp_path / "runs") + said(token="t"))

    async def check():
        proofs = await asyncio.gather(*(identity.proof() for _ in range(10)))
        assert {proof.authorization for proof in proofs} == {"Bearer t"}
        await identity.proof()
        assert runs(tmp_path) == 1
        assert identity.renew()
        await identity.proof()
        assert runs(tmp_path) == 2

    asyncio.run(check())


def test_an_expired_identity_is_made_again(tmp_path):
    past = said(token="t", expirationTimestamp="2020-01-01T00:00:00Z")
    identity = plugin(tmp_path, COUNTED.format(tmp_path / "runs") + past)

    async def check():
        for count in (1, 2):
            await identity.proof()
            assert runs(tmp_path) == count

    asyncio.run(check())


def test_a_cancelled_caller_does_not_cancel_the_plugin_for_the_next(tmp_path):
    body = COUNTED.format(tmp_path / "runs")
    body += f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n" + said(token="t")
    identity = plugin(tmp_path, body)

    async def check():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await identity.proof()
        (tmp_path / "go").touch()
        assert (await identity.proof()).authorization == "Bearer t"
        assert runs(tmp_path) == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('log in first')", "ended with 1: log in first"),
        ("print('hello')", "printed no ExecCredential"),
        ("print('{}')", "printed no ExecCredential"),
        (said(), "neither a token nor a certificate"),
        (said(token="t", expirationTimestamp="soon"), "printed no ExecCredential"),
    ],
)
def test_the_error_of_a_failed_plugin_holds_its_output(tmp_path, body, words):
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(plugin(tmp_path, body, installHint="install it").proof())
    assert caught.value.slug == "kube-exec"
    assert words in caught.value.what and caught.value.next_step == "install it"


def test_a_plugin_that_is_not_there_is_named(tmp_path):
    identity = plugin(tmp_path, "")
    (tmp_path / "plugin").unlink()
    with pytest.raises(ConfigurationError, match="No such file"):
        asyncio.run(identity.proof())


def test_a_plugin_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "PLUGIN_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigurationError, match="timed out"):
        asyncio.run(plugin(tmp_path, "time.sleep(600)").proof())
