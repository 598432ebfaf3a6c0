"""An agent for supervision only: an orphan reaper, a zygote, a forked worker and an exec'd one."""

import asyncio
import os
import sys
import time
from pathlib import Path

from elastane.process.execspawn import ExecSpawner
from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import OrphanReaper
from elastane.process.process import WorkerCommand
from elastane.process.zygote.client import ZygoteSpawner


async def main(mark, out):
    become_subreaper()
    env = dict(os.environ, ELASTANE_PROCESS_MARK=mark)
    reaper = OrphanReaper(mark)
    await reaper.start()
    zygote = ZygoteSpawner(("torch",) if "--torch" in sys.argv else (), env, sys.executable)
    await zygote.start()
    family = str(Path(__file__).with_name("family.py"))
    for name, spawner in (("forked", zygote), ("execed", ExecSpawner(sys.executable))):
        fd = os.open(Path(out) / name, os.O_CREAT | os.O_WRONLY)
        command = WorkerCommand("script", family, (), env, out, 0, fd, 2, {})
        await spawner.spawn(command)
    if "--deadline" in sys.argv:
        reaper.allow_until(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 2 * 10**9)
    (Path(out) / "agent").write_text(f"{os.getpid()} {zygote.pid} {reaper.pid}\n")
    if "--close" in sys.argv:
        while not all(  # noqa: ASYNC110 - a file has no event
            (Path(out) / name).read_text().endswith("\n") for name in ("forked", "execed")
        ):
            await asyncio.sleep(0.01)
        await zygote.close()
        await reaper.close()
        return
    await asyncio.sleep(600)


asyncio.run(main(sys.argv[1], sys.argv[2]))
