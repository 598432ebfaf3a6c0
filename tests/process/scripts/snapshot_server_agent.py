"""An agent that starts a snapshot server, prints the path of its socket, and leaves on request.

Each line "copies" is answered by the newest copies that its heartbeat would report.
"""

import asyncio
import os
import sys
import time

import msgspec

from elastane.agent.snapshot_server import SnapshotServerHandle
from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import OrphanReaper
from elastane.snapshots.messages import ReplicationSettings


async def main():
    become_subreaper()
    keeping = SnapshotServerHandle(dict(os.environ), lambda event: None, lambda reason: None)
    keeping.open()
    reaper = OrphanReaper("none", keeping.path)
    await reaper.start()
    secret = os.environ.get("TEST_NEIGHBOURS", "").encode()
    peers = ReplicationSettings("job", (secret,), "127.0.0.1")
    keeping.start(peers=(lambda: peers) if secret else None)
    print(keeping.path, flush=True)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    while await lines.get() == "copies\n":
        print(msgspec.json.encode(keeping.copies()).decode(), flush=True)
    if within_s := os.environ.get("TEST_OUT_WITHIN_S"):
        keeping.end_by(time.monotonic() + float(within_s))
    await keeping.close()
    await reaper.close()


asyncio.run(main())
