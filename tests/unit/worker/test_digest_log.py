"""A digest log has each committed step once, for any writers and any ends of them."""

from __future__ import annotations

import json
import os

import pytest

from elastane.errors import ConfigurationError, JobError
from elastane.worker.digest_log import DigestLog, digest_log_of, read_digest_log

SETTINGS = {"shards": 8, "seed": 1, "data": {"n": 10}, "threads": 1}


def goes(log, steps, rank=0, said="x", settings=SETTINGS):
    """Pass the boundaries after these numbers of committed steps."""
    for committed in steps:
        digests = {"net": f"{said}{committed - 1}"}
        log.at(committed, (rank, 3), lambda: settings, lambda d=digests: d)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "made" / "digests.jsonl"


def test_each_step_is_written_once_by_rank_0(path):
    goes(DigestLog(path), [0, 1, 1, 2, 3])
    goes(DigestLog(path.parent / "other"), [0, 1, 2], rank=1)
    found = read_digest_log(path.parent)
    assert [*found.lines] == steps_in(path) == [0, 1, 2]
    assert found.settings == SETTINGS and found.lines[2].digests == {"net": "x2"}
    assert not (path.parent / "other").exists()


def test_with_digest_every_3_each_third_step_is_written(path):
    goes(DigestLog(path, every=3), range(10))
    assert steps_in(path) == [2, 5, 8]


def test_the_next_writer_cuts_off_uncommitted_lines_and_adds_missing_ones(path):
    goes(DigestLog(path), range(6))
    # No other worker committed step 4: it is retried, with another result.
    goes(DigestLog(path), [4, 5, 6], said="again")
    assert steps_in(path) == [0, 1, 2, 3, 4, 5]
    assert read_digest_log(path).lines[4].digests == {"net": "again4"}
    # Another was killed before it had written step 6.
    goes(DigestLog(path), [7, 8])
    assert steps_in(path) == [*range(8)]


def test_a_worker_that_is_rank_0_again_appends_to_the_others_lines(path):
    first = DigestLog(path)
    goes(first, [0, 1, 2])
    goes(first, [2], rank=1)
    goes(DigestLog(path), [2, 3, 4])
    goes(first, [4, 5])
    assert steps_in(path) == [*range(5)]


@pytest.mark.parametrize("many", [3, 3000], ids=["few", "more-than-a-tail"])
@pytest.mark.parametrize("back", [0, 1, 2000])
def test_a_torn_end_is_cut_off_for_any_length_of_the_log(path, many, back):
    goes(DigestLog(path), range(many + 1))
    with path.open("a") as file:
        file.write('{"step": 77, "wor')
    assert [*read_digest_log(path).lines] == [*range(many)]
    left = max(many - back, 1)
    goes(DigestLog(path), [left, left + 1])
    assert steps_in(path) == [*range(left + 1)]


def test_a_writer_that_was_suspended_changes_nothing_afterwards(path):
    late = DigestLog(path)
    goes(late, [0, 1, 2])
    goes(DigestLog(path), [2, 3, 4, 5])
    goes(late, [3], said="late")
    assert read_digest_log(path).lines[2].digests == {"net": "x2"}
    assert [*read_digest_log(path).lines] == [*range(5)]


def test_a_job_that_starts_again_replaces_its_own_digest_log_and_no_other(path):
    goes(DigestLog(path, job="a"), range(5))
    goes(DigestLog(path, job="a"), [0, 1])
    assert steps_in(path) == [0]
    with pytest.raises(JobError, match="of the job 'a'"):
        goes(DigestLog(path, job="b"), [0])
    assert steps_in(path) == [0]


def test_a_file_that_is_not_a_digest_log_is_left_alone(path):
    path.parent.mkdir()
    path.write_text("dear diary\n")
    with pytest.raises(JobError, match="is no digest log"):
        goes(DigestLog(path), [0])
    assert path.read_text() == "dear diary\n"


def test_the_digest_log_of_another_run_is_not_continued(path, capsys):
    goes(DigestLog(path), range(5))
    goes(DigestLog(path), [5, 6], settings={**SETTINGS, "shards": 4})
    assert steps_in(path) == [*range(4)]
    assert "another shards" in capsys.readouterr().err


def test_a_digest_log_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="cannot be written"):
        goes(DigestLog(tmp_path / "file" / "digests"), [0])


def test_a_symbolic_link_is_refused_and_the_file_behind_it_left_alone(path, tmp_path, capsys):
    own = tmp_path / "own"
    goes(DigestLog(own), range(3))
    before = own.read_bytes()
    path.parent.mkdir()
    path.symlink_to(own)
    with pytest.raises(JobError, match="is a symbolic link"):
        goes(DigestLog(path), [0])
    goes(DigestLog(path), [3])
    assert "is a symbolic link" in capsys.readouterr().err
    assert own.read_bytes() == before


def test_a_full_disk_loses_lines_and_the_job_runs(path, monkeypatch, capsys):
    log = DigestLog(path)
    goes(log, [0, 1])
    with monkeypatch.context() as full:
        write = os.write
        full.setattr(os, "write", lambda file, raw: write(file, raw[:9]))
        goes(log, [2, 3])
    goes(log, [4])
    assert steps_in(path) == [0, 3]
    assert capsys.readouterr().err.count("lacks step 1") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"dear diary\n", "is no digest log"),
        (b"\xff\xfe\x00", "is no digest log"),
        (b'{"kind": "elastane-digest-log", "settings": {}}\n', "has format None"),
        (b'{"kind": "elastane-digest-log", "format": 2, "settings": {}}\n', "has format 2"),
        (b'{"kind": "elastane-digest-log", "format": 1, "settings": {}}\n[]\n', "line 2"),
        (b'{"kind": "elastane-digest-log", "format": 1, "settings": {}}\n{"step": 1}\n', "line 2"),
    ],
    ids=["empty", "text", "bytes", "unformatted", "newer", "list", "half"],
)
def test_a_file_that_is_not_a_digest_log_is_refused_in_words(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        read_digest_log(tmp_path / "x")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_digest_log(tmp_path / "missing")


def test_the_argument_comes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("ELASTANE_DIGEST_LOG", raising=False)
    assert digest_log_of(None, 1) is None
    monkeypatch.setenv("ELASTANE_DIGEST_LOG", str(tmp_path / "env"))
    assert digest_log_of(None, 1).path == tmp_path / "env"
    assert digest_log_of(tmp_path / "arg", 2).path == tmp_path / "arg"
    with pytest.raises(JobError, match="digest_every is 0"):
        digest_log_of(None, 0)
