"""`elastane checkpoint` lists, verifies, shows and prunes the checkpoints of a place."""

import json
import os
import pty
import subprocess
import sys

import pytest
from small_saves import ABOUT, begin, key_of, opened, save, steps, write_part

from elastane.cli.main import main
from elastane.protocol.checkpoints import MANIFEST, folder_name
from elastane.storage.digest import digest_of


@pytest.fixture
def place(tmp_path):
    """Return a place with three checkpoints, the newest damaged, and an unfinished save."""
    repository = opened(tmp_path)
    folders = [save(repository, step) for step in (100, 200, 300)]
    (tmp_path / folders[2] / "__0_0.distcp").write_bytes(bytes(210))
    folders.append(begin(repository, 400))
    return tmp_path, folders


def told(capsys, *words):
    code = main(["checkpoint", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_ls_lists_the_newest_first_with_world_and_step(place, capsys):
    where, folders = place
    code, out, _ = told(capsys, "ls", where)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:4]] == ["300", "200", "100"]
    assert "2025-11-21 15:46:40 UTC" in lines[1] and "0.1.0" in lines[1]
    assert lines[1].endswith(folders[2])
    assert lines[4].startswith(folders[3]) and "did not complete" in lines[4]


def test_ls_marks_checkpoints_whose_manifest_is_invalid(place, capsys):
    where, folders = place
    (where / folders[0] / MANIFEST).write_bytes(b"{}")
    (where / folders[1] / ".metadata").unlink()
    code, out, _ = told(capsys, "ls", where)
    assert code == 0
    assert f"{folders[0]}: not valid: manifest.json: cut short" in out
    assert f"{folders[1]}: not valid: .metadata is missing" in out


def test_verify_reads_all_checkpoints_and_names_damaged_ones(place, capsys):
    where, folders = place
    code, out, _ = told(capsys, "verify", where)
    assert code == 1
    bad, good, _ = out.splitlines()
    assert (
        bad == f"{folders[2]}: NOT VALID: __0_0.distcp: bytes 0 to 209 differ from what was saved"
    )
    assert good.startswith(f"{folders[1]}: valid, ")


@pytest.mark.parametrize("by", ["step", "folder"])
def test_verify_reads_only_the_named_checkpoints(place, capsys, by):
    where, folders = place
    words = ["100", "200"] if by == "step" else folders[:2]
    code, out, _ = told(capsys, "verify", where, *words)
    assert code == 0 and [line.split(":")[0] for line in out.splitlines()] == folders[1::-1]


def test_verify_prints_the_same_as_json(place, capsys):
    where, folders = place
    code, out, _ = told(capsys, "verify", where, "--json")
    found = json.loads(out)
    assert code == 1 and found["where"] == str(where)
    assert [one["valid"] for one in found["checkpoints"]] == [False, True, True]
    assert found["checkpoints"][1]["folder"] == folders[1]
    assert "bytes 0 to 209" in found["checkpoints"][0]["reason"]


def test_a_checkpoint_of_a_newer_version_fails_only_a_strict_verify(tmp_path, capsys):
    folder = save(opened(tmp_path), 500)
    body = b'{"format": 2}'
    content = b'{"digest":"%s","body":%s}' % (digest_of([body]).encode(), body)
    (tmp_path / folder / MANIFEST).write_bytes(content)
    code, out, _ = told(capsys, "verify", tmp_path)
    assert code == 0 and "not for this elastane: manifest.json: of format 2" in out
    assert told(capsys, "verify", tmp_path, "--strict")[0] == 1


def test_show_describes_the_newest_or_the_named_checkpoint(place, capsys):
    where, folders = place
    code, out, _ = told(capsys, "show", where)
    assert code == 0 and out.startswith(folders[2])
    code, out, _ = told(capsys, "show", where, "100")
    for word in ("digits", "because of: step", "torch 2.13.0", "__0_0.distcp", "210 B", "world "):
        assert word in out
    found = json.loads(told(capsys, "show", where, "100", "--json")[1])
    assert found["step"] == 100 and found["job"] == ABOUT.job
    assert {file["name"] for file in found["files"]} > {"__0_0.distcp", ".metadata"}


