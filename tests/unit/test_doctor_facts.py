"""The facts about this node, with failing programs and unusual folders and ports."""

import os
import socket
import stat
import sys

import pytest

from elastane.doctor import facts
from elastane.process.endpoint import Endpoint


def program(folder, text):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_gpus_are_read_from_the_drivers_command(tmp_path):
    text = "echo '0, NVIDIA H100, 81559, 1024, 0'; echo '1, NVIDIA T4, 15360, 3, [N/A]'"
    gpus, error = facts.read_gpus(program(tmp_path, text))
    assert error == ""
    assert [(g.index, g.name, g.memory >> 20, g.used >> 20, g.uncorrected) for g in gpus] == [
        (0, "NVIDIA H100", 81559, 1024, 0),
        (1, "NVIDIA T4", 15360, 3, 0),
    ]


def test_a_driver_that_fails_or_hangs_is_an_error_and_none_is_no_gpu(tmp_path, monkeypatch):
    failing = program(tmp_path, "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert facts.read_gpus(failing) == ((), "NVIDIA-SMI has failed")
    assert facts.read_gpus([str(tmp_path / "none")]) == ((), "")
    monkeypatch.setattr(facts, "DRIVER_LIMIT_S", 0.2)
    hanging = program(tmp_path, "exec sleep 60")
    assert facts.read_gpus(hanging) == ((), "no answer within 0.2 s")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_torch", "ModuleNotFoundError: No module named 'no_such_torch'"),
        ("import os; os._exit(5)", "exit code 5"),
        ("print('hello')", "it printed 'hello\\n'"),
        ("import time; time.sleep(60)", "its import did not end within 2 s"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_an_error(monkeypatch, text, error):
    monkeypatch.setattr(facts, "IMPORT_LIMIT_S", 2.0 if "sleep" in text else 60.0)
    assert facts.read_torch(dict(os.environ), text).error == error


def test_a_shared_memory_that_cannot_be_written_is_an_error(monkeypatch):
    own = facts.read_facts({}, 1, None, {})
    assert own.shared_memory and not own.shared_memory_error
    # No user may write there, and root neither.
    monkeypatch.setattr(facts, "_SHARED_MEMORY", "/proc/self/fdinfo")
    assert facts.read_facts({}, 1, None, {}).shared_memory_error


def test_a_missing_folder_is_tested_at_its_parent_without_changes(tmp_path):
    found = facts.read_folder("logs", str(tmp_path / "not" / "yet"))
    assert found.error == "" and found.free > 0 and found.locks
    assert list(tmp_path.iterdir()) == []
    assert facts.read_folder("logs", "/proc/none").error


def test_an_endpoint_is_connected_to_or_refused_or_unknown():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert facts.read_endpoint(Endpoint("127.0.0.1", port)).outcome == "connected"
    gone = facts.read_endpoint(Endpoint("127.0.0.1", port))
    assert gone.outcome == "refused" and gone.is_here
    unknown = facts.read_endpoint(Endpoint("no-such-host.invalid", 1))
    assert "does not resolve" in unknown.outcome and unknown.addresses == ()


def test_this_node_is_read_as_a_whole(monkeypatch):
    monkeypatch.setattr(facts, "_PROBE", "print()")
    node = facts.read_facts({"logs": "/tmp"}, 0, None, {**os.environ})
    assert node.workers == 1 and node.cpus >= 1 and node.memory > 0
    assert node.missing_calls == ()
    assert node.python.startswith(f"{sys.version_info[0]}.")
    assert [folder.use for folder in node.folders] == ["runtime folder", "logs"]


def test_a_runtime_folder_of_another_user_is_an_error(tmp_path):
    base = tmp_path / f"elastane-{os.getuid()}"
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    found = facts._read_runtime_folder({"TMPDIR": str(tmp_path)})
    assert "is not this user's alone" in found.error


CARDS = {"lo": ("127.0.0.1", "::1"), "eth1": ("10.0.0.5",), "down": ()}


@pytest.mark.parametrize(
    ("named", "address", "error"),
    [
        ("eth1", "10.0.0.5", ""),
        ("eth1,lo", "10.0.0.5", ""),
        ("eth0", "", "there is no network card eth0"),
        ("eth1,eth0", "", "there is no network card eth0"),
        ("down", "", "down has no address"),
    ],
)
def test_gloo_listens_at_the_card_that_is_named(named, address, error):
    found = facts.read_gloo({"GLOO_SOCKET_IFNAME": named}, CARDS)
    assert (found.address, found.error) == (address, error)
    assert found.chosen_by == f"GLOO_SOCKET_IFNAME={named}"


@pytest.mark.parametrize(
    ("resolves", "address"),
    [
        (("10.0.0.5",), "10.0.0.5"),
        (("127.0.1.1",), "127.0.1.1"),
        (("10.9.9.9", "10.0.0.5"), "10.0.0.5"),
        (("10.9.9.9",), "127.0.0.1"),
        ((), "127.0.0.1"),
    ],
)
def test_without_a_card_gloo_listens_at_an_own_address_of_the_hosts_name(
    monkeypatch, resolves, address
):
    monkeypatch.setattr(facts, "resolved", lambda host: resolves)
    monkeypatch.setattr(facts, "local_addresses", lambda: {"10.0.0.5", "127.0.0.1"})
    assert facts.read_gloo({}, CARDS).address == address


def test_what_other_nodes_need_to_know_is_read():
    page = facts.read_page(Endpoint("localhost", 1), {"GLOO_SOCKET_IFNAME": "lo"})
    assert dict(page.interfaces)["lo"][0] == page.gloo.address == "127.0.0.1"
    assert page.endpoint and page.versions.elastane and 0 < page.ports[0] < page.ports[1]
    assert not [one for _, found in page.interfaces for one in found if one.startswith("fe80")]
