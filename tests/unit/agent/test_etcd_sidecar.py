"""The etcd server of an agent writes its log to no other file."""

import asyncio
from pathlib import Path

import pytest

from elastane.agent import etcd_sidecar
from elastane.stores.etcd.server import LocalServer


def test_the_log_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    behind = tmp_path / "own"
    behind.write_text("mine")
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "log").symlink_to(behind)
    start = etcd_sidecar._start(LocalServer("/bin/echo", folder), {}, "mark")
    with pytest.raises(OSError, match="symbolic links"):
        asyncio.run(start)
    assert behind.read_text() == "mine"
