"""Errors of --serve and --metrics-port before a job begins."""

import importlib.util
import socket

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
def test_an_invalid_port_is_refused(capsys, port):
    code, said = refused(capsys, f"--serve={port}")
    assert code == 2 and f"--serve {port}" in said and "[bad-option-value]" in said


def test_serve_is_refused_without_a_log_folder(capsys):
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


@pytest.mark.parametrize("port", ["page", "-1", "65536", "127.0.0.1:", "a:b", "::1"])
def test_an_invalid_address_of_metrics_is_refused(capsys, port):
    code, said = refused(capsys, f"--metrics-port={port}")
    # "::1" is port 1 of an address without brackets: no such address is of this machine.
    assert code in (2, 78) and ("[bad-option-value]" in said or "[metrics-listen]" in said)
    assert f"--metrics-port {port}" in said or "port 1" in said


def test_a_port_of_the_metrics_that_is_taken_is_an_error_before_the_job_begins(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refused(capsys, "--metrics-port", f"127.0.0.1:{port}")
    assert code == 78 and f"cannot listen on 127.0.0.1, port {port}" in said
    assert "--metrics-port 0" in said and "[metrics-listen]" in said


def test_the_metrics_beside_a_run_need_a_log_and_their_extra(capsys, monkeypatch):
    code, said = refused(capsys, "--metrics-port", "0", "--log-dir", "/dev/null")
    assert code == 2 and "[no-event-log]" in said
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "prometheus_client" else find(name),
    )
    code, said = refused(capsys, "--metrics-port", "0")
    assert code == 78 and "next: pip install 'elastane[metrics]'" in said
