"""Streams of a group whose log folder hangs."""

import asyncio
import errno
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from elastane.process.streams import group
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan, StreamChoice
from elastane.protocol.model import Fence


def test_hanging_log_folder_is_given_up_once_and_never_blocks_the_event_loop(
    tmp_path, monkeypatch, caplog
):
    answers = threading.Event()
    hung = []
    real = group.make_rank_dir

    def hang(*args):
        hung.append(args)
        answers.wait(30)
        real(*args)

    monkeypatch.setattr(group, "make_rank_dir", hang)
    monkeypatch.setattr(group, "OPEN_S", 0.1)
    plan = LogPlan(str(tmp_path), redirects={0: StreamChoice.ALL, 1: StreamChoice.ALL})
    streams = GroupStreams(plan, "job", "host-a", Fence(1, 0))

    async def scenario():
        opened = [await streams.open_soon(rank, rank, "default") for rank in (0, 1)]
        fds = len(os.listdir("/proc/self/fd"))
        answers.set()
        deadline_s = time.monotonic() + 10
        while streams._offload.running:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        await streams.finish()
        return opened, fds

    with caplog.at_level(logging.WARNING, "elastane.streams"):
        opened, fds = asyncio.run(scenario())
    assert [(o.stdout, o.stdout_path, o.stderr_path) for o in opened] == [(1, "", "")] * 2
    assert len(hung) == 1, "each worker waited for the folder"
    assert caplog.text.count("no log files") == 1
    assert len(os.listdir("/proc/self/fd")) <= fds, "what opened too late was not closed"


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Next: free space there"), (errno.EACCES, "a folder you can write to")],
)
def test_a_log_folder_that_fails_is_warned_of_with_what_to_do(
    number, advice, tmp_path, monkeypatch, caplog
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(group, "make_rank_dir", fail)
    plan = LogPlan(str(tmp_path), redirects={0: StreamChoice.ALL})
    streams = GroupStreams(plan, "job", "host-a", Fence(1, 0))

    async def scenario():
        opened = await streams.open_soon(0, 0, "default")
        await streams.finish()
        return opened

    with caplog.at_level(logging.WARNING, "elastane.streams"):
        assert asyncio.run(scenario()).stdout == 1
    assert advice in caplog.text


def test_streams_are_opened_off_the_event_loop(tmp_path, monkeypatch):
    threads = []
    real = group.make_rank_dir
    monkeypatch.setattr(
        group, "make_rank_dir", lambda *a: (threads.append(threading.current_thread()), real(*a))
    )
    streams = GroupStreams(
        LogPlan(str(tmp_path), redirects={0: StreamChoice.OUT}), "job", "host-a", Fence(1, 0)
    )

    async def scenario():
        opened = await streams.open_soon(0, 0, "default")
        os.write(opened.stdout, b"x\n")
        await streams.finish()
        return opened

    opened = asyncio.run(scenario())
    assert threads[0] is not threading.main_thread()
    with open(opened.stdout_path) as file:
        assert file.read() == "x\n"


def test_the_sizes_of_a_workers_files_are_noted_as_it_gets_another_rank(tmp_path):
    plan = LogPlan(str(tmp_path), redirects={0: StreamChoice.ALL})
    streams = GroupStreams(plan, "job", "host-a", Fence(1, 0))

    async def scenario():
        opened = await streams.open_soon(0, 3, "default")
        os.write(opened.stdout, b"loads\n")
        await streams.note_rank(0, 1, Fence(2, 0), 5)
        await streams.finish()
        return opened

    opened = asyncio.run(scenario())
    lines = (Path(opened.stdout_path).parent / "worker.jsonl").read_text().splitlines()
    started, placed = map(json.loads, lines)
    assert (started["rank"], started["round"], started["stdout_bytes"]) == (3, 1, 0)
    changed = {name for name in placed if placed[name] != started[name]}
    assert changed == {"rank", "round", "time_ns", "stdout_bytes"}
    assert (placed["rank"], placed["round"], placed["time_ns"], placed["stdout_bytes"]) == (
        1, 2, 5, 6,
    )  # fmt: skip