def test_prune_keeps_the_newest_valid_checkpoints_and_lists_removed_ones(place, capsys):
    where, folders = place
    code, out, _ = told(capsys, "prune", where, "--keep", "1", "--dry-run")
    assert code == 0 and out == f"{folders[0]}: would be removed: 1 newer ones are kept\n"
    assert steps(opened(where)) == [300, 200, 100]
    found = json.loads(told(capsys, "prune", where, "--keep", "1", "--json")[1])
    assert [one["folder"] for one in found["removed"]] == [folders[0]]
    assert steps(opened(where)) == [300, 200]
    assert told(capsys, "prune", where, "--keep", "1")[1] == f"nothing to remove at {where}\n"


@pytest.mark.parametrize("keep", ["0", "-1"])
def test_prune_keeps_at_least_one_checkpoint(place, capsys, keep):
    where, _ = place
    code, _, err = told(capsys, "prune", where, "--keep", keep)
    assert code == 2 and "the last valid checkpoint is never removed" in err
    assert steps(opened(where)) == [300, 200, 100]


def test_a_place_without_checkpoints_is_reported(tmp_path, capsys):
    missing = tmp_path / "missing"
    said = f"no checkpoints at {missing}: there is no such folder; next: ls {tmp_path}\n"
    assert told(capsys, "ls", missing)[:2] == (0, said)
    assert told(capsys, "ls", tmp_path)[:2] == (0, f"no checkpoints at {tmp_path}\n")
    for act in ("verify", "show"):
        code, _, err = told(capsys, act, missing)
        assert code == 1 and "[checkpoint-unknown]" in err
    assert not missing.exists()


def test_an_act_with_another_name_is_told_the_nearest(place, capsys):
    where, _ = place
    code, _, err = told(capsys, "list", where)
    assert code == 2 and "did you mean ls?" in err


def test_a_missing_checkpoint_is_reported_by_its_name(place, capsys):
    where, _ = place
    code, _, err = told(capsys, "verify", where, "100", "7")
    assert code == 1 and "no checkpoint 7 at" in err


def test_an_unreachable_place_is_reported_with_a_next_step(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    code, _, err = told(capsys, "ls", tmp_path / "file")
    assert code == 75 and "[storage-unreachable]" in err and "next: name a folder" in err


def test_control_characters_of_a_manifest_are_escaped(tmp_path, capsys):
    repository = opened(tmp_path)
    folder = folder_name(key_of(1), "00c0ffee")
    about = type(ABOUT)("\x1b[2Jjob", 1, 1e300, {"a\n": "b"}, "\x07")
    write_part(repository, folder, key_of(1), about=about)
    repository.publish_when_whole(folder, 1, wait_s=0)
    for act in ("ls", "show", "verify"):
        code, out, _ = told(capsys, act, tmp_path)
        assert code == 0 and not {"\x1b", "\x07"} & set(out)


def test_a_progress_bar_is_shown_on_a_terminal_only(place):
    where, _ = place
    command = [sys.executable, "-m", "elastane", "checkpoint", "verify", str(where), "100"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert plain.stderr == ""
    at_once = (
        "import sys, elastane.observe.progress as shown; shown.SHOWN_AFTER_S = 0.0;"
        "from elastane.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command[1:3] = ["-c", at_once]
    screen, terminal = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    shown = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, env=environ, timeout=60, check=True
    )
    os.close(terminal)
    bar = b""
    try:
        while piece := os.read(screen, 4096):
            bar += piece
    except OSError:  # EIO: the terminal is closed
        pass
    os.close(screen)
    assert b"step 100" in bar and b"\x1b" in bar and b"valid" not in bar
    assert shown.stdout.decode().split(", ")[0] == plain.stdout.split(", ")[0]


def test_the_help_of_each_subcommand_names_its_options(capsys):
    options = {"ls": "--json", "verify": "--strict", "show": "WHICH", "prune": "--keep"}
    for act, option in options.items():
        code, out, _ = told(capsys, act, "--help")
        assert code == 0 and f"usage: elastane checkpoint {act}" in out and option in out
