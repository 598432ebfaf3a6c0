"""Sessions over TCP: the asyncio shell around `protocol.wire`, for both sides.

The package owns sockets, timers and buffers of connections, and does not interpret messages. A
connection that breaks a bound or the protocol is closed with a reason; nothing here ends a process.
"""

from elastane.process.rpc.client import Session, connect
from elastane.process.rpc.listener import Access, Listener, insist_on_room

__all__ = ["Access", "Listener", "Session", "connect", "insist_on_room"]
