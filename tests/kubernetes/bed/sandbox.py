"""What the containers of one pod share: its network, its host name and its volumes in memory.

As with the pause container of other kubelets, one process that does nothing holds the namespaces;
when it ends, which it does with the kubelet, they are gone.
"""

from __future__ import annotations

import asyncio
import shlex
import zlib

from bed.parts import die_with_parent

GATEWAY = "10.244.0.1"
BITS = 16


async def command(*argv: str) -> None:
    """Run it; OSError with what it said where it fails."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(argv)}: {said.decode(errors='replace').strip()}")


async def in_network(pid: int, *lines: str) -> None:
    """Give lines to ip(8) in the network of that process."""
    script = " && ".join(f"ip {line}" for line in lines)
    await command("nsenter", "--target", str(pid), "--net", "sh", "-c", script)


class Sandbox:
    """Of one pod that has an address of its own."""

    def __init__(self, uid: str, ip: str, switch_pid: int) -> None:
        self.ip, self.switch_pid = ip, switch_pid
        self.device = f"pod{zlib.crc32(uid.encode()):08x}"
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, host_name: str, memory: dict[str, str], is_cut: bool) -> None:
        lines = [f"hostname {shlex.quote(host_name)}"]
        for path, size in memory.items():
            options = f"mode=1777,size={in_bytes(size)}" if size else "mode=1777"
            lines.append(f"mount -t tmpfs -o {options} none {shlex.quote(path)}")
        script = " && ".join([*lines, "echo ready", "exec sleep infinity"])
        self.process = await asyncio.create_subprocess_exec(
            "unshare", "--mount", "--net", "--uts", "--ipc", "sh", "-c", script,
            stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            raise OSError(f"the namespaces of {host_name} cannot be made")
        await self._plug(is_cut)

    async def _plug(self, is_cut: bool) -> None:
        device, state = self.device, "down" if is_cut else "up"
        await in_network(
            self.switch_pid,
            f"link add {device} type veth peer name eth0 netns {self.pid}",
            f"link set {device} master bed {state}",
        )
        await in_network(
            self.pid,
            "link set lo up",
            f"addr add {self.ip}/{BITS} dev eth0",
            "link set eth0 up",
            f"route add default via {GATEWAY}",
        )

    async def cut(self, is_cut: bool) -> None:
        """Take its cable out, or put it back."""
        await in_network(self.switch_pid, f"link set {self.device} {'down' if is_cut else 'up'}")

    def enter(self) -> list[str]:
        """What starts a program of a container."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--net", "--uts", "--ipc"]

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


def in_bytes(size: str) -> int:
    """A quantity as Kubernetes writes it."""
    for unit, factor in _UNITS.items():
        if size.endswith(unit):
            return int(float(size.removesuffix(unit)) * factor)
    return int(size)
