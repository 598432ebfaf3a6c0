"""The port for the next world on this node: each session offers a different one."""

import asyncio
from types import SimpleNamespace

import pytest

from elastane.agent import process_group_store
from elastane.agent.process_group_store import OfferedPort
from elastane.agent.shell import AgentShell, Outlets
from elastane.protocol.effects import Exit
from elastane.protocol.events import GroupAble, Linked, Signalled
from elastane.protocol.model import Fence, PortOffer, Sharding


class Core:
    """Rules that record the shell's events; a signal ends them."""

    wake_s = 0.0
    train_until_s = outcome = None

    def __init__(self, group):
        self.group, self.heard = group, []

    def handle(self, event, now_s, readings):
        self.heard.append(event)
        return [Exit(0, "", None)] if isinstance(event, Signalled) else []


@pytest.mark.parametrize("group", [None, object()], ids=["no workers", "workers"])
def test_each_session_offers_a_port_of_its_own(group):
    port = OfferedPort(listening=True)
    first, core = port.open(), Core(group)

    async def run():
        warm = asyncio.Event()
        setup = SimpleNamespace(spawner=SimpleNamespace(warm=warm))
        outlets = Outlets(
            link=None,
            log_event=None,
            set_deadline=lambda until_ns: None,
            fault_seen=lambda: None,
            copies=lambda: None,
        )
        shell = AgentShell(core, setup, port, asyncio.Queue(), outlets)
        # The port that workers speak of was given up while their word waited in the queue.
        late = GroupAble(Fence(1, 0), (0,), PortOffer(first.port, True), sharding=Sharding())
        for event in (Linked(), Linked(), late, Signalled("SIGTERM")):
            shell.post(event)
        await shell.run()

    asyncio.run(run())
    once, again = (event.offer for event in core.heard if isinstance(event, Linked))
    (able,) = (event for event in core.heard if isinstance(event, GroupAble))
    held = port.offer
    port.close()
    assert first.port != once.port != again.port
    assert again == held == able.offer and able.sharding


def test_the_kernel_cannot_choose_the_port_again_that_is_given_up(monkeypatch):
    port = OfferedPort(listening=True)
    port.open()
    held, bind = port.socket, process_group_store.bound

    def bound(host, number):
        assert held.fileno() != -1, "the port that others know is free for the kernel's choice"
        return bind(host, number)

    monkeypatch.setattr(process_group_store, "bound", bound)
    port.open()
    assert held.fileno() == -1
    port.close()
