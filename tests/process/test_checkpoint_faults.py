"""Checkpoints under real faults: kills at any instant, full disks, mounts that go, bad sectors."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import s3_server
from small_saves import begin, opened, save, steps

from elastane.cli.main import main
from elastane.errors import FencedError, StorageError
from elastane.storage.folder import PLACE
from elastane.storage.places import storage_errors

SCRIPTS = Path(__file__).parent / "scripts"
MB = 1 << 20


def told(script, *words, timeout_s=110):
    command = [sys.executable, str(SCRIPTS / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return json.loads(done.stdout)


def kills(folder, count, timeout_s):
    seed = random.randrange(1 << 30)
    found = told("checkpoint_kills.py", folder, count, seed, timeout_s=timeout_s)
    print(f"checkpoint_kills.py {folder} {count} {seed}: {found}")
    assert found["kills"] == count
    # Most of a saver's life is within a save, so a good part of the kills must have hit one.
    assert found.get("begun", 0) + found.get("vouched for", 0) >= count // 10


def test_a_kill_at_any_instant_leaves_the_previous_or_the_new_checkpoint(tmp_path):
    kills(tmp_path, 100, 110)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_kills_leave_the_previous_or_the_new_checkpoint_each_time(tmp_path):
    kills(tmp_path, 1000, 1700)


def test_a_kill_before_each_change_leaves_the_previous_or_the_new_checkpoint(tmp_path):
    found = told("checkpoint_steps.py", tmp_path)
    assert found["calls"] > 30 and found["previous"] > 15 and found["new"] > 8


def half(folder, number, first, count):
    """Start one half of a split job; return once it has published a checkpoint, or has ended."""
    words = [str(word) for word in (folder, number, first, count)]
    environ = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1] / "shared")}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "checkpoint_half.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    process.stderr.readline()
    return process


def outcome(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return json.loads(out)


def test_in_a_split_job_only_the_half_of_the_later_round_can_publish(tmp_path):
    old = half(tmp_path, 1, 100_000, 1_000_000)  # it has come further, and would never end
    new = half(tmp_path, 2, 100, 20)
    later, earlier = outcome(new), outcome(old)
    assert later == {"published": list(range(100, 120)), "fenced": False}
    assert earlier["fenced"] and earlier["published"]
    repository = opened(tmp_path)
    found = repository.newest_valid()
    assert not found.skipped and (found.found.key.round, found.found.key.step) == (2, 119)
    with pytest.raises(FencedError):
        save(repository, 999_999, round=1)
    repository.prune(1)
    assert steps(repository) == [119] and repository.unfinished() == []


def mounted(path, *options):
    path.mkdir(exist_ok=True)
    command = ["mount", *options, str(path)]
    if os.getuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount a file system")


def unmount(path):
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.fixture
def small(tmp_path):
    """Yield a file system of 8 MB in memory."""
    path = tmp_path / "small"
    mounted(path, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    yield path
    unmount(path)


@pytest.fixture
def disk(tmp_path):
    """Yield a file system on its own disk, which is a file in memory: (mount point, that file)."""
    backing = tmp_path / "backing"
    mounted(backing, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    image, path = backing / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(48 * MB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    try:
        mounted(path, "-o", "loop,errors=continue", str(image))
        yield path, image
    finally:
        unmount(path)
        unmount(backing)


@pytest.fixture(params=["small", "disk"])
def limited(request):
    """Yield a place without room for two checkpoints of 5 MB."""
    if request.param == "small":
        return request.getfixturevalue("small")
    path, _ = request.getfixturevalue("disk")
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    (path / "ballast").write_bytes(bytes(free - 8 * MB))
    return path


def large(step):
    return {"__0_0.distcp": bytes([step]) * (5 * MB), "state.msgpack": b"x"}


@pytest.mark.root
def test_a_full_disk_fails_the_save_and_nothing_else(limited):
    repository = opened(limited)
    save(repository, 1, large(1))
    for _ in range(3):
        with pytest.raises(OSError, match="No space") as full:
            save(repository, 2, large(2))
        assert full.value.errno == errno.ENOSPC
        for folder in repository.unfinished():
            assert "__0_0.distcp" not in repository.storage.names(folder)
            repository.abandon(folder)
        assert repository.newest_valid().found.key.step == 1 and repository.unfinished() == []
    save(repository, 3, {"a": b"small"})
    repository.prune(1)
    save(repository, 4, large(4))
    assert steps(repository) == [4, 3]


@pytest.mark.root
def test_a_save_without_enough_room_fails_before_any_write(limited, monkeypatch):
    repository, written = opened(limited), []
    save(repository, 1, large(1))
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: (written.append(at), pwrite(fd, data, at))[1]
    )
    with pytest.raises(OSError, match="No space"):
        save(repository, 2, large(2))
    assert written == []


@pytest.mark.root
def test_a_disk_that_fills_up_during_a_save_fails_the_save(limited):
    repository = opened(limited)
    save(repository, 1)
    folder = begin(repository, 2)
    with pytest.raises(OSError, match="No space"), (limited / "more").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    with pytest.raises(OSError, match="No space"):
        for number in range(200):  # ext4 may have room in blocks that are begun
            repository.storage.create(f"{folder}/{number}", b"x" * 4096)
    assert repository.newest_valid().found.key.step == 1
    (limited / "more").unlink()
    save(repository, 3)
    assert steps(repository) == [3, 1]


@pytest.mark.root
def test_a_read_only_file_system_refuses_saves_and_allows_restores(small, capsys):
    repository = opened(small)
    save(repository, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    for one in (repository, opened(small)):
        with pytest.raises(OSError) as refused:
            save(one, 2)
        assert refused.value.errno == errno.EROFS
        assert one.newest_valid().found.key.step == 1
    for act in ("ls", "verify", "show"):
        assert main(["checkpoint", act, str(small)]) == 0
    told_so = pytest.raises(StorageError, match=r"Read-only(.|\n)*mount that file system for writ")
    with told_so, storage_errors(str(small)):
        save(repository, 2)
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    save(repository, 3)
    assert steps(repository) == [3, 1]


@pytest.mark.root
def test_a_read_only_place_without_an_id_is_known_by_its_checkpoints(small):
    with pytest.raises(OSError):
        opened("/proc/self/none").storage.place()
    save(opened(small), 1)
    (small / PLACE).unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    ids = {opened(small).storage.place() for _ in range(2)}
    repository = opened(small)
    assert {repository.storage.place()} == ids and len(ids) == 1
    assert repository.newest_valid().found.key.step == 1
    with pytest.raises(OSError, match="Read-only"):
        save(repository, 2)


@pytest.mark.root
def test_a_lost_mount_does_not_count_as_empty_and_gets_no_write(disk):
    path, image = disk
    repository = opened(path)
    save(repository, 1)
    unmount(path)
    for act in (lambda: save(repository, 2), repository.newest_valid, repository.published):
        with pytest.raises(OSError) as refused:
            act()
        assert refused.value.errno == errno.ESTALE
    assert list(path.iterdir()) == []
    mounted(path, "-o", "loop", str(image))
    save(repository, 3)
    assert steps(repository) == [3, 1]


@pytest.mark.root
def test_a_write_error_of_the_disk_fails_the_save_and_is_reported(disk):
    """The file behind the disk cannot grow, which a loop device reports as an error of the disk."""
    path, image = disk
    repository = opened(path)
    save(repository, 1)
    os.sync()
    with pytest.raises(OSError, match="No space"):
        (image.parent / "ballast").write_bytes(bytes(64 * MB))
    with pytest.raises(OSError) as failed:
        for step in range(2, 9):
            save(repository, step, {"a": os.urandom(5 * MB)})
    assert failed.value.errno in (errno.EIO, errno.EROFS, errno.ENOSPC), failed.value
    assert opened(path).newest_valid().found.key.step >= 1


@pytest.mark.root
def test_a_bad_sector_only_invalidates_its_own_checkpoint(disk):
    """The end of the file behind the disk is cut off, so reads there fail."""
    path, image = disk
    repository = opened(path)
    for step in range(1, 7):
        save(repository, step, large(step))
    os.sync()
    os.truncate(image, 30 * MB)
    published = repository.published()
    reasons = {one.key.step: repository.verify(one, fresh=True) for one in published}
    bad = {step for step, reason in reasons.items() if reason}
    assert bad and bad != set(reasons), reasons
    assert {reasons[step] for step in bad} == {"__0_0.distcp cannot be read (I/O error)"}
    choice = repository.newest_valid()
    assert choice.found.key.step == max(set(reasons) - bad)
    assert {one.key.step for one in choice.skipped} == {
        step for step in bad if step > choice.found.key.step
    }


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Yield an S3 server of this test."""
    with s3_server.serving(tmp_path / "s3.log") as one:
        for name, value in s3_server.environment(one.url).items():
            monkeypatch.setenv(name, value)
        yield one


