"""The file store under real faults: kills, stops, garbage, full and vanished folders."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_support import DEADLINE_S, QUICK, asynchronous, elect, poll, take

from elastane.errors import StoreError
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobRecord, JobSpec
from elastane.stores.file import FileStore
from elastane.stores.pages import FolderPage, Hooks, PageReading, Pages, Root

SCRIPT = Path(__file__).parent / "scripts" / "store_child.py"
# Of a lease that must not run out before a busy host has looked at it.
TTL_S = 1.0
STEPS = ["opened", "half-written", "written", "synced", "linked", "durable"]
SPEC = JobSpec(job="job", min_nodes=1, max_nodes=2, max_restarts=3)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children = []

    def start(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), *map(str, args)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_a_writer_killed_at_any_step_leaves_a_whole_value(tmp_path, spawn, step) -> None:
    child = spawn("write", tmp_path, step, int(signal.SIGKILL))
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    store = FileStore(tmp_path)
    entry = await store.get("k")
    expected = b"2" if step in ("linked", "durable") else b"1"
    assert entry is not None
    assert entry.value == expected * 1000
    following = await store.compare_and_set("k", b"3", entry.version)
    assert await store.get("k") == following
    names = [path.name for path in (tmp_path / "k" / "@entry").iterdir()]
    assert not [name for name in names if name.startswith("tmp.")], "a dead writer's file stays"


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_a_candidate_killed_at_any_step_leaves_a_lease_that_can_be_had(
    tmp_path, spawn, step
) -> None:
    child = spawn("lease", tmp_path, step, int(signal.SIGKILL))
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    begun = time.monotonic()
    lease = await take(FileStore(tmp_path))
    waited_s = time.monotonic() - begun
    assert lease.held()
    if step in ("linked", "durable"):
        assert lease.term == 2 and waited_s >= 0.5
    else:
        assert lease.term == 1


@pytest.mark.parametrize("step", ["opened", "synced"])
@asynchronous
async def test_a_holder_stopped_in_the_middle_of_a_save_is_fenced(tmp_path, spawn, step) -> None:
    child = spawn("save", tmp_path, "job", step)
    poll(lambda: stopped(child.pid), "the child stops itself")
    election = elect(FileStore(tmp_path), "job", QUICK)
    record = await election.campaign()
    assert record is not None
    assert record.restarts_used == 1
    os.kill(child.pid, signal.SIGCONT)
    output, _ = child.communicate(timeout=DEADLINE_S)
    assert output.splitlines()[-1] == "LeaseLostError lease-lost held=False"
    found = await election.load()
    assert found == record, "the stopped holder's write took effect after its successor had read"
    await election.save(JobRecord(spec=SPEC, restarts_used=2))


@asynchronous
async def test_a_stopped_holder_whose_write_got_through_is_read_by_its_successor(
    tmp_path, spawn
) -> None:
    child = spawn("save", tmp_path, "job", "linked")
    poll(lambda: stopped(child.pid), "the child stops itself")
    election = elect(FileStore(tmp_path), "job", QUICK)
    record = await election.campaign()
    assert record is not None
    assert record.restarts_used == 99
    os.kill(child.pid, signal.SIGCONT)
    output, _ = child.communicate(timeout=DEADLINE_S)
    assert output.splitlines()[-1] == "LeaseLostError lease-lost held=False"


@asynchronous
async def test_a_killed_holders_lease_is_taken_over_once_its_ttl_has_passed(
    tmp_path, spawn
) -> None:
    jobs = [f"job{number}" for number in range(3)]
    children = [spawn("hold", tmp_path, job) for job in jobs]
    for child in children:
        while not child.stdout.readline().startswith("term"):
            assert child.poll() is None
    store = FileStore(tmp_path)

    async def campaign(job: str, child: subprocess.Popen[str], delay_s: float) -> float:
        election = elect(store, job, Timing())
        running = asyncio.ensure_future(election.campaign())
        done, _ = await asyncio.wait({running}, timeout=delay_s)
        assert not done, "the lease was taken from a living holder"
        child.kill()
        begun = time.monotonic()
        await running
        return time.monotonic() - begun

    delays = (2.6, 2.8, 3.0)
    took_s = await asyncio.gather(*map(campaign, jobs, children, delays))
    assert min(took_s) > 1.0


@asynchronous
async def test_a_late_renewal_and_a_candidate_that_had_judged_before_it_never_both_hold(
    tmp_path,
) -> None:
    """Rule 4: the candidate has read the silent heartbeat and is stopped before it links."""
    judged, go_on = threading.Event(), threading.Event()

    def on_step(step: str) -> None:
        if step == "synced":
            judged.set()
            go_on.wait(DEADLINE_S)

    holder = await FileStore(tmp_path).lease("leadership", b"holder", TTL_S)
    assert holder
    candidate = asyncio.ensure_future(take(FileStore(tmp_path, on_step=on_step)))
    assert await asyncio.to_thread(judged.wait, DEADLINE_S)
    assert not holder.held()
    await holder.renew()
    term = holder.term
    go_on.set()
    assert holder.held()
    done, _ = await asyncio.wait({candidate}, timeout=0.15)
    assert not done, "two hold the lease"
    assert (await candidate).term > term


@asynchronous
async def test_a_heartbeat_that_was_written_too_late_is_no_renewal(tmp_path) -> None:
    leases = []

    def on_step(step: str) -> None:
        if step == "beat" and leases:
            poll(lambda: not leases[0].held(), "the lease runs out during the write")
            leases.clear()

    lease = await FileStore(tmp_path, on_step=on_step).lease("leadership", b"holder", TTL_S)
    assert lease
    term = lease.term
    leases.append(lease)
    await lease.renew()
    assert lease.held()
    assert lease.term > term, "a candidate may have judged before the heartbeat came"


def plant_rotten(folder: Path, whole: bytes) -> list[str]:
    """Put files that are not pages after page 1; return their names."""
    page = FolderPage(number=5, kind="value", nonce="0", before="-", value=b"good").encode()
    rotten = page.replace(b"good", b"goob")
    for number, content in enumerate([b"", whole[:-2], b"\xff" * 99, rotten, whole], start=2):
        (folder / f"{number:018d}").write_bytes(content)
    os.mkfifo(folder / f"{7:018d}")
    (folder / f"{8:018d}").symlink_to("/etc/hostname")
    (folder / f"{9:018d}").mkdir()
    return [f"{number:018d}" for number in range(2, 10)]


@asynchronous
async def test_a_lease_passes_over_files_that_are_no_terms_and_names_them(tmp_path, caplog) -> None:
    store = FileStore(tmp_path)
    lease = await store.lease("k", b"good", 5.0)
    assert lease
    folder = tmp_path / "k" / "@lease"
    names = plant_rotten(folder, (folder / f"{1:018d}").read_bytes())
    (folder / "notes.txt").write_text("x")
    with caplog.at_level(logging.WARNING):
        fresh = FileStore(tmp_path)
        for _ in range(2):
            found = await fresh.holder("k")
            assert found and found.value == b"good"
    for name in [*names, "notes.txt"]:
        assert caplog.text.count(f"{name} is skipped") == 1, f"{name} not named once"
    await lease.release()
    following = await fresh.lease("k", b"next", 5.0)
    assert following and following.term > 9


@asynchronous
async def test_a_damaged_newest_page_is_an_error_and_no_older_one_takes_its_place(tmp_path) -> None:
    store = FileStore(tmp_path)
    await store.compare_and_set("k", b"old", 0)
    newest = await store.compare_and_set("k", b"new", 1)
    page = tmp_path / "k" / "@entry" / f"{newest.version:018d}"
    whole = page.read_bytes()
    for content in (b"", whole[:-1], whole.replace(b"new", b"neW")):
        page.write_bytes(content)
        for call in (store.get("k"), store.compare_and_set("k", b"x", 1)):
            with pytest.raises(StoreError, match=str(page)) as refused:
                await call
            assert refused.value.slug == "store-page-damaged"
    page.write_bytes(whole)
    assert await store.get("k") == newest


def hooks() -> Hooks:
    return Hooks(on_step=lambda step: None, on_skip=lambda path, why: None, guard=lambda: None)


def pages_after(tmp_path: Path, count: int) -> tuple[Pages, PageReading]:
    """Return pages to which `count` were added since the reading."""
    pages = Pages(Path(), Root(tmp_path), hooks())
    assert pages.append(PageReading(None, 0), "value", b"0")
    stale = pages.latest()
    for number in range(count):
        page = pages.append(pages.latest(), "value", str(number).encode())
        assert page
        pages.tidy(page)
    return pages, stale


def test_a_writer_that_slept_through_the_pruning_of_its_number_has_no_effect(tmp_path) -> None:
    pages, stale = pages_after(tmp_path, 30)
    before = pages.latest()
    assert not (tmp_path / f"{stale.top + 1:018d}").exists()
    try:
        assert pages.append(stale, "value", b"stale") is None
    except StoreError as error:
        assert error.slug == "store-unsure"
    assert pages.latest() == before


def test_a_writer_whose_flush_many_others_outrun_knows_that_it_won(tmp_path, monkeypatch) -> None:
    writing = pages_after(tmp_path, 3)[0]
    flush = os.fsync

    def overtaken(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return flush(descriptor)
        monkeypatch.setattr(os, "fsync", flush)
        for _ in range(30):
            page = others.append(others.latest(), "value", b"later")
            assert page
            others.tidy(page)
        return flush(descriptor)

    others = Pages(Path(), Root(tmp_path), hooks())
    monkeypatch.setattr(os, "fsync", overtaken)
    won = writing.append(writing.latest(), "value", b"first")
    assert won
    assert others.latest().top == won.number + 30


def test_a_writer_into_the_last_gap_knows_that_it_lost(tmp_path) -> None:
    pages, stale = pages_after(tmp_path, 3)
    (tmp_path / f"{stale.top + 1:018d}").unlink()
    assert pages.append(stale, "value", b"stale") is None
    assert not (tmp_path / f"{stale.top + 1:018d}").exists()


@asynchronous
async def test_a_write_that_fails_after_its_link_is_unsure_and_one_that_cannot_tidy_is_done(
    tmp_path, monkeypatch
) -> None:
    failing = ""

    def on_step(step: str) -> None:
        if step == failing == "linked":
            raise OSError(errno.EIO, "Input/output error")
        if step == failing == "durable":
            monkeypatch.setattr(os, "scandir", too_many)

    def too_many(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    store = FileStore(tmp_path, on_step=on_step)
    first = await store.compare_and_set("k", b"1", 0)
    failing = "linked"
    with pytest.raises(StoreError) as unsure:
        await store.compare_and_set("k", b"2", first.version)
    assert unsure.value.slug == "store-unsure"
    second = await store.get("k")
    assert second.value == b"2"
    failing = "durable"
    third = await store.compare_and_set("k", b"3", second.version)
    monkeypatch.undo()
    assert await store.get("k") == third


@asynchronous
async def test_a_link_of_which_the_file_server_reports_nothing_is_unsure(
    tmp_path, monkeypatch
) -> None:
    link = os.link

    def link_without_answer(*args: object, **named: object) -> None:
        link(*args, **named)
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    store = FileStore(tmp_path)
    first = await store.compare_and_set("k", b"1", 0)
    monkeypatch.setattr(os, "link", link_without_answer)
    with pytest.raises(StoreError) as unsure:
        await store.compare_and_set("k", b"2", first.version)
    assert unsure.value.slug == "store-unsure"
    assert (await store.get("k")).value == b"2"


def test_a_folder_does_not_grow_with_the_number_of_writes(tmp_path) -> None:
    pages_after(tmp_path, 40)
    assert len(list(tmp_path.iterdir())) <= 10
