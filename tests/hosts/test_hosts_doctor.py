"""`elastane doctor --nodes` on different hosts names each fault and its remedy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hosts import PROGRAMS, HostProcess, Lan

from elastane.errors import ExitCode

# Generous: a bound for a busy machine.
DEADLINE_S = 120.0
PORT = 29400
Findings = dict[str, list[tuple[str, str]]]


def diagnosed(
    lan: Lan,
    names: str,
    folder: Path,
    *options: str,
    endpoint: str = "",
    env: dict[str, dict[str, str]] | None = None,
) -> tuple[dict[str, int], dict[str, Findings]]:
    """Run the doctor on each host; return exit codes, and findings between nodes by subject."""
    at = endpoint or lan.address("a")
    words = [sys.executable, str(PROGRAMS / "doctor.py"), "--json", "--nodes", str(len(names))]
    words += ["--rdzv-endpoint", f"{at}:{PORT}", "--timeout", str(DEADLINE_S), *options]
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ}
    running: dict[str, HostProcess] = {
        name: lan[name].start(words, {**kept, **(env or {}).get(name, {})}, folder / f"{name}.log")
        for name in names
    }
    codes = {name: process.wait(DEADLINE_S) for name, process in running.items()}
    found: dict[str, Findings] = {}
    for name in names:
        text = (folder / f"{name}.log").read_text()
        assert "[" in text, text
        found[name] = {}
        for one in json.loads(text[text.index("[") :]):
            said = f"{one['found']} {one['why']} {one['next_step']}"
            found[name].setdefault(one["subject"], []).append((one["level"], said))
    return codes, found


def test_nodes_that_do_not_reach_each_other_or_gloo_are_named(tmp_path: Path) -> None:
    with Lan("abc") as lan:
        lan.cut_off("b", "c")
        lan["c"].put("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 c\n10.77.9.9 a\n")
        codes, found = diagnosed(lan, "abc", tmp_path)
    assert set(codes.values()) == {ExitCode.NODE_UNFIT}
    for name in "abc":
        said = found[name]
        assert said["meeting"] == [("good", "3 of 3 nodes met at 10.77.0.1:29400  ")]
        closed = sorted(text for level, text in said["connections"] if level == "fault")
        assert [text.split(" (")[0] for text in closed] == ["b to c", "c to b"]
        assert all("no answer" in text and "open TCP ports 32768" in text for text in closed)
        [(level, gloo)] = [one for one in said["gloo"] if one[0] != "good"]
        assert level == "fault" and "c would listen at 127.0.1.1" in gloo
        assert "export GLOO_SOCKET_IFNAME=eth0 on c" in gloo
        [(level, names)] = said["names"]
        assert level == "warning" and "a is 10.77.9.9 on c, and has 10.77.0.1" in names
        assert said["versions"][0][0] == said["clocks"][0][0] == "good"


@pytest.mark.soak
def test_nodes_that_fit_have_no_fault_between_them(tmp_path: Path) -> None:
    with Lan("abc") as lan:
        codes, found = diagnosed(lan, "abc", tmp_path, endpoint="a")
    assert set(codes.values()) == {ExitCode.DONE}
    said = found["b"]
    assert "6 directions open: " in said["connections"][0][1]
    assert {said[subject][0][0] for subject in ("gloo", "latency", "versions")} == {"good"}


@pytest.mark.soak
def test_a_slow_path_and_a_missing_network_card_are_named(tmp_path: Path) -> None:
    with Lan("ab") as lan:
        lan.all_ways("ab", delay_s=0.02)
        env = {"b": {"GLOO_SOCKET_IFNAME": "eth9"}}
        codes, found = diagnosed(lan, "ab", tmp_path, env=env)
    assert set(codes.values()) == {ExitCode.NODE_UNFIT}
    [(level, gloo)] = [one for one in found["a"]["gloo"] if one[0] != "good"]
    assert level == "fault" and "there is no network card eth9" in gloo and "eth0" in gloo
    assert found["a"]["latency"][0][0] == "warning"


@pytest.mark.soak
def test_an_endpoint_that_is_a_loopback_address_everywhere_is_named(tmp_path: Path) -> None:
    with Lan("ab") as lan:
        for name in "ab":
            lan[name].put("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 a\n127.0.1.1 b\n")
        codes, found = diagnosed(lan, "ab", tmp_path, "--timeout", "3", endpoint="a")
    assert set(codes.values()) == {ExitCode.NODE_UNFIT}
    for name in "ab":
        assert "each one waits for itself" in found[name]["meeting"][0][1]


@pytest.mark.soak
def test_an_endpoint_behind_a_firewall_is_named_by_the_node_that_is_outside(tmp_path: Path) -> None:
    with Lan("ab") as lan:
        lan.cut_off("a", "b")
        _, found = diagnosed(lan, "ab", tmp_path, "--timeout", "5")
    assert "1 of 2 nodes met" in found["a"]["meeting"][0][1]
    assert "nc -vz 10.77.0.1 29400" in found["b"]["meeting"][0][1]
