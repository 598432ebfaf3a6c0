"""Endpoints: their syntax, local addresses, ports in use; node slots and the registry."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastane.errors import ConfigurationError, MembershipError, UsageError
from elastane.process import endpoint as module
from elastane.process.endpoint import (
    DEFAULT_PORT,
    STANDALONE,
    Endpoint,
    is_mine,
    listen,
    local_addresses,
    parse_endpoint,
)
from elastane.process.files import (
    LOG_PLACES_MAX,
    JobEntry,
    JobRegistry,
    NodeSlot,
    process_start,
    runtime_folder,
    safe_name,
    write_atomic,
)
from elastane.process.resolver import resolve


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", DEFAULT_PORT),
        ("node0.example.org:1234", "node0.example.org", 1234),
        (" 10.0.0.1:0 ", "10.0.0.1", 0),
        ("my_host:65535", "my_host", 65535),
        ("[::1]", "::1", DEFAULT_PORT),
        ("[::1]:29401", "::1", 29401),
        ("fe80::1%eth0", "fe80::1%eth0", DEFAULT_PORT),
        ("2001:db8::7", "2001:db8::7", DEFAULT_PORT),
    ],
)
def test_an_endpoint_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    found = parse_endpoint(text)
    assert found == Endpoint(host, port)
    assert parse_endpoint(str(found)) == found


BAD = ["", " ", ":1", "h:", "h:x", "h:-1", "h:65536", "h:1.5", "[::1", "[]:1", "[h]:1", "[::1]x"]
BAD += ["a b", "h/x:1", "1:2:3", "http://h:1", "h:١", "[::1]:"]


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_endpoint_is_named(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_endpoint(text)
    assert repr(text) in error.value.what
    assert error.value.slug == "endpoint-syntax"


def test_a_url_is_told_that_it_is_none_of_an_endpoint() -> None:
    with pytest.raises(UsageError, match="http:// is no part of an endpoint"):
        parse_endpoint("http://node0")


def test_addresses_of_this_machine_are_its_own_and_others_are_not() -> None:
    assert "127.0.0.1" in local_addresses()
    assert is_mine(["127.0.0.1"])
    assert is_mine(["127.0.1.1"]), "Debian's name for itself"
    assert is_mine(["::1"])
    assert is_mine(["::ffff:127.0.0.1"])
    assert is_mine(["192.0.2.1", *local_addresses()])
    assert not is_mine(["192.0.2.1", "2001:db8::1"]), "addresses kept for documentation"
    assert not is_mine([])


def test_the_kernel_agrees_on_what_is_local() -> None:
    for address in local_addresses():
        if not address.startswith("fe80"):
            assert module._can_bind(module.ipaddress.ip_address(address)), address


def test_without_proc_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = local_addresses()
    monkeypatch.setattr(module, "_lines", lambda path: [])
    assert local_addresses() == frozenset()
    assert is_mine([address for address in mine if ":" not in address])
    assert not is_mine(["192.0.2.1"])


def test_resolving_gives_addresses_and_an_unknown_name_the_next_step() -> None:
    async def body() -> None:
        assert await resolve("127.0.0.1") == ("127.0.0.1",)
        assert is_mine(await resolve("localhost"))
        for host in ("no-such-host.invalid", "a..b"):
            with pytest.raises(MembershipError, match=f"getent hosts {host}"):
                await resolve(host)

    asyncio.run(body())


def test_a_resolver_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answered.wait(10))
    with pytest.raises(MembershipError, match=r"no answer within 0\.05 s"):
        asyncio.run(resolve("slow", 0.05))
    answered.set()


def test_the_second_process_learns_that_the_port_is_served() -> None:
    first = listen("node0", 0)
    assert first is not None
    with first:
        port = first.getsockname()[1]
        assert listen("node0", port) is None
        assert listen("127.0.0.1", port) is None
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.1.1")):
            with socket.socket(family) as client:
                client.connect((host, port))
    again = listen("node0", port)
    assert again is not None, "the port of one that is gone is free at once"
    again.close()


def test_a_loopback_endpoint_is_out_of_reach_for_others() -> None:
    for host in (STANDALONE.host, "localhost", "127.0.1.1"):
        sock = listen(host, 0)
        assert sock is not None
        with sock:
            assert sock.getsockname()[0].startswith("127.")
            assert not sock.getblocking()
            assert not sock.get_inheritable()


def test_an_unusable_port_gives_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.socket.socket, "bind", refuse)
    with pytest.raises(ConfigurationError, match="port of 1024 or higher"):
        listen("127.0.0.1", 80)


def test_names_become_path_components_and_stay_apart() -> None:
    for name in ("job-1", "a.b_C", "x" * 200):
        assert safe_name(name) == name
    odd = [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "a_b/",
        "a b",
        "ü",
        "x" * 201,
        "x" * 202,
        "a\n",
        "\ud800",
    ]
    made = [safe_name(name) for name in odd]
    assert len(set(made)) == len(odd)
    for name in made:
        assert 0 < len(name) <= 200
        assert safe_name(name) == name


def test_the_runtime_folder_is_private_or_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "elastane"
    temp = tmp_path / "tmp"
    temp.mkdir()
    temp.chmod(0o777)
    environ = {"XDG_RUNTIME_DIR": str(temp), "TMPDIR": str(temp)}
    folder = runtime_folder(environ)
    assert folder == temp / f"elastane-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="runtime-folder"):
        runtime_folder(environ)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="runtime-folder"):
        runtime_folder(environ)


def test_an_atomic_write_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"1")
    write_atomic(path, b"2")
    assert path.read_bytes() == b"2"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError):
        write_atomic(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["f"]


def entry(node: str, pid: int, process: str, job: str = "a/b", started: float = 0.0) -> JobEntry:
    return JobEntry(
        job=job,
        node=node,
        endpoint="h:1",
        token="t",
        pid=pid,
        process=process,
        started=started,
    )


def test_the_registry_lists_running_agents_and_deletes_the_others(tmp_path: Path) -> None:
    registry = JobRegistry(tmp_path)
    assert registry.running() == []
    own = process_start(os.getpid())
    second = entry("n.1", os.getpid(), own, started=2.0)
    first = entry("n", os.getpid(), own, started=1.0)
    other = entry("n", os.getpid(), own, job="c", started=3.0)
    reused = entry("n.2", os.getpid(), own + "0")
    gone = entry("n.3", 2**22 + 1, "x")
    for one in (second, first, other, reused, gone):
        path = registry.write(one)
        assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "jobs" / "c" / "torn.json").write_text("{")
    assert registry.running() == [first, second, other]
    assert registry.running("a/b") == [first, second]
    assert registry.running("nobody") == []
    assert len(list(tmp_path.rglob("*.json"))) == 3
    registry.remove(entry("n", os.getpid(), own, started=9.0))
    assert registry.running("a/b") == [first, second], "a successor's entry was taken out"
    for one in (first, second, other):
        registry.remove(one)
    assert list((tmp_path / "jobs").iterdir()) == []


def test_the_registry_remembers_where_the_newest_jobs_logged(tmp_path: Path) -> None:
    registry = JobRegistry(tmp_path)
    assert registry.logs_of("a/b") == ""
    registry.note_logs("a/b", "/old")
    registry.note_logs("a/b", "logs")
    assert registry.logs_of("a/b") == str(Path.cwd() / "logs")
    for number in range(LOG_PLACES_MAX):
        registry.note_logs(f"job-{number}", "/new")
        noted = tmp_path / "logs" / f"job-{number}"
        os.utime(noted, (4e9 + number, 4e9 + number))
    assert registry.logs_of("a/b") == "", "the oldest is forgotten"
    assert registry.logs_of("job-0") == "/new"
    assert noted.stat().st_mode & 0o777 == 0o600


def test_agents_of_one_job_on_one_machine_get_numbers_and_successors_get_them_again(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, pathlib\nfrom elastane.process.files import NodeSlot\n"
        "slot = NodeSlot.acquire(pathlib.Path(sys.argv[1]), 'job', 'host')\n"
        "print(slot.node_id, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "host\n"
        with NodeSlot.acquire(tmp_path, "job", "host") as mine:
            assert mine.node_id == "host.1"
            with NodeSlot.acquire(tmp_path, "other", "host") as other:
                assert other.node_id == "host"
            child.kill()
            child.wait()
            with NodeSlot.acquire(tmp_path, "job", "host") as successor:
                assert successor.node_id == "host"
    with NodeSlot.acquire(tmp_path, "job", "host") as again:
        assert again.node_id == "host"


def test_a_slot_does_not_pass_to_programs_that_its_holder_starts(tmp_path: Path) -> None:
    slot = NodeSlot.acquire(tmp_path, "job", "host")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        slot.release()
        try:
            with NodeSlot.acquire(tmp_path, "job", "host") as again:
                assert again.node_id == "host"
        finally:
            child.kill()
