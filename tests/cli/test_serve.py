"""What --serve refuses before a job begins."""

import importlib.util

import pytest

from elastane.cli.main import main


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def refused(capsys, *words):
    code = main(["run", *words, "train.py"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("port", ["page", "-1", "65536", "8470.0", "٣"])
def test_a_port_is_a_number(capsys, port):
    code, said = refused(capsys, f"--serve={port}")
    assert code == 2 and f"--serve {port}" in said and "[bad-option-value]" in said


def test_a_job_without_a_log_has_no_page(capsys):
    code, said = refused(capsys, "--serve", "0", "--log-dir", "/dev/null")
    assert code == 2 and "[no-event-log]" in said


def test_the_missing_extra_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    code, said = refused(capsys, "--serve", "0")
    assert code == 78 and "the page of a job needs uvicorn [extra-missing]" in said
    assert "next: pip install 'elastane[dashboard]'" in said
