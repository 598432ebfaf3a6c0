"""How an agent ends a worker: by a message, and by a signal that depends on unsaved state."""

import signal
from types import SimpleNamespace

import pytest

from elastane.agent.workers import LocalWorkerGroup
from elastane.process import control_socket


class Process:
    def __init__(self):
        self.signals = []

    def kill_group(self, signum):
        self.signals.append(("group", signum))

    def send_signal(self, signum):
        self.signals.append(("itself", signum))


@pytest.mark.parametrize(
    ("has_saved", "got_sigterm", "signals"),
    [
        (False, False, [("itself", signal.SIGTERM)]),
        (False, True, []),
        (True, False, [("group", signal.SIGKILL)]),
        (True, True, [("group", signal.SIGKILL)]),
    ],
)
def test_a_worker_is_asked_to_end_and_killed_if_it_has_no_state_to_lose(
    has_saved, got_sigterm, signals
):
    """A worker that waits in `init()` may ignore SIGTERM, so a message ends it."""
    sent, process = [], Process()
    sockets = SimpleNamespace(send=lambda local_rank, word: sent.append((local_rank, word)))
    page = SimpleNamespace(has_saved=has_saved)
    worker = SimpleNamespace(local_rank=3, page=page, got_sigterm=got_sigterm)
    LocalWorkerGroup._ask_to_end(SimpleNamespace(_sockets=sockets), worker, process)
    assert sent == [(3, control_socket.End())]
    assert process.signals == signals