def saved_while_stopped(server, stopped_s):
    """Save while the server is paused for this time; return the repository afterwards."""
    repository = opened(f"s3://{s3_server.BUCKET}/run")
    save(repository, 1)
    outcome = []

    def try_it():
        try:
            outcome.append(save(repository, 2))
        except OSError as error:
            outcome.append(error)

    server.process.send_signal(signal.SIGSTOP)
    saver = threading.Thread(target=try_it)
    saver.start()
    saver.join(stopped_s)
    assert saver.is_alive() or isinstance(outcome[0], OSError)
    server.process.send_signal(signal.SIGCONT)
    saver.join(100)
    assert not saver.is_alive()
    return repository, outcome[0]


def test_a_paused_object_store_delays_the_save(server):
    repository, outcome = saved_while_stopped(server, 1)
    assert repository.published()[0].folder == outcome
    assert repository.newest_valid().found.key.step == 2


@pytest.mark.soak
def test_an_object_store_paused_for_a_minute_fails_at_most_the_save(server):
    repository, outcome = saved_while_stopped(server, 65)
    expected = 1 if isinstance(outcome, OSError) else 2
    assert repository.newest_valid().found.key.step == expected
    save(repository, 3)
    assert repository.newest_valid().found.key.step == 3


def test_an_unreachable_object_store_does_not_count_as_empty(server):
    repository = opened(f"s3://{s3_server.BUCKET}/run")
    save(repository, 1)
    server.process.kill()
    server.process.wait()
    for act in (repository.newest_valid, lambda: save(repository, 2)):
        with pytest.raises(OSError) as refused:
            act()
        assert not isinstance(refused.value, FileNotFoundError)
