"""A process whose main thread saves slowly, and which is to end meanwhile.

Usage: slow_save.py FOLDER HOW. The file "saving" says that the save has begun; it ends once "go"
exists. HOW: `sigterm` waits for the signal, `handler` catches it, `restart` restarts all workers
by another thread, `end` is stopped by the agent while another thread waits for a place.
"""

import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from elastane.process.control_socket import End, encode
from elastane.worker import unmodified
from elastane.worker.control_socket import ControlSocket
from elastane.worker.script_saves import ScriptSaves

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]


class Slow:
    """An object whose save lasts until the test ends it."""

    def __reduce__(self):
        """Wait for the test."""
        (FOLDER / "saving").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
        return int, (7,)


def wait_for(name):
    """Wait for a file."""
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def restart():
    """Restart all workers in the middle of the save."""
    wait_for("saving")
    unmodified.restart("the test says so")


def end():
    """Wait for a place in another world as the agent stops this worker."""
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = ControlSocket(ours)
    line.begin(lambda: None, lambda: None)
    wait_for("saving")
    agents.send(encode(End()))
    print("told to end", file=sys.stderr, flush=True)
    line.next_place()


ScriptSaves(RuntimeError).watch()
if HOW == "handler":
    signal.signal(signal.SIGTERM, lambda *_: (FOLDER / "caught").touch())
if HOW in ("restart", "end"):
    threading.Thread(target=restart if HOW == "restart" else end, daemon=True).start()
torch.save({"weight": torch.ones(1000), "slow": Slow()}, FOLDER / "last.pt")
(FOLDER / "returned").touch()
while HOW in ("restart", "end"):
    time.sleep(0.01)
