"""The secrets by which the snapshot servers of a job's nodes prove themselves."""

from types import SimpleNamespace

from elastane.agent.snapshot_server import replica_peers
from elastane.options.secret import Keyring
from elastane.process.tls import TlsConfig


def told(keyring, tls=None, job="job"):
    config = SimpleNamespace(
        spec=SimpleNamespace(job=job),
        rendezvous=SimpleNamespace(tls=tls),
        reach="10.0.0.2",
    )
    return replica_peers(config, keyring)


def test_two_nodes_of_a_job_have_one_secret_and_another_job_has_another():
    [here], [there] = (told(Keyring("job", "t")).secrets for _ in range(2))
    assert here == there
    assert here not in told(Keyring("job", "u")).secrets
    assert told(Keyring("a", "")).secrets != told(Keyring("b", "")).secrets


def test_a_snapshot_server_cannot_derive_the_jobs_secret():
    ring = Keyring("job", "t")
    assert not set(told(ring).secrets) & set(ring.secrets())


def test_during_a_change_of_secrets_a_snapshot_server_has_both(tmp_path):
    import asyncio

    path = tmp_path / "tokens"
    path.write_text("newer-secret\nolder-secret\n")
    path.chmod(0o600)
    ring = Keyring("job", "older-secret", str(path))
    assert asyncio.run(ring.reload())
    newer, older = told(ring).secrets
    assert newer in told(Keyring("job", "newer-secret")).secrets
    assert older in told(Keyring("job", "older-secret")).secrets


def test_a_snapshot_server_has_the_tls_files_and_the_address_of_its_node():
    found = told(Keyring("job", "t"), TlsConfig(cert="c", key="k", ca="a"))
    assert (found.tls, found.host, found.job) == (("c", "k", "a"), "10.0.0.2", "job")
    assert told(Keyring("job", "t")).tls == ("", "", "")
