"""The command: verbs, help, exit codes, and modules that it must not import."""

import importlib.metadata
import os
import signal
import subprocess
import sys

import pytest
from command_harness import LIGHT

from elastane import __version__
from elastane.cli import main as cli
from elastane.errors import ConfigurationError, ExitCode

# Modules that make a help slow: torch, the live view, the event loop, and their imports.
HEAVY = ("torch", "numpy", "rich", "asyncio", "ssl", "importlib.metadata", "multiprocessing")


def run(*argv, **changes):
    return subprocess.run(
        [sys.executable, "-m", "elastane", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **changes,
    )


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["run", "--show-config"], *([v, "--help"] for v in cli.VERBS)],
)
def test_help_imports_nothing_heavy(argv):
    code = (
        "import sys; from elastane.cli.main import main; code = main(sys.argv[1:]);"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == "heavy: []"


def test_letters_that_the_console_lacks_are_escaped():
    code = (
        "import sys; from elastane.cli import main as cli; cli.usage = lambda prog: 'na\\xefve';"
        "sys.exit(cli.main(['--help']))"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stdout) == (0, "na\\xefve\n"), done.stderr


@pytest.mark.parametrize("verb", ["run", "doctor", "explain", "kubernetes"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('no libc')", "msgspec cannot be imported: ImportError: no libc"),
        ("__version__ = '0.9.1'", "msgspec 0.9.1 is too old"),
    ],
)
def test_a_msgspec_that_cannot_serve_is_named_with_its_file(verb, text, says, tmp_path):
    (tmp_path / "msgspec.py").write_text(text)
    words = {"run": ["run", "t.py"], "kubernetes": ["kubernetes", "manifests"]}
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = run(*words.get(verb, [verb]), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == ExitCode.CONFIGURATION, done.stderr
    assert f"{says} [package-unusable]\n  where: {tmp_path}/msgspec.py" in done.stderr
    assert "Traceback" not in done.stderr and "next: python -m pip install" in done.stderr


def test_the_oldest_msgspec_is_that_of_the_packages_metadata():
    oldest = ".".join(map(str, cli.MSGSPEC_MIN))
    assert f"msgspec>={oldest}" in importlib.metadata.requires("elastane")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_every_verb_shows_its_usage(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: elastane {verb}")
    assert cli.VERBS[verb][:20] in out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("full", "code", "says"),
    [
        ("2>/dev/full", 0, "line of 0"),
        ("2>&1 >/dev/full", 0, "stdout could not be written"),
        (">/dev/full 2>&1", 0, ""),
    ],
)
def test_a_full_disk_under_the_output_of_a_job_does_not_end_it(full, code, says, tmp_path):
    (tmp_path / "script.py").write_text("""import os; print("line of", os.environ["RANK"])""")
    command = f"{sys.executable} -m elastane run --standalone --nproc-per-node 2 script.py {full}"
    env = {**os.environ, **LIGHT, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", f"exec {command}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code and says in done.stdout, done


def test_an_error_is_escaped_where_stderr_has_fewer_characters():
    done = run("run", "--n\u00f6pe", env={**os.environ, **LIGHT, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == ExitCode.USAGE
    assert "no such option: --n\\xf6pe" in done.stderr


def test_an_error_on_a_full_disk_has_its_exit_code():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "elastane", "run", "--nope"]
        assert subprocess.run(command, stderr=full, check=False).returncode == ExitCode.USAGE


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_dev_null_for_workers(closed, tmp_path):
    words = """import os
from pathlib import Path
Path("streams").write_text(" ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)))
"""
    (tmp_path / "script.py").write_text(words)
    line = f"exec {sys.executable} -m elastane run script.py {closed}"
    env = {**os.environ, **LIGHT, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    streams = (tmp_path / "streams").read_text().split()
    assert all(one == "/dev/null" or one.startswith("pipe:") for one in streams), streams


def test_the_command_lists_its_verbs(capsys):
    for word in ("--help", "-h", "help"):
        assert cli.main([word]) == 0
        out = capsys.readouterr().out
        assert all(verb in out for verb in cli.VERBS)


def test_version_prints_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"elastane {__version__}"


def test_no_verb_is_a_usage_error_with_the_help_on_stderr(capsys):
    assert cli.main([]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: elastane" in captured.err


def test_an_option_that_is_spelled_right_is_not_suggested(capsys):
    assert cli.main(["explain", "job", "--round", "many"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert (
        "--round 'many'" in said
        and "expected: a whole number" in said
        and "did you mean" not in said
    )


def test_an_unknown_verb_is_answered_with_the_nearest_one(capsys):
    assert cli.main(["rnu", "x.py"]) == ExitCode.USAGE
    assert "did you mean run?" in capsys.readouterr().err
    assert cli.main(["train.py"]) == ExitCode.USAGE
    assert "elastane run train.py" in capsys.readouterr().err


def test_a_module_typed_as_a_verb_is_answered_with_its_command(capsys):
    assert cli.main(["launch", "x.py"]) == ExitCode.USAGE
    assert "python -m elastane.launch" in capsys.readouterr().err


def test_the_older_launchers_help_has_its_option_and_its_name(capsys):
    assert cli.main_of("launch", ["--help"], "python -m elastane.launch") == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m elastane.launch")
    assert "--use-env" in out
    assert cli.main(["run", "--use-env", "x.py"]) == ExitCode.USAGE


def test_the_older_launcher_refuses_a_program_that_may_not_know_local_rank(capsys):
    assert cli.main_of("launch", ["--no-python", "sh"], "launch") == ExitCode.USAGE
    assert "--use-env with --no-python" in capsys.readouterr().err


def test_run_can_be_called_like_the_main_of_torchrun(capsys):
    from elastane.run import main

    main(["--show-config"])
    assert "--nnodes" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--nnodes", "0", __file__])
    assert caught.value.code == ExitCode.USAGE


def test_a_missing_script_says_which_option_took_it(capsys):
    assert cli.main(["run", "--tee", "train.py"]) == ExitCode.USAGE
    assert "--tee took train.py as its value" in capsys.readouterr().err


def test_a_signal_name_without_sig_is_answered_with_the_nearest_one(capsys):
    assert cli.main(["run", "--signals-to-handle", "TERM", __file__]) == ExitCode.USAGE
    assert "did you mean SIGTERM?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_typo_in_an_option_of_a_verb_is_a_usage_error(verb, capsys):
    assert cli.main([verb, "--hlep"]) == ExitCode.USAGE
    assert "--help" in capsys.readouterr().err


def test_an_error_is_printed_on_stderr_and_sets_the_exit_code(capsys, monkeypatch):
    def fail(words, prog):
        raise ConfigurationError("nodes = 0", slug="bad-nnodes", next_step="--nnodes 1")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["run"]) == ExitCode.CONFIGURATION
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "elastane: nodes = 0 [bad-nnodes]\n  next: --nnodes 1\n"


def test_a_usage_error_has_no_stack_trace():
    done = run("run", "--nnodes", "0", "x.py")
    assert done.returncode == ExitCode.USAGE
    assert "[bad-nnodes]" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_elastane_run_is_the_verb_run():
    done = subprocess.run(
        [sys.executable, "-m", "elastane.run", "--nnodes", "0", "x.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE
    assert "[bad-nnodes]" in done.stderr


@pytest.mark.parametrize("words", ["--help", "run --help"])
def test_a_closed_pipe_is_not_reported_as_an_error(words):
    """`elastane --help | head -1` closes the pipe before the first write."""
    code = f"import sys; from elastane.cli.main import main; sys.exit(main({words.split()}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    stderr = process.stderr.read()
    # argparse ignores the error of a long help and ends with 0.
    assert process.wait(timeout=60) in ((128 + 13,) if words == "--help" else (0, 128 + 13))
    assert stderr == b""


def test_ctrl_c_sets_an_exit_code_without_a_stack_trace(monkeypatch):
    def interrupt(words, prog):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert cli.main(["run"]) == 130


def test_the_first_process_of_a_container_handles_sigterm_from_the_start():
    # The kernel drops signals without a handler for process 1. This signal arrives during imports.
    slow = "import os, sys, time; os.getpid = lambda: 1\nfrom elastane.cli import main\n"
    slow += "main.run_verb = lambda *_: (print('in', flush=True), time.sleep(60))\n"
    slow += "sys.exit(main.main(['run']))"
    with subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"in\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 143
