"""An agent that starts a snapshot server, prints the path of its socket, and leaves on request."""

import asyncio
import os
import sys
import time

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
    if secret := os.environ.get("TEST_NEIGHBOURS"):
        keeping.replicate_with(lambda: ReplicationSettings("job", (secret.encode(),), "127.0.0.1"))
    keeping.start()
    print(keeping.path, flush=True)
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, told.set)
    await told.wait()
    if within_s := os.environ.get("TEST_OUT_WITHIN_S"):
        keeping.end_by(time.monotonic() + float(within_s))
    await keeping.close()
    await reaper.close()


asyncio.run(main())
