"""The network of the pods: a bridge in a namespace of its own, unseen by the machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bed.parts import Part
from bed.sandbox import BITS, GATEWAY

SERVICE = ("10.96.0.1", 443)
READY_S = 30.0
_RELAY = Path(__file__).parent / "programs" / "api_relay.py"
_SWITCH = " && ".join(
    [
        "ip link set lo up",
        # With an address of its own: else it takes one of its ports', and changes it as they go.
        "ip link add name bed address 02:00:00:00:00:01 type bridge",
        f"ip addr add {GATEWAY}/{BITS} dev bed",
        f"ip addr add {SERVICE[0]}/32 dev lo",
        "ip link set bed up",
        "echo ready",
        "exec sleep infinity",
    ]
)


class Network:
    """Pods reach each other, and the API server by the address of its Service."""

    def __init__(self, folder: Path, api_port: int) -> None:
        self.parts = [Part("switch", folder), Part("api-relay", folder)]
        self.switch, self.relay = self.parts
        self.api_port = api_port

    @property
    def switch_pid(self) -> int:
        assert self.switch.process is not None
        return self.switch.process.pid

    def start(self) -> None:
        self.switch.start(["unshare", "--net", "sh", "-c", _SWITCH])
        _wait_ready(self.switch)
        address, port = SERVICE
        told = [str(self.switch_pid), address, str(port), str(self.api_port)]
        self.relay.start([sys.executable, "-S", "-E", str(_RELAY), *told])
        _wait_ready(self.relay)

    def stop(self) -> None:
        for part in self.parts:
            part.kill()


def _wait_ready(part: Part) -> None:
    deadline_s = time.monotonic() + READY_S
    while "ready" not in part.log.read_text():
        if not part.is_alive or time.monotonic() > deadline_s:
            raise OSError(part.tail())
        time.sleep(0.01)


def unavailable() -> str:
    """Why pods can have no namespaces of their own here, or an empty string."""
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c",
         "ip link add name bed type bridge && mount -t tmpfs none /mnt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if made.returncode == 0 else f"namespaces cannot be made: {made.stderr.strip()}"
