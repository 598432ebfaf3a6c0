"""Hosts that really differ: namespaces of network, processes, mounts and names on one machine.

    with Lan("abc") as lan, HostJob(folder, lan, nnodes="2:3") as job:
        for name in "abc":
            job.start(name)
        job.wait_step(world=3)
        lan.cut_off("b")

A host has its own addresses (IPv4 and IPv6), host name, /etc/hosts, /etc/resolv.conf and process
numbers; the disk is shared, as with NFS. A program of ours is the switch between them, so that
any frame may be lost, late, doubled or slow (`programs/host_switch.py`). No namespace has a name:
each lives as long as its processes, which end with this process even if it is killed. So
tests may run beside others, and nothing has to be removed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

sys.path.append(str(Path(__file__).parents[1] / "process"))

import warm_start

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
PROGRAMS = Path(__file__).parent / "programs"
_HOST = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# Python without site packages: these programs need none, and start at once.
PYTHON = (sys.executable, "-S", "-E")
MAIN = "main"


@functools.cache
def unavailable() -> str:
    """Return why hosts cannot be made on this machine; empty if they can."""
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"missing: {' '.join(missing)}: apt-get install iproute2 util-linux mount"
    if os.geteuid() != 0:
        return "namespaces need root"
    try:
        with Lan("ab") as lan:
            done = lan["a"].run("ip", "-6", "addr", "show", "dev", "eth0")
            assert "fd77" in done, done
    except (OSError, AssertionError) as error:
        return f"a host cannot be made: {error}"
    return ""


def clock(shift: str) -> dict[str, str]:
    """Return the environment of agents and workers whose clocks are wrong by this offset.

    The monotonic clock is changed too, since this libfaketime otherwise breaks time.sleep.
    """
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift}


def need_faketime() -> None:
    """Skip where clocks cannot differ; but where everything is to be tested, that is a failure."""
    if FAKETIME is None:
        reason = "NOT RUN: clocks that differ: libfaketime is missing: apt-get install faketime"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_hosts() -> None:
    """Skip the test if hosts cannot be made; fail if everything has to be tested."""
    if reason := unavailable():
        text = f"NOT RUN: tests of hosts that really differ: {reason}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)


class Servant:
    """A program that carries out commands and answers each, in lines of JSON."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, what: str, **more: object) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError as error:
            raise OSError(f"{self.process.args} is gone") from error
        if not line:
            raise OSError(f"{self.process.args} ended with {self.process.wait(5)}")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["ok"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class HostProcess:
    """A process of a host, with the part of Popen that the harness of jobs uses."""

    def __init__(self, host: Host, pid: int) -> None:
        self.host, self.pid = host, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            code = self.host.ask("poll", pid=self.pid) if self.host.is_up else -signal.SIGKILL
            self.returncode = code  # type: ignore[assignment]
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.host.is_up:
            self.host.ask("signal", pid=self.pid, number=int(number))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, deadline_s: float | None = None) -> int:
        end_s = time.monotonic() + (60.0 if deadline_s is None else deadline_s)
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a process of a host", deadline_s or 60.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


class WarmAgent(HostProcess):
    """An agent of a host that is a fork of a process of the test run: see warm_start."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        super().__init__(host, self._number())

    def _number(self) -> int:
        """Return the number of the agent on its host."""
        outer = self._process.pid
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError, IndexError):
                inner = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
                status = Path(f"/proc/{inner}/status").read_text()
                return int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])
            time.sleep(0.002)
        raise OSError(f"the agent did not start: {self._process.returncode}")

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode


class Host:
    """One machine: its first process, and its names and addresses."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.number, self.folder = name, number, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._init = Servant("unshare", *_HOST, *PYTHON, str(PROGRAMS / "host_init.py"))
        self.run("true")
        parent = self._init.process.pid
        self.pid = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
        self.is_up = True

    def ask(self, what: str, **more: object) -> object:
        return self._init.ask(what, **more)

    def run(self, *argv: str) -> str:
        """Run a command on the host and return its output; OSError if it fails."""
        code, out, err = self.ask("run", argv=argv)  # type: ignore[misc]
        if code:
            raise OSError(f"{self.name}: {' '.join(argv)}: {err.strip()}")
        return out

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> HostProcess:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {**env, "TMPDIR": str(temporary)}
        with log.open("ab") as file:
            warm = warm_start.start_on_host(argv, env, file.fileno(), self.pid)
        if warm is not None:
            return WarmAgent(self, warm)
        return HostProcess(self, self.ask("start", argv=argv, env=env, log=str(log)))  # type: ignore[arg-type]

    def put(self, path: str, text: str) -> None:
        """Give the host its own file at this path."""
        own = self.folder / path.replace("/", "_")
        own.write_text(text)
        self.run("mount", "--bind", str(own), path)

    def small_disk(self, path: Path, size: str) -> None:
        """Mount a small file system that only this host has."""
        path.mkdir(parents=True, exist_ok=True)
        self.run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "none", str(path))

    def die(self) -> None:
        """Kill every process at once; Lan.kill also stops its frames."""
        if self.is_up:
            self.is_up = False
            os.kill(self.pid, signal.SIGKILL)
        self._init.end()


