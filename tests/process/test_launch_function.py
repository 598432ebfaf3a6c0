"""elastane.launch with real agents and workers: values, output, options, callers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import pty
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from function_harness import calls, program, ran
from launched import Scale, aborts_at_teardown, arguments, chatty, ranked
from ports import free_port
from process_harness import until
from supervise import children

import elastane
from elastane.errors import WorkerFailedError


@pytest.fixture
def call(tmp_path, monkeypatch):
    with calls(tmp_path, monkeypatch) as launch:
        yield launch


# Values


def test_values_are_by_rank(call):
    assert call(ranked, nproc=3) == {0: 0, 1: 1, 2: 2}


def test_arguments_of_both_kinds_arrive(call):
    assert call(arguments, (1, "${local_rank}"), {"lr": 0.1}) == {
        0: ("0", (1, "${local_rank}"), {"lr": 0.1})
    }


def test_every_callable_can_be_launched(call):
    base = 40
    tries = {
        "closure": (lambda number: base + number, 42),
        "partial": (functools.partial(lambda a, b: a * b, 21), 42),
        "method": (Scale(21).by, 42),
        "object": (Scale(21), -42),
        "builtin": (abs, 2),
    }
    found = {name: call(fn, (2,))[0] for name, (fn, _) in tries.items()}
    assert found == {name: value for name, (_, value) in tries.items()}


def test_tensors_come_back_bit_for_bit(call):
    torch = pytest.importorskip("torch")

    def make():
        torch.manual_seed(int(os.environ["RANK"]))
        return {"weights": torch.randn(3, 3), "step": 7}

    values = call(make, nproc=2, no_zygote=False, preload="torch")
    for rank in (0, 1):
        torch.manual_seed(rank)
        assert torch.equal(values[rank]["weights"], torch.randn(3, 3))


@pytest.mark.parametrize("zygote", [False, True])
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_function_worker_leaves_without_the_interpreters_teardown(call, tmp_path, zygote, ends):
    """Otherwise threads of a process group that was not destroyed sometimes abort the process."""
    kept = tmp_path / "kept"
    options = {"nproc": 1, "no_zygote": not zygote, "preload": "json"}
    if ends == "returns":
        assert call(aborts_at_teardown, (str(kept), ends), **options) == {0: 7}
    else:
        with pytest.raises(WorkerFailedError) as failed:
            call(aborts_at_teardown, (str(kept), ends), **options)
        assert failed.value.report.root_cause.exit_code == 1
    assert kept.read_text() == "joined exit"


def test_workers_form_a_process_group(call):
    pytest.importorskip("torch")

    def total():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        one = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(one)
        dist.destroy_process_group()
        return int(one)

    assert call(total, nproc=2, no_zygote=False, preload="torch,torch.distributed") == {0: 3, 1: 3}


def test_fifty_megabytes_come_back(call):
    values = call(lambda: os.urandom(1) * (50 << 20))
    assert len(values[0]) == 50 << 20


FORKED = {"ELASTANE_NO_ZYGOTE": "0", "ELASTANE_PRELOAD": "json"}


@pytest.mark.parametrize("env", [{}, FORKED], ids=["exec", "fork"])
def test_a_class_of_the_program_is_the_same_class_after_the_way_there_and_back(tmp_path, env):
    body = """
        import pickle
        class Config:
            def __init__(self, lr): self.lr = lr
        def train(config):
            assert type(config) is Config
            config.lr *= 2
            return config, len(pickle.dumps(config))  # by name: as torch.save does
        if __name__ == "__main__":
            config, size = elastane.launch(train, (Config(2),), nproc=1)[0]
            assert isinstance(config, Config), type(config)
            print(config.lr, size > 0)
    """
    with program(tmp_path, body, **env) as one:
        assert one.wait() == 0, one.err
        assert one.out == "4 True\n"


def test_a_class_that_only_an_argument_is_of_can_be_saved_by_name(tmp_path):
    body = """
        import pickle
        class Config: pass
        def save(things): return type(pickle.loads(pickle.dumps(things["config"]))).__name__
        if __name__ == "__main__":
            print(elastane.launch(save, ({"config": Config()},), nproc=1))
    """
    with program(tmp_path, body) as one:
        assert one.wait() == 0, one.err
        assert one.out == "{0: 'Config'}\n"


def test_a_module_beside_the_program_is_found_and_sees_its_arguments(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text(
        "import sys\ndef f(): return sys.argv[1:], __name__\n"
    )
    body = """
        sys.path.insert(0, "lib"); sys.argv[1:] = ["--flag"]
        import mine
        os.chdir("/")
        sys.path[0] = os.path.join(os.environ["HERE"], "lib")
        print(elastane.launch(mine.f, nproc=1))
    """
    with program(tmp_path, body) as one:
        assert one.wait() == 0, one.err
        assert one.out == "{0: (['--flag'], 'mine')}\n"


# Output


def said_in_order(text):
    assert re.sub(r"\r", "", text) == "before\none\nthree\nafter\n"


def test_output_appears_once_and_in_order_in_a_file(call, capfd):
    print("before")
    call(chatty)
    print("after")
    said = capfd.readouterr()
    said_in_order(said.out)
    assert said.err.count("two\n") == 1


def test_output_appears_once_and_in_order_in_a_replaced_stdout(call, capfd):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        print("before")
        call(chatty)
        print("after")
    said_in_order(out.getvalue())
    assert err.getvalue().count("two\n") == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_output_appears_once_and_in_order_in_a(tmp_path, kind):
    body = """
        def chatty():
            print("one"); os.write(1, b"three\\n")
        print("before")  # waits in a buffer where this is no terminal
        elastane.launch(chatty, nproc=1)
        print("after")
    """
    theirs, mine = os.pipe() if kind == "pipe" else pty.openpty()
    try:
        with program(tmp_path, body, out=mine) as one:
            assert one.wait() == 0, one.err
            said_in_order(os.read(theirs, 1 << 16).decode())
    finally:
        os.close(theirs)
        os.close(mine)


def test_a_program_without_standard_output_can_call(call, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert call(chatty) == {0: None}


def test_a_megabyte_through_a_replaced_stdout_blocks_no_process(call):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call(lambda: print("x" * (1 << 20)))
    assert out.getvalue() == "x" * (1 << 20) + "\n"


# Options, and who calls


def test_options_of_variables_and_of_the_settings_file_are_used(call, tmp_path, monkeypatch):
    def facts():
        return os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"]

    (tmp_path / "elastane.toml").write_text("[run]\nnproc-per-node = 2\nmax-restarts = 7\n")
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    assert call(facts, nproc=None) == dict.fromkeys((0, 1), ("2", "5"))
    assert call(facts, max_restarts=1) == {0: ("1", "1")}


def test_script_variables_do_not_affect_functions(call, monkeypatch):
    names = ("PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH", "ELASTANE_SHOW_CONFIG", "ELASTANE_JSON")
    for name in names:
        monkeypatch.setenv(name, "1" if name != "PET_MODULE" else "0")
    assert call(ranked) == {0: 0}


def test_a_call_leaves_no_descriptor_and_no_child_behind(call):
    call(ranked)  # what is opened once, by an import
    before, lived = set(os.listdir("/proc/self/fd")), children(os.getpid())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        call(ranked)
        with pytest.raises(elastane.errors.WorkerFailedError):
            call(sys.exit, (3,))
    assert set(os.listdir("/proc/self/fd")) <= before
    assert {*children(os.getpid())} <= {*lived}


def test_auto_is_one_worker_for_each_device_or_processor(call):
    from elastane.options.build import read_nproc

    wanted = read_nproc("auto", os.environ)
    assert len(call(ranked, nproc="auto")) == wanted


def test_the_report_file_that_was_asked_for_is_written_and_no_older_one_is_read(call, tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"job": "old", "ok": false, "exit_code": 1, "reason": "old"}')
    call(ranked, report_file=path, rdzv_id="mine")
    found = json.loads(path.read_text())
    assert (found["job"], found["ok"]) == ("mine", True)


def test_a_nested_call_does_not_meet_the_job_that_it_is_in(call, monkeypatch):
    monkeypatch.setenv("PET_RDZV_ENDPOINT", f"localhost:{free_port()}")
    monkeypatch.setenv("PET_NNODES", "1:2")
    monkeypatch.setenv("PET_RDZV_ID", "outer")
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=0.2")

    def inner():
        return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RUN_ID"][:5]

    def outer():
        return elastane.launch(inner, nproc=2, no_zygote=True), os.environ["TORCHELASTIC_RUN_ID"]

    assert call(outer) == {0: ({0: ("0", "2", "inner"), 1: ("1", "2", "inner")}, "outer")}


def test_two_threads_call_at_once(call):
    here, there = threading.Barrier(2, timeout=60), "both began"

    def one(number):
        here.wait()
        return call(lambda: (number, there), nproc=2)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, (1, 2)))
    assert found == [dict.fromkeys((0, 1), (number, there)) for number in (1, 2)]


def test_a_program_whose_event_loop_runs_can_call(call):
    async def main():
        return call(ranked), await asyncio.to_thread(call, ranked)

    assert asyncio.run(main()) == ({0: 0}, {0: 0})


def test_a_program_that_ignores_sigchld_still_gets_the_result(tmp_path):
    body = """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        def boom(): raise KeyError("lost")
        try:
            elastane.launch(boom, nproc=1)
        except elastane.errors.WorkerFailedError as error:
            print(error.what)
        print(elastane.launch(lambda: 1, nproc=1))
    """
    with program(tmp_path, body, **FORKED) as one:
        assert one.wait() == 0, one.err
        assert one.out == "boom() failed on rank 0: KeyError: 'lost'\n{0: 1}\n"


NODES = """
    import json
    def place(): return os.environ["RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"]
    values = elastane.launch(place, nproc=2, nnodes=2, rdzv_backend="c10d",
                             rdzv_endpoint=os.environ["MEET"], node_id=os.environ["NODE"])
    print(json.dumps(values))
