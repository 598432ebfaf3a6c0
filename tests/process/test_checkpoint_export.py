"""`elastane checkpoint export`: one file that other programs read, whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from process_harness import until
from safetensors.torch import load_file

import elastane
from elastane.checkpoint import simple as exporting
from elastane.cli.main import main
from elastane.observe import progress


class Net(torch.nn.Module):
    """With weights that two layers share, and tensors that are no plain arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 3)
        self.out = torch.nn.Linear(3, 7)
        self.out.weight = self.words.weight
        self.register_buffer("turned", torch.arange(6, dtype=torch.bfloat16).view(2, 3).t())
        self.register_buffer("flag", torch.tensor(True))


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net.out(net.words(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    state = {"net": net, "optimizer": optimizer, "epoch": 3}
    elastane.save_checkpoint(tmp_path / "ck", {**state, "epoch": 1}, step=5)
    elastane.save_checkpoint(tmp_path / "ck", state, step=7)
    return tmp_path / "ck", net, optimizer


def exported(where: Path, to: Path, *words: str) -> int:
    return main(["checkpoint", "export", str(where), str(to), *words])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_verifying_reading_and_writing_report_their_progress(
    saved, tmp_path, capsys, monkeypatch, suffix
):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_LOOK_S", 0.001)
    save, said = exporting._saved, []

    def slowly(state, path, suffix):
        left_out = save(state, path, suffix)
        until(lambda: said.append(capsys.readouterr().err) or "writing" in "".join(said), "a look")
        return left_out

    monkeypatch.setattr(exporting, "_saved", slowly)
    words = ("--only", "net") if suffix == ".safetensors" else ()
    assert exported(saved[0], tmp_path / f"all{suffix}", *words) == 0
    lines = "".join([*said, capsys.readouterr().err]).splitlines()
    whats = ["verifying step 7", "reading step 7", f"writing all{suffix}"]
    assert [line.split(": ")[1] for line in lines] == whats
    assert main(["checkpoint", "verify", str(saved[0]), "7"]) == 0
    assert capsys.readouterr().err.startswith("elastane: verifying step 7: ")


def test_a_pt_file_has_the_state_as_it_was_saved(saved, tmp_path, capsys):
    where, net, optimizer = saved
    assert exported(where, tmp_path / "all.pt") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'all.pt'}: step 7, ")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [*state] == ["net", "optimizer", "epoch"] and state["epoch"] == 3
    other = Net()
    other.load_state_dict(state["net"])
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(state["optimizer"])
    moments = [each.state_dict()["state"][0]["exp_avg"] for each in (optimizer, again)]
    assert torch.equal(*moments)
    assert exported(where, tmp_path / "old.pt", "--step", "5", "--only", "epoch") == 0
    assert torch.load(tmp_path / "old.pt", weights_only=True) == {"epoch": 1}


def test_a_safetensors_file_has_the_tensors_and_says_what_is_left_out(saved, tmp_path, capsys):
    where, net, _ = saved
    assert exported(where, tmp_path / "net.safetensors", "--only", "net") == 0
    held, wanted = load_file(tmp_path / "net.safetensors"), net.state_dict()
    assert set(held) == set(wanted)
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)
    assert "left out" not in capsys.readouterr().out
    assert exported(where, tmp_path / "all.safetensors") == 0
    assert "left out: epoch, optimizer.param_groups" in capsys.readouterr().out
    held = load_file(tmp_path / "all.safetensors")
    assert torch.equal(held["net.out.weight"], wanted["out.weight"])


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_the_exported_file_has_the_users_mode_and_replaces_an_older_one(
    saved, tmp_path, name, capsys
):
    where, _, _ = saved
    (tmp_path / name).write_bytes(b"older")
    before = os.umask(0o027)
    try:
        assert exported(where, tmp_path / name) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", name]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_cannot_be_written_is_an_error_before_any_read(
    tmp_path, suffix, capsys, monkeypatch
):
    def read(*_: object) -> None:
        raise AssertionError("the checkpoint was read first")

    monkeypatch.setattr("elastane.cli.checkpoint._repository", read)
    (tmp_path / f"folder{suffix}").mkdir()
    for to, why in (
        (tmp_path / "missing" / f"x{suffix}", "No such file or directory"),
        (tmp_path / f"folder{suffix}", "Is a directory"),
    ):
        assert exported(tmp_path, to) == 1
        assert f"{to} cannot be written: {why} [checkpoint-export]" in capsys.readouterr().err
    assert exported(tmp_path, tmp_path / "x.bin") == 2
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    code = exported(tmp_path, tmp_path / "x.safetensors")
    assert code == 1 and "safetensors is not installed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [f"folder{suffix}"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_full_disk_leaves_the_existing_file_unchanged(saved, tmp_path, suffix):
    where, _, _ = saved
    target = tmp_path / f"x{suffix}"
    target.write_bytes(b"older")
    words = ["checkpoint", "export", str(where), str(target)]
    # An import that writes its bytecode within the limit would leave half of it, for ever.
    program = f"""
import resource, signal, sys, torch
from elastane.cli.main import main
sys.dont_write_bytecode = True
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
sys.exit(main({words!r}))
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1, ended.stderr
    assert f"{target} cannot be written: " in ended.stderr and "File too large" in ended.stderr
    assert target.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", target.name]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_link_planted_in_the_folder_is_not_written_through(saved, tmp_path, suffix, monkeypatch):
    where, _, _ = saved
    victim, folder = tmp_path / "victim", tmp_path / "open"
    victim.write_bytes(b"precious")
    folder.mkdir()
    folder.chmod(0o1777)
    target = folder / f"x{suffix}"
    for name in (target.name, f".{target.name}.{os.getpid()}"):
        (folder / name).symlink_to(victim)
    seen = []

    def saving(state: object, path: Path, kind: str) -> tuple[str, ...]:
        seen.append((path.parent, stat.S_IMODE(path.parent.stat().st_mode)))
        return saved_as(state, path, kind)

    saved_as = exporting._saved
    monkeypatch.setattr(exporting, "_saved", saving)
    assert exported(where, target) == 0
    assert victim.read_bytes() == b"precious"
    assert not target.is_symlink() and target.stat().st_size > 100
    ((private, mode),) = seen
    assert mode == 0o700 and private.parent == folder and not private.exists()
