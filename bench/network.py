"""Nodes as network namespaces behind a bridge, so that a node can be cut off silently.

The cut removes the node's port from the bridge. Both its interfaces stay up and nothing is refused;
packets are lost, as with a broken switch. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self


def unavailable() -> str:
    """Return why namespaces cannot be made here, or an empty string."""
    if shutil.which("ip") is None:
        return "the `ip` command is missing: apt-get install iproute2"
    if os.geteuid() != 0:
        return "not root"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return probe.stderr.strip() if probe.returncode else ""


class BenchNetwork:
    """A bridge in its own namespace, and one namespace for each node; a context manager."""

    interface = "eth0"

    def __init__(self, nodes: Sequence[str]) -> None:
        self._id = f"elbench{os.getpid()}"
        self.addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(nodes)}

    def prefix(self, node: str) -> tuple[str, ...]:
        """Return the words before a command that run it on that node."""
        return ("ip", "netns", "exec", f"{self._id}-{node}")

    def cut(self, node: str) -> None:
        """Lose every packet from and to this node from now on."""
        ip("-n", f"{self._id}-switch", "link", "set", f"port-{node}", "nomaster")

    def heal(self, node: str) -> None:
        """Carry packets from and to this node again."""
        ip("-n", f"{self._id}-switch", "link", "set", f"port-{node}", "master", "switch")

    def __enter__(self) -> Self:
        switch = f"{self._id}-switch"
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
            ip("-n", switch, "link", "set", "switch", "up")
            for name, address in self.addresses.items():
                self._plug_in(name, address)
        except BaseException:
            self._remove()
            raise
        return self

    def _plug_in(self, name: str, address: str) -> None:
        node, switch = f"{self._id}-{name}", f"{self._id}-switch"
        ip("netns", "add", node)
        port = ("name", f"port-{name}", "netns", switch)
        peer = ("peer", "name", self.interface, "netns", node)
        ip("link", "add", *port, "type", "veth", *peer)
        ip("-n", switch, "link", "set", f"port-{name}", "master", "switch", "up")
        ip("-n", node, "addr", "add", f"{address}/24", "dev", self.interface)
        ip("-n", node, "link", "set", self.interface, "up")
        ip("-n", node, "link", "set", "lo", "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in [*self.addresses, "switch"]:
            command = ["ip", "netns", "del", f"{self._id}-{name}"]
            subprocess.run(command, capture_output=True, check=False)


def ip(*arguments: str) -> None:
    """Run the `ip` command; its own output is the error."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