"""


def test_two_nodes_make_the_same_call_and_get_their_own_values(tmp_path):
    meet = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            env = {"MEET": meet, "NODE": name}
            nodes.append(stack.enter_context(program(tmp_path / name, NODES, **env)))
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].err
        found = [json.loads(node.out.splitlines()[-1]) for node in nodes]
    assert sorted(int(rank) for values in found for rank in values) == [0, 1, 2, 3]
    for values in found:
        assert len(values) == 2
        assert all(place == [rank, place[1], "4"] for rank, place in values.items())
        assert len({group for _, group, _ in values.values()}) == 1


# The name that a module has, too


def test_a_module_imported_by_mistake_can_still_be_called(tmp_path):
    body = """
        import elastane.launch
        from elastane import launch
        print(elastane.launch(len, ("ab",), nproc=1), launch(len, ((1,),), nproc=1))
    """
    with program(tmp_path, body.replace('("ab",)', '(("a", "b"),)')) as one:
        assert one.wait() == 0, one.err
        assert one.out == "{0: 2} {0: 1}\n"


def test_python_m_elastane_launch_is_the_older_command_line(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    argv = [sys.executable, "-m", "elastane.launch", "--nproc-per-node=1", "script.py", "--own"]
    with ran(tmp_path, argv) as one:
        assert one.wait() == 0, one.err
        until(lambda: one.out, "the script printed")
        assert one.out == "['--local-rank=0', '--own']\n"
