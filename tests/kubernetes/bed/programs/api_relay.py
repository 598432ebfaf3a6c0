"""Carries connections from the address of the Service `kubernetes` to the API server.

The pods' network is a namespace of its own, from which this machine cannot be reached; a socket
belongs to the namespace that it was made in, so that this program listens in one and connects in
the other. Arguments: pid of a process there, address, port, the API server's port.
"""

import asyncio
import ctypes
import os
import socket
import sys

NEW_NET = 0x40000000
CHUNK_BYTES = 65536


def listener(pid, address, port):
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    assert libc.setns(theirs, NEW_NET) == 0, os.strerror(ctypes.get_errno())
    try:
        made = socket.create_server((address, port), backlog=512)
    finally:
        assert libc.setns(own, NEW_NET) == 0
    return made


async def copy(reader, writer):
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


async def main(pid, address, port, target):
    async def carry(reader, writer):
        try:
            there, back = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))
        back.close()
        writer.close()

    server = await asyncio.start_server(carry, sock=listener(pid, address, port))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
