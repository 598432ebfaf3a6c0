"""Jobs whose coordinator is elected in real etcd servers, which stop, die and come back."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from elected_jobs import (
    a_store_that_is_away_stops_no_training,
    elected_job,
    the_coordinator_dies_and_another_takes_over,
)
from etcd_server import EtcdCluster, etcd, shared_cluster
from jobs import Job, newest, until
from supervise import agent, command_line

V2 = ("--enable-v2",)


def keys_of(cluster: EtcdCluster, job: str) -> list[str]:
    """Every key of a job that a v3 server holds."""
    answer = _post(cluster, "/v3/kv/range", {"key": "AA==", "range_end": "AA==", "keys_only": True})
    names = [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]
    return [name for name in names if job in name]


def _post(cluster: EtcdCluster, path: str, what: dict) -> dict:
    request = urllib.request.Request(
        cluster.members[0].url + path, json.dumps(what).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_the_host_of_the_coordinator_dies_and_the_other_takes_over(
    tmp_path: Path, backend: str
) -> None:
    with elected_job(tmp_path, backend, shared_cluster(1, V2).endpoint) as job:
        the_coordinator_dies_and_another_takes_over(job)


def test_an_etcd_that_is_away_stops_no_training(tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd") as cluster, elected_job(tmp_path, "etcd", cluster.endpoint) as job:
        server = cluster.members[0]

        def resume() -> None:
            server.send(signal.SIGCONT)
            cluster.wait_ready(server)

        def restart() -> None:
            server.kill()
            server.start(cluster.cluster)
            cluster.wait_ready(server)

        faults = [
            (lambda: server.send(signal.SIGSTOP), resume),
            (lambda: server.send(signal.SIGKILL), restart),
        ]
        # Three lifetimes of the coordinator's lease.
        a_store_that_is_away_stops_no_training(job, 6.0, faults)


def test_the_leader_of_three_servers_is_killed_and_decisions_continue(tmp_path: Path) -> None:
    with (
        etcd(tmp_path / "etcd", 3) as cluster,
        elected_job(tmp_path, "etcd", cluster.endpoint) as job,
    ):
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        _leader(cluster).kill()
        os.kill(newest(job.seen())[-1].pid, signal.SIGKILL)
        again = job.wait_step(world=2, fence=(1, 0))
        assert (again.round, again.attempt) == (1, 1)


def _leader(cluster: EtcdCluster):
    for member in cluster.members:
        request = urllib.request.Request(
            member.url + "/v3/maintenance/status", b"{}", method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            status = json.load(answer)
        if status["leader"] == status["header"]["member_id"]:
            return member
    raise AssertionError("no leader")


def test_jobs_share_a_server_and_each_leaves_only_its_outcome_which_goes_by_itself(
    tmp_path: Path,
) -> None:
    cluster = shared_cluster(1, V2)
    with (
        Job(tmp_path / "1", backend="etcd", endpoint=cluster.endpoint, steps=3) as one,
        Job(tmp_path / "2", backend="etcd", endpoint=cluster.endpoint, steps=3) as other,
    ):
        agents = [job.start(node) for job in (one, other) for node in "ab"]
        assert [a.wait() for a in agents] == [0, 0, 0, 0]
        for job in (one, other):
            until(
                lambda job=job: keys_of(cluster, job.name) == [f"/elastane/{job.name}/record"],
                "nothing but the outcome is left",
            )
            kept = _post(cluster, "/v3/kv/range", {"key": _b64(f"/elastane/{job.name}/record")})
            lease = kept["kvs"][0]["lease"]
            left = _post(cluster, "/v3/lease/timetolive", {"ID": lease})
            assert 0 < int(left["TTL"]) <= 900
            late = job.start("late")
            assert late.wait() == 78 and "has ended" in late.box


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_standalone_starts_an_etcd_and_ends_it(tmp_path: Path) -> None:
    options = ("--rdzv-backend", "etcd", "--rdzv-id", "side")
    with agent(tmp_path, *options, body="tell('ran')\nwait_for('end')") as one:
        one.told("ran.0.0")
        servers = [p for p in one.family() if "--data-dir" in command_line(p)]
        assert len(servers) == 1
        (tmp_path / "end").touch()
        assert one.wait() == 0
        one.gone()
        assert not list(tmp_path.rglob("etcd.*"))


def test_the_etcd_of_a_killed_agent_dies_with_it_and_its_folder_goes_at_the_next_start(
    tmp_path: Path,
) -> None:
    options = ("--rdzv-backend", "etcd")
    with agent(tmp_path, *options, body="tell('ran')\nhang()") as one:
        one.told("ran.0.0")
        one.send(signal.SIGKILL)
        one.gone()
    (left,) = tmp_path.rglob("etcd.*.*")
    (tmp_path / "ran.0.0").unlink()
    with agent(tmp_path, *options, body="tell('ran')") as one:
        assert one.wait() == 0
    assert not left.exists()


def test_without_an_etcd_program_the_sidecar_says_what_to_do(tmp_path: Path) -> None:
    named = {"TORCHELASTIC_ETCD_BINARY_PATH": str(tmp_path / "nowhere")}
    with agent(tmp_path, "--rdzv-backend", "etcd", body="", **named) as one:
        assert one.wait() == 78
        assert "[etcd-binary]" in one.err and "needs no etcd" in " ".join(one.err.split())


def test_a_server_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path / "etcd")
    try:
        with Job(tmp_path, nnodes="1", backend="etcd", endpoint=cluster.endpoint, steps=3) as job:
            early = job.start("a")
            until(lambda: "waiting for the store" in early.words, "it says that it waits")
            cluster.start()
            assert early.wait() == 0
    finally:
        cluster.stop()


def test_a_user_and_a_password_open_the_store_and_without_them_the_error_says_so(
    tmp_path: Path,
) -> None:
    with etcd(tmp_path / "etcd") as cluster:
        for path, what in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            _post(cluster, f"/v3/auth/{path}", what)
        one = ("--nnodes", "1", "--no-zygote")
        with Job(tmp_path / "1", backend="etcd", endpoint=cluster.endpoint, steps=3) as job:
            allowed = job.start("a", *one, "--rdzv-conf", "user=root,password=secret")
            assert allowed.wait() == 0, allowed.words
            refused = job.start("b", *one, "--rdzv-id", "other")
            assert refused.wait() == 78
            assert "[etcd-auth]" in refused.words
            assert "secret" not in Path(tmp_path / "1").joinpath("a.0.log").read_text()


def test_a_server_is_reached_by_tls_with_a_certificate_of_ours(tmp_path: Path) -> None:
    _make_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "node.pem", "node.key"))
    extra = [
        *("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca),
    ]
    with etcd(tmp_path / "etcd", 1, extra) as cluster:
        conf = f"cacert={ca},cert={cert},key={key}"
        one = ("--nnodes", "1", "--no-zygote")
        with Job(tmp_path / "1", backend="etcd", endpoint=cluster.endpoint, steps=3) as job:
            good = job.start("a", *one, "--rdzv-conf", conf)
            assert good.wait() == 0, good.words


def _make_certificates(folder: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"
    )
    openssl("req", *ec, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-out", "node.pem", "-days", "2", "-extfile", "ext"),
    )
