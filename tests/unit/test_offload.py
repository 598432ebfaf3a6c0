"""Blocking calls: bounded in time and number, on threads that are reused and end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from elastane.process import offload as module
from elastane.process.offload import Offload, OffloadFullError


def named() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "elastane-offload"]


async def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_a_call_gives_its_result_or_its_error_from_another_thread() -> None:
    async def body() -> None:
        offload = Offload()
        assert await offload.run(threading.get_ident, 5.0) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 // 0, 5.0)

    asyncio.run(body())


def test_calls_one_after_the_other_use_one_thread_which_ends_when_idle(monkeypatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.05)

    async def body() -> None:
        others, offload = named(), Offload()
        idents = set()
        for _ in range(20):
            idents.add(await offload.run(threading.get_ident, 5.0))
            await until(lambda: offload.running == 0)
        assert len(idents) == 1
        await until(lambda: not set(named()) - set(others))
        assert await offload.run(lambda: 7, 5.0) == 7

    asyncio.run(body())


def test_hanging_calls_are_bounded_in_number() -> None:
    async def body() -> None:
        offload, answered = Offload(threads_max=2), threading.Event()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await offload.run(lambda: answered.wait(10), 0.02)
        with pytest.raises(OffloadFullError, match="2 blocking calls hang"):
            await offload.run(lambda: 1, 5.0)
        answered.set()
        await until(lambda: offload.running == 0)
        assert await offload.run(lambda: 1, 5.0) == 1

    asyncio.run(body())


def test_more_calls_at_a_time_than_threads_idle_all_run() -> None:
    async def body() -> None:
        offload = Offload()
        for _ in range(50):
            calls = [offload.run(lambda n=n: n, 5.0) for n in range(offload.threads_max)]
            assert await asyncio.gather(*calls) == list(range(offload.threads_max))
            await until(lambda: offload.running == 0)

    asyncio.run(body())


def test_a_caller_with_its_answer_finds_room_for_the_next_call() -> None:
    async def body() -> None:
        offload = Offload(threads_max=1)
        for number in range(500):
            assert await offload.run(lambda n=number: n, 5.0) == number
            assert offload.running == 0

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(body())
    finally:
        sys.setswitchinterval(interval_s)
