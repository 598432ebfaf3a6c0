"""The command that `elastane run` runs, its environment, and the exit code."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from supervise import Agent, agent, ask, words_agent, write_script

from elastane.agent.worker import CONTROL_FD

STANDALONE = ("--standalone", "--log-dir", "logs")
SHOW = 'import sys\ntell("ran", repr([__name__, sys.argv[1:]]))\nraise SystemExit(3)\n'
BASH = """\
#!/bin/bash
echo "bash $RANK $LOCAL_RANK $WORLD_SIZE $*"
exit $FAIL
"""
# Every variable that torchrun gives a worker, and what it is for rank 1 of 2 on one node.
CONTRACT = {
    "LOCAL_RANK": "1",
    "RANK": "1",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "ROLE_NAME": "trainer",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.parametrize("options", [("--no-zygote",), ("--preload", "json")], ids=["exec", "fork"])
@pytest.mark.parametrize("kind", ["script", "module", "run-path"])
def test_a_script_runs_as_main_with_its_arguments_and_exit_code(
    tmp_path: Path, options: tuple[str, ...], kind: str
) -> None:
    write_script(tmp_path, SHOW)
    target = {
        "script": ("script.py",),
        "module": ("-m", "script"),
        "run-path": ("--run-path", "script.py"),
    }
    words = (*STANDALONE, *options, *target[kind], "--lr", "0.1", "${local_rank}")
    with words_agent(tmp_path, *words) as one:
        assert one.wait() == 1
        assert one.told("ran.0.0", 0) == repr(["__main__", ["--lr", "0.1", "0"]])
        assert "exit code 3" in one.err
        assert not one.events("zygote-fallback")


def test_no_python_executes_the_program_itself(tmp_path: Path) -> None:
    name = write_script(tmp_path, BASH, "job.sh")
    words = (*STANDALONE, "--no-python", "--nproc-per-node", "2", f"./{name}", "x${local_rank}")
    with words_agent(tmp_path, *words, FAIL="0") as one:
        assert one.wait() == 0
        assert sorted(one.out.splitlines()) == ["bash 0 0 2 x0", "bash 1 1 2 x1"]
    with words_agent(tmp_path, *STANDALONE, "--no-python", f"./{name}", FAIL="3") as one:
        assert one.wait() == 1
        assert "exit code 3" in one.err


def test_sys_exit_with_a_text_fails_and_shows_it(tmp_path: Path) -> None:
    with agent(tmp_path, "--redirects", "2", body='raise SystemExit("out of luck")\n') as one:
        assert one.wait() == 1
        assert "out of luck" in one.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scrip.py",), "did you mean script.py?"),
        (("--no-python", "./plain.sh"), "may not be executed"),
        (("--nproc-per-node", "0", "script.py"), "--nproc-per-node"),
        (("--signals-to-handle", "SIGKILL", "script.py"), "SIGKILL"),
        (("--no-python", "-m", "script"), "exclude each other"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    write_script(tmp_path, "")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    with words_agent(tmp_path, *STANDALONE, *words) as one:
        assert one.wait() == 2
        assert said in one.err
        assert "Traceback" not in one.err
        assert not (tmp_path / "logs").exists()


def test_a_module_that_does_not_exist_fails_with_its_name(tmp_path: Path) -> None:
    words = (*STANDALONE, "--no-zygote", "--redirects", "3", "-m", "no_such_module")
    with words_agent(tmp_path, *words) as one:
        assert one.wait() == 1
        assert "No module named no_such_module" in one.err


def test_workers_get_torchruns_environment_and_never_the_secret(tmp_path: Path) -> None:
    body = 'import json\ntell("env", json.dumps(dict(os.environ)))\n'
    options = ("--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "2")
    more = {"ELASTANE_TOKEN": "s3cret-token", "PET_RDZV_CONF": "token=s3cret-token,silence=4"}
    with agent(tmp_path, *options, body=body, MY_OWN="kept", **more) as one:
        assert one.wait() == 0
        first, second = (json.loads(one.told(f"env.{rank}.0", 0)) for rank in (0, 1))
        assert {name: second[name] for name in CONTRACT} == CONTRACT
        assert second["TORCHELASTIC_RUN_ID"] == one.job_dir().name
        assert second["MY_OWN"] == "kept"
        assert second["MASTER_ADDR"] == "127.0.0.1"
        assert int(second["MASTER_PORT"]) > 0
        assert second["TORCHELASTIC_ERROR_FILE"].startswith("/"), "the script may change folder"
        own = {name for name in first if first[name] != second[name]}
        assert own == {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"}
        assert "s3cret" not in json.dumps([first, second])


@pytest.mark.parametrize("options", [("--no-zygote",), ("--preload", "json")], ids=["exec", "fork"])
def test_a_worker_has_the_descriptor_limit_of_a_program_started_by_hand(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    body = "import resource\ntell('limit', resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    with agent(tmp_path, *options, body=body) as one:
        assert one.wait() == 0
        assert one.told("limit.0.0", 0) == str(resource.getrlimit(resource.RLIMIT_NOFILE))


@pytest.mark.parametrize("options", [("--no-zygote",), ("--preload", "json")], ids=["exec", "fork"])
def test_a_soft_limit_below_the_numbers_of_a_workers_descriptors_is_no_fault(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    body = "import resource\ntell('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (CONTROL_FD - 50, hard))
    try:
        with agent(tmp_path, *options, body=body) as one:
            assert one.wait() == 0
            assert one.told("limit.0.0", 0) == str(CONTROL_FD - 50)
            assert "Traceback" not in one.err and "zygote-died" not in one.err
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_module_of_the_folder_hides_none_that_the_zygote_needs(tmp_path: Path) -> None:
    (tmp_path / "selectors.py").write_text("raise RuntimeError('mine')\n")
    script = "import sys\nprint(sys.path[0], flush=True)\nimport selectors\n"
    (tmp_path / "script.py").write_text(script)
    # Not `python -m elastane`, which searches the folder itself.
    begin = "import sys; del sys.path[0]; from elastane.cli.main import main; sys.exit(main())"
    words = ("run", *STANDALONE, "--preload", "json", "script.py")
    ran = subprocess.run(
        [sys.executable, "-c", begin, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, "the script imports its own module, as it does alone"
    assert ran.stdout == f"{tmp_path}\n"
    assert "zygote-died" not in ran.stderr and "RuntimeError: mine" in ran.stderr


def test_the_secret_is_in_no_process_but_the_agent(tmp_path: Path) -> None:
    body = 'tell("up")\nwait_for("go")\n'
    with agent(tmp_path, "--preload", "json", body=body, ELASTANE_TOKEN="s3cret-token") as one:
        one.told("up.0.0")
        for pid in one.family() - {one.pid}:
            assert b"s3cret" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        (tmp_path / "go").touch()
        assert one.wait() == 0


def test_pet_variables_set_options_and_options_win(tmp_path: Path) -> None:
    body = 'tell("ran", os.environ["ROLE_NAME"])\n'
    env = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "from_env"}
    with agent(tmp_path, "--role", "from_flag", body=body, **env) as one:
        assert one.wait() == 0
        assert [one.told(f"ran.{rank}.0", 0) for rank in (0, 1)] == ["from_flag"] * 2


def test_the_agent_leaves_stdin_to_the_worker(tmp_path: Path) -> None:
    write_script(tmp_path, 'tell("line", input())\n')
    read, write = os.pipe()
    one = Agent(tmp_path)
    try:
        with (tmp_path / "err").open("wb") as err:
            words = (*STANDALONE, "--no-zygote", "script.py")
            one.start(*words, stdio=(read, None, err.fileno()))
        os.close(read)
        os.write(write, b"from the terminal\n")
        assert one.wait() == 0
        assert one.told("line.0.0", 0) == "from the terminal"
    finally:
        os.close(write)
        one.kill_all()


def test_status_shows_a_live_job_and_one_that_ended(tmp_path: Path) -> None:
    body = 'tell("up")\nwait_for("go")\nraise SystemExit(RANK * 5)\n'
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        for rank in (0, 1):
            one.told(f"up.{rank}.0")
        live = ask(one, "status", "--json")
        (job,) = json.loads(live.stdout)["jobs"]
        assert (live.returncode, job["running"]) == (0, True)
        assert job["report"]["phase"] == "running"
        assert job["agents"] == [{"node": job["agents"][0]["node"], "pid": one.pid}]
        text = ask(one, "status", job["job"])
        assert text.returncode == 0
        assert "running" in text.stdout
        (tmp_path / "go").touch()
        assert one.wait() == 1
        assert json.loads(ask(one, "status", "--json").stdout)["jobs"] == []
        ended = ask(one, "status", job["job"], "--log-dir", "logs")
        assert ended.returncode == 0
        assert "exit code 5" in ended.stdout
