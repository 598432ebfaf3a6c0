"""Hosts with several cards, with IPv6 only, without names, or with a silent resolver."""

from __future__ import annotations

from pathlib import Path

import pytest
from etcd_server import need_etcd
from host_jobs import EtcdHosts, HostJob, job_on, judge
from hosts import Lan, need_hosts
from jobs import DEADLINE_S

from elastane.protocol.log_events import EventKind

STEPS = 30


def ends_well(job: HostJob, names: str, deadline_s: float = DEADLINE_S) -> None:
    """Assert that all agents end with 0 after `STEPS` steps, with all workers in one world."""
    codes = [agent.wait(deadline_s) for agent in job.agents]
    assert codes == [0] * len(names), job.story()
    assert {s.node for s in job.seen()} == set(names)
    assert {(s.world, s.round, s.attempt) for s in job.seen()} == {(len(names), 1, 0)}
    judge(job)


@pytest.mark.parametrize("backend", ["file", pytest.param("elastane", marks=pytest.mark.soak)])
def test_hosts_that_have_ipv6_alone_train(tmp_path: Path, backend: str) -> None:
    need_hosts()
    with Lan("ab", start_all=False) as lan:
        for name in "ab":
            lan.add(name, families=(6,))
        with HostJob(tmp_path, "2", backend=backend, steps=STEPS, lan=lan) as job:
            job.at("a", 6)
            if backend == "file":
                job.endpoint = str(tmp_path / "store")
            job.start_all("ab")
            ends_well(job, "ab")


@pytest.mark.soak
def test_hosts_that_have_ipv4_alone_train(tmp_path: Path) -> None:
    need_hosts()
    with Lan("ab", start_all=False) as lan:
        for name in "ab":
            lan.add(name, families=(4,))
        with HostJob(tmp_path, "2", steps=STEPS, lan=lan) as job:
            job.at("a").start_all("ab")
            ends_well(job, "ab")


@pytest.mark.parametrize("backend", ["elastane", pytest.param("file", marks=pytest.mark.soak)])
def test_hosts_that_know_no_name_but_their_own_train_by_addresses(
    tmp_path: Path, backend: str
) -> None:
    need_hosts()
    with Lan("ab", start_all=False) as lan:
        for name in "ab":
            lan.add(name, knows="")
            with pytest.raises(OSError):
                lan[name].run("getent", "hosts", "a" if name == "b" else "b")
        with HostJob(tmp_path, "2", backend=backend, steps=STEPS, lan=lan) as job:
            job.at("a")
            if backend == "file":
                job.endpoint = str(tmp_path / "store")
            job.start_all("ab")
            ends_well(job, "ab")


@pytest.mark.soak
def test_a_host_that_cannot_resolve_its_own_name_trains_with_gloos_interface_set(
    tmp_path: Path,
) -> None:
    need_hosts()
    with Lan("ab") as lan:
        for name in "ab":
            lan[name].put("/etc/hosts", "127.0.0.1 localhost\n")
        with HostJob(tmp_path, "2", steps=STEPS, lan=lan) as job:
            job.at("a")
            for name in "ab":
                job.start(name, env={"GLOO_SOCKET_IFNAME": "eth0"})
            ends_well(job, "ab")


@pytest.mark.soak
def test_a_silent_resolver_delays_no_agent_if_addresses_are_given(
    tmp_path: Path,
) -> None:
    need_hosts()
    with Lan("ab") as lan:
        for name in "ab":
            lan[name].put("/etc/resolv.conf", "nameserver 10.77.0.99\n")
        with HostJob(tmp_path, "2", steps=STEPS, lan=lan) as job:
            job.at("a").start_all("ab")
            # torch's store asks for the name behind each of its connections, 5 s and more each.
            ends_well(job, "ab")
            started = job.events(EventKind.AGENT_STARTED)
            settled = job.events(EventKind.ROUND_SETTLED)[0]
            assert settled.time_s - max(e.time_s for e in started) < 2.0
            stopped = job.events(EventKind.AGENT_STOPPED)
            ended = job.events(EventKind.JOB_ENDED)[0]
            assert max(e.time_s for e in stopped) - ended.time_s < 2.0


def cards(lan: Lan, names: str) -> None:
    """Give each host a dead first card, with the default route, and a working one."""
    lan.networks.append("nowhere-a")
    for name in names:
        host = lan.add(name, networks=(f"nowhere-{name}", "main"))
        host.run("ip", "route", "add", "default", "dev", "eth0")


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(True, id="local-addr", marks=pytest.mark.soak),
        pytest.param(False, id="untold"),
    ],
)
@pytest.mark.parametrize("backend", ["etcd", pytest.param("elastane", marks=pytest.mark.soak)])
def test_of_several_cards_the_first_leads_nowhere_and_the_other_is_used(
    tmp_path: Path, backend: str, told: bool
) -> None:
    need_hosts()
    need_etcd()
    with Lan("abs", start_all=False) as lan:
        cards(lan, "ab")
        with HostJob(tmp_path, "2", backend=backend, steps=STEPS, lan=lan) as job:
            job.at("b")
            if backend == "etcd":
                lan.add("s")
                job.endpoint = EtcdHosts(lan, "s", tmp_path / "etcd").start().endpoint
            for name in "ab":
                job.start(name, *(("--local-addr", lan.address(name)) if told else ()))
            ends_well(job, "ab")


@pytest.mark.soak
def test_of_several_cards_with_a_shared_folder_local_addr_says_which(tmp_path: Path) -> None:
    need_hosts()
    with Lan("ab", start_all=False) as lan:
        cards(lan, "ab")
        store = str(tmp_path / "store")
        with HostJob(tmp_path, "2", backend="file", endpoint=store, steps=STEPS, lan=lan) as job:
            for name in "ab":
                job.start(name, "--local-addr", lan.address(name))
            ends_well(job, "ab")


@pytest.mark.soak
def test_a_host_that_is_given_by_name_is_found_by_each_hosts_own_file(tmp_path: Path) -> None:
    with job_on(tmp_path, "ab", nnodes="2", steps=STEPS) as job:
        # As Debian does it: to itself, a host's name is 127.0.1.1.
        job.lan["a"].put("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 a\n10.77.0.2 b\n")
        job.endpoint = f"a:{job.port}"
        for name in "ab":
            job.start(name, env={"GLOO_SOCKET_IFNAME": "eth0"})
        ends_well(job, "ab")
