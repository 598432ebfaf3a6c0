"""A process that uses a file store, for tests that kill or stop it at a chosen step.

store_child.py write FOLDER STEP SIGNAL    writes the second version of `k`, signals itself at STEP
store_child.py lease FOLDER STEP SIGNAL    takes the lease `leadership` of 0.5 s, likewise
store_child.py hold FOLDER JOB             is elected, says so, and keeps the lease
store_child.py save FOLDER JOB STEP        is elected, stops itself at STEP of a save, says how
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from elastane.coordinator.election import Election
from elastane.errors import StoreError
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobRecord, JobSpec
from elastane.stores.file import FileStore
from elastane.stores.jobs import JobKeys

armed = threading.Event()


def at(step: str, number: int) -> Callable[[str], None]:
    def on_step(name: str) -> None:
        if armed.is_set() and name == step:
            armed.clear()
            say(f"at {name}")
            # To this very thread: a signal to the process may let it run on for a moment.
            signal.pthread_kill(threading.get_ident(), number)

    return on_step


def say(text: str) -> None:
    print(text, flush=True)


async def write(folder: Path, step: str, number: str) -> None:
    store = FileStore(folder, on_step=at(step, int(number)))
    entry = await store.compare_and_set("k", b"1" * 1000, 0)
    armed.set()
    await store.compare_and_set("k", b"2" * 1000, entry.version)
    say("done")


async def lease(folder: Path, step: str, number: str) -> None:
    store = FileStore(folder, on_step=at(step, int(number)))
    await store.get("k")
    armed.set()
    await store.lease("leadership", b"child", 0.5)
    say("done")


def elect(store: FileStore, job: str, timing: Timing) -> Election:
    spec = JobSpec(job=job, min_nodes=1, max_nodes=2, max_restarts=3, timing=timing)
    return Election(JobKeys(store, job), "child", spec, on_authority=lambda e: say(str(e)))


async def hold(folder: Path, job: str) -> None:
    election = elect(FileStore(folder), job, Timing())
    await election.campaign()
    say(f"term {election.term}")
    await election.keep()


async def save(folder: Path, job: str, step: str) -> None:
    timing = Timing(lease_ttl_s=0.5, lease_renew_s=0.1)
    election = elect(FileStore(folder, on_step=at(step, signal.SIGSTOP)), job, timing)
    await election.campaign()
    spec = JobSpec(job=job, min_nodes=1, max_nodes=2, max_restarts=3)
    await election.save(JobRecord(spec=spec, restarts_used=1))
    armed.set()
    try:
        await election.save(JobRecord(spec=spec, restarts_used=99))
    except StoreError as error:
        say(f"{type(error).__name__} {error.slug} held={election.held()}")
    else:
        say("saved")


verb, place, *rest = sys.argv[1:]
asyncio.run({"write": write, "lease": lease, "hold": hold, "save": save}[verb](Path(place), *rest))
