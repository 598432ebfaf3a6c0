"""Sessions over TCP: the asyncio shell around `protocol.wire`, for both sides.

It owns sockets, timers and buffers of connections. It knows nothing of what messages mean. A
connection that breaks a bound or the protocol is cut and says why; nothing here ends a process.
"""

from elastane.process.rpc.client import Session, connect
from elastane.process.rpc.door import Access, Listener
from elastane.process.rpc.link import LinkOwner, RpcLink
from elastane.process.rpc.sockets import insist_on_room

__all__ = ["Access", "LinkOwner", "Listener", "RpcLink", "Session", "connect", "insist_on_room"]
