"""A file store's folder that another user created first: planted files are refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

from elastane.errors import ConfigurationError, StoreError
from elastane.stores.file import FileStore
from elastane.stores.jobs import JobKeys
from elastane.stores.pages import FolderPage, Root

ATTACKER, VICTIM = 65534, 12345


def token(folder: Path) -> str:
    """Return the secret that the first agent of a job uses."""
    return asyncio.run(JobKeys(FileStore(folder), "job").token())


def planted(folder: Path, uid: int) -> str:
    """Put a job's secret into the folder as another user; return it."""
    secret = "a" * 64
    entries = folder / "job" / "token" / "@entry"
    entries.mkdir(parents=True, mode=0o755)
    page = FolderPage(number=1, kind="value", nonce="0" * 16, before="-", value=secret.encode())
    (entries / f"{1:018d}").write_bytes(page.encode())
    for path in [folder / "job", *(folder / "job").rglob("*")]:
        os.lchown(path, uid, uid)
        if path.is_dir():
            path.chmod(0o755)
    return secret


@contextlib.contextmanager
def as_user(uid: int):
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared(tmp_path):
    """Yield a folder that other users can reach."""
    root = Path(tempfile.gettempdir())
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(root) and path != root:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o1702])
def test_a_folder_that_every_user_can_write_is_refused_with_its_mode(shared, mode):
    shared.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:o}") as refused:
        token(shared)
    assert refused.value.slug == "store-folder-mode"
    assert f"--rdzv-endpoint {shared}/elastane" in str(refused.value)
    assert ("chmod" in refused.value.next_step) == (mode == 0o777)
    assert not list(shared.iterdir())
    assert len(token(shared / "elastane")) == 64


@pytest.mark.root
@pytest.mark.parametrize("user", [0, VICTIM])
def test_a_secret_that_another_user_planted_is_refused(shared, user):
    """The folder is one that a group may write to by design."""
    os.chown(shared, 0, VICTIM)
    shared.chmod(0o2770)
    planted(shared, ATTACKER)
    with as_user(user), pytest.raises(ConfigurationError) as refused:
        token(shared)
    assert refused.value.slug == "store-owner"
    assert f"{shared}/job belongs to user {ATTACKER}" in str(refused.value)


@pytest.mark.root
def test_a_page_that_another_user_planted_in_our_folder_is_refused(shared):
    planted(shared, ATTACKER)
    for path in [shared / "job", *(shared / "job").rglob("*")]:
        if path.is_dir():
            os.chown(path, 0, 0)
    with pytest.raises(StoreError, match=f"belongs to user {ATTACKER}"):
        token(shared)


@pytest.mark.root
def test_a_link_in_the_place_of_a_folder_is_refused(shared, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    secret = planted(elsewhere, 0)
    assert token(elsewhere) == secret
    (shared / "job").symlink_to(elsewhere / "job")
    os.lchown(shared / "job", ATTACKER, ATTACKER)
    with pytest.raises(ConfigurationError, match="is a link"):
        token(shared)


@pytest.mark.root
@pytest.mark.parametrize("owner", [VICTIM, 0], ids=["own", "of an administrator"])
def test_a_folder_of_this_user_or_of_its_group_is_accepted(shared, owner):
    os.chown(shared, owner, VICTIM)
    shared.chmod(0o2770)
    with as_user(VICTIM):
        made = token(shared)
        assert token(shared) == made
    assert token(shared / "of-root") != made


@pytest.mark.root
def test_another_users_folder_is_refused_where_no_group_shares_it(shared):
    os.chown(shared, ATTACKER, ATTACKER)
    shared.chmod(0o755)
    with pytest.raises(ConfigurationError, match=f"{shared} belongs to user {ATTACKER}"):
        token(shared)


@pytest.mark.root
def test_files_that_a_server_maps_to_another_user_are_ours(shared, monkeypatch):
    """On an NFS export with root_squash, files that root writes belong to `nobody`."""
    secret = planted(shared, ATTACKER)
    monkeypatch.setattr(Root, "_owner_of_new", lambda self: ATTACKER)
    assert token(shared) == secret


@pytest.mark.root
def test_the_owner_of_new_files_is_found_and_the_probe_is_removed(shared):
    os.chown(shared, VICTIM, VICTIM)
    with as_user(VICTIM):
        assert Root(shared)._owner_of_new() == VICTIM
    assert not list(shared.iterdir())