@dataclass
class Lan:
    """Hosts, by name, at one switch, which may carry several networks; a context.

    The hosts are numbered from 1; the number is the last part of their addresses.
    """

    names: str
    start_all: bool = True
    numbers: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    made: list[Host] = field(default_factory=list)
    networks: list[str] = field(default_factory=lambda: [MAIN])

    def __enter__(self) -> Self:
        self.folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
        self.numbers = {name: place for place, name in enumerate(self.names, 1)}
        self._switch = Servant("unshare", "--net", *PYTHON, str(PROGRAMS / "host_switch.py"))
        try:
            if self.start_all:
                for name in self.names:
                    self.add(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for host in self.made:
            host.die()
        self._switch.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def add(
        self,
        name: str,
        *,
        number: int = 0,
        networks: tuple[str, ...] = (MAIN,),
        families: tuple[int, ...] = (4, 6),
        knows: str | None = None,
    ) -> Host:
        """Start a host with a card in each of `networks`; it can resolve the names in `knows`.

        Without `knows` it resolves all names. It always resolves its own, to its address in MAIN.
        """
        assert name not in self.hosts or not self.hosts[name].is_up
        number = number or self.numbers[name]
        self.numbers[name] = number
        host = Host(name, number, self.folder / f"{name}.{len(self.made)}")
        self.made.append(host)
        self.hosts[name] = host
        host.run("hostname", name)
        if 6 not in families:
            host.run("sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6")
        host.run("ip", "link", "set", "lo", "up")
        for place, network in enumerate(networks):
            self._plug(host, f"eth{place}", network, families)
        host.put("/etc/hosts", self._hosts_file(name, knows, families))
        host.put("/etc/resolv.conf", "")
        host.put("/etc/hostname", f"{name}\n")
        return host

    def _plug(self, host: Host, card: str, network: str, families: tuple[int, ...]) -> None:
        if network not in self.networks:
            self.networks.append(network)
        device = f"{host.name}{len(self.made)}{card}"
        self._switch.ask(
            "plug", device=device, peer=card, pid=host.pid, host=host.name, network=network
        )
        # A card has its address of Ethernet from its place, so that no ARP entry for it is stale.
        ethernet = f"02:00:00:00:{self.networks.index(network):02x}:{host.number:02x}"
        host.run("ip", "link", "set", card, "address", ethernet, "up")
        for family in families:
            bits, more = ("24", ()) if family == 4 else ("64", ("nodad",))
            address = self.address(host.name, network, family)
            host.run("ip", "addr", "add", f"{address}/{bits}", "dev", card, *more)

    def _hosts_file(self, name: str, knows: str | None, families: tuple[int, ...]) -> str:
        known = {*(self.names if knows is None else knows), name}
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for family in families:
            lines += [f"{self.address(n, MAIN, family)} {n}" for n in sorted(known)]
        return "\n".join(lines) + "\n"

    def address(self, name: str, network: str = MAIN, family: int = 4) -> str:
        place, number = self.networks.index(network), self.numbers[name]
        return f"10.77.{place}.{number}" if family == 4 else f"fd77:{place}::{number}"

    def rule(self, sender: str, hearer: str, **rule: float) -> None:
        """Apply a rule of programs/host_switch.py to the frames of one direction."""
        self._switch.ask("rule", **{"from": sender, "to": hearer, **rule})

    def cut_off(self, name: str, *others: str) -> None:
        """Lose all frames between a host and `others` (without any: all), both ways."""
        self.mute(name, *others)
        self.deafen(name, *others)

    def mute(self, name: str, *others: str) -> None:
        """Lose all frames from this host to the others."""
        for other in others or self.hosts:
            self.rule(name, other, drop=True)

    def deafen(self, name: str, *others: str) -> None:
        """Lose all frames from the others to this host."""
        for other in others or self.hosts:
            self.rule(other, name, drop=True)

    def all_ways(self, names: str, **rule: float) -> None:
        """Apply a rule to all frames between these hosts."""
        for one in names:
            for other in names:
                if one != other:
                    self.rule(one, other, **rule)

    def heal(self) -> dict[str, int]:
        """Remove all rules; return how many frames were carried, lost, repeated and delayed."""
        return self._switch.ask("heal")  # type: ignore[return-value]

    def kill(self, name: str) -> None:
        """Cut the host's power: it sends nothing more, not even a reset."""
        self.cut_off(name)
        self.hosts[name].die()
        self._switch.ask("unplug", host=name)
        del self.hosts[name]
