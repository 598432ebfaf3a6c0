"""The sources of notices on this machine, as an agent's loop reads them: files and commands."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from process_harness import eventually, worker_environment
from supervise import alive

from elastane.notices import local
from elastane.notices.local import CommandReader, FileReader
from elastane.notices.rules import NoticeSource
from elastane.protocol.events import Notice


def file(path: Path) -> FileReader:
    return FileReader(NoticeSource("file", str(path)))


async def notice_of(reader: FileReader | CommandReader) -> Notice:
    """Wait until a source shows a notice."""
    found: list[Notice] = []
    async with asyncio.timeout(90):
        while not found:
            found = await reader.read()
            await asyncio.sleep(0.01)
    return found[0]


def test_a_file_is_a_notice_from_when_it_is_there(tmp_path):
    async def body():
        reader = file(tmp_path / "gone" / "going")
        assert await reader.read() == []
        (tmp_path / "gone").mkdir()
        (tmp_path / "gone" / "going").write_text("90 power")
        (first,) = await reader.read()
        assert first.reason == "power" and 80 < first.within_s <= 90
        (tmp_path / "gone" / "going").write_text("2 power")
        (second,) = await reader.read()
        assert second.within_s <= 2
        (tmp_path / "gone" / "going").unlink()
        assert await reader.read() == []

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["empty", "folder", "pipe", "endless", "garbage"])
def test_anything_at_the_path_is_a_notice(tmp_path, kind):
    path = tmp_path / "going"
    match kind:
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "garbage":
            path.write_bytes(bytes(range(256)) * 100)
    (notice,) = asyncio.run(file(path).read())
    assert notice.drains and notice.within_s is None and notice.reason.isprintable()


def test_an_unreadable_path_is_an_error_and_not_a_notice(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        asyncio.run(file(tmp_path / "loop").read())


def run_command(words: str, monkeypatch, tmp_path: Path) -> CommandReader:
    monkeypatch.setattr(local, "COMMAND_PAUSE_S", 0.05)
    monkeypatch.chdir(tmp_path)
    return CommandReader(NoticeSource("command", words), worker_environment())


@pytest.mark.parametrize(
    ("words", "reason", "within_s"),
    [
        ("sh -c 'echo 30 spot; exec sleep 99'", "spot", 30.0),
        ("sh -c 'printf half; exit 3'", "half", None),
        ("true", "true says so", None),
        ("sh -c 'head -c 100000 /dev/zero | tr \\\\0 x; exec sleep 99'", "x" * 200, None),
    ],
)
def test_a_line_or_an_end_with_0_is_a_notice(words, reason, within_s, tmp_path, monkeypatch):
    async def body():
        reader = run_command(words, monkeypatch, tmp_path)
        found = await notice_of(reader)
        await reader.close()
        return found

    found = asyncio.run(body())
    assert found.reason == reason
    assert found.within_s is None if within_s is None else within_s - 5 < found.within_s <= within_s


def test_a_command_that_fails_is_no_notice_and_is_run_again(tmp_path, monkeypatch):
    async def body():
        reader = run_command("sh -c 'echo >> tries; test -e go'", monkeypatch, tmp_path)
        tries = tmp_path / "tries"
        for wanted in (1, 2, 3):
            while not (tries.exists() and len(tries.read_text()) >= wanted):
                assert await reader.read() == []
                await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        await notice_of(reader)

    asyncio.run(body())


def test_a_command_that_cannot_be_run_is_an_error_each_time_and_no_notice(tmp_path, monkeypatch):
    async def body():
        reader = run_command("./nothing", monkeypatch, tmp_path)
        errors = 0
        async with asyncio.timeout(90):
            while errors < 2:
                try:
                    assert await reader.read() == []
                except Exception as error:
                    assert "nothing" in str(error)
                    errors += 1
                await asyncio.sleep(0.01)

    asyncio.run(body())


def test_no_process_of_a_command_is_left(tmp_path, monkeypatch):
    async def body():
        reader = run_command("sh -c 'sleep 99 & echo $$ > pids; wait'", monkeypatch, tmp_path)
        await reader.read()
        pids = tmp_path / "pids"
        await eventually(lambda: pids.exists() and pids.read_text(), "it runs")
        await reader.close()
        await eventually(lambda: not alive(int(pids.read_text())), "it has ended")

    asyncio.run(body())
