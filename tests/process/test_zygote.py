"""The zygote itself: its forks, its fallbacks to exec, and the cost of its faults."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from process_harness import (
    DEADLINE_S,
    SCRIPTS,
    Told,
    command,
    ended,
    eventually,
    run_spawned,
    worker_environment,
)

from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import sweep
from elastane.process.process import WorkerProcess, reap_orphans
from elastane.process.zygote import client
from elastane.process.zygote.client import ZygoteSpawner

Scenario = Callable[[ZygoteSpawner, Told], Coroutine[None, None, None]]


def with_bare_zygote(scenario: Scenario, *preload: str, warm: bool = True) -> None:
    """Run a scenario with a separate zygote that has imported only `preload`."""

    become_subreaper()

    async def run() -> None:
        told = Told()
        spawner = ZygoteSpawner(preload, worker_environment(), sys.executable, told)
        await spawner.start()
        try:
            if warm:
                await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)
            await scenario(spawner, told)
        finally:
            await spawner.close()
        assert spawner.pid is None
        assert not spawner.warm.is_set()

    asyncio.run(run())


def in_folder(folder: Path, scenario: Scenario, *preload: str, warm: bool = True) -> None:
    """Run a scenario with a separate zygote that preloads modules of `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with_bare_zygote(scenario, *preload, warm=warm)
    finally:
        os.chdir(before)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def quick(folder: Path, code: int = 0) -> Path:
    script = folder / "quick.py"
    script.write_text(f"import sys; sys.exit({code})")
    return script


def test_the_zygote_has_one_thread_and_no_cuda_when_it_forks(zygote: ZygoteSpawner) -> None:
    assert len(os.listdir(f"/proc/{zygote.pid}/task")) == 1
    links = [os.readlink(f"/proc/{zygote.pid}/fd/{fd}") for fd in (0, 3)]
    assert links[0] == "/dev/null" and links[1].startswith("socket:")
    assert sorted(os.listdir(f"/proc/{zygote.pid}/fd")) == ["0", "1", "2", "3"]


def test_workers_are_children_of_the_agent_and_outlive_the_zygote(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        process_mark = worker_environment(ELASTANE_PROCESS_MARK="of-this-test")
        worker = await spawner.spawn(command("run-path", SCRIPTS / "family.py", env=process_mark))
        assert str(worker.pid) in children_of(os.getpid())
        assert spawner.pid is not None
        os.kill(spawner.pid, signal.SIGKILL)
        await asyncio.wait_for(spawner.died.wait(), DEADLINE_S)
        assert worker.exit_code is None and worker.group_is_alive()
        assert "exit code -9" in told.of("died")[0]
        await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)
        assert await ended(await spawner.spawn(command("script", quick(tmp_path, 5)))) == 5
        assert told.of("fallback") == []
        worker.kill_group(signal.SIGKILL)
        assert await ended(worker) == -signal.SIGKILL
        await eventually(lambda: not worker.group_is_alive(), "its group too")
        sweep("of-this-test")

    with_bare_zygote(scenario)


def test_a_worker_starts_by_exec_while_the_zygote_is_away(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        assert spawner.pid is not None
        os.kill(spawner.pid, signal.SIGKILL)
        await asyncio.wait_for(spawner.died.wait(), DEADLINE_S)
        assert await ended(await spawner.spawn(command("script", quick(tmp_path, 6)))) == 6
        assert "the zygote died (exit code -9)" in told.of("fallback")[0]

    with_bare_zygote(scenario)


def test_a_stopped_zygote_costs_a_bounded_wait_and_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SPAWN_TIMEOUT_S", 0.3)
    ran = tmp_path / "ran"
    script = tmp_path / "once.py"
    script.write_text(f"open({str(ran)!r}, 'a').write('x')")

    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        first = spawner.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        workers = await asyncio.gather(*(spawner.spawn(command("script", script)) for _ in "ab"))
        assert [await ended(worker) for worker in workers] == [0, 0]
        assert "hung" in told.of("fallback")[0]
        assert len(told.of("fallback")) == 2
        await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)
        assert spawner.pid != first
        assert ran.read_text() == "xx"

    with_bare_zygote(scenario)


def test_a_zygote_killed_amid_spawns_starts_each_worker_exactly_once(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script = tmp_path / "once.py"
    script.write_text(f"open({str(ran)!r}, 'a').write('x')")

    async def scenario(spawner: ZygoteSpawner, _told: Told) -> None:
        spawns = [asyncio.create_task(spawner.spawn(command("script", script))) for _ in range(12)]
        await spawns[3]
        assert spawner.pid is not None
        os.kill(spawner.pid, signal.SIGKILL)
        assert [await ended(await spawn) for spawn in spawns] == [0] * 12
        assert ran.read_text() == "x" * 12

    with_bare_zygote(scenario)


def test_a_spawn_that_is_cancelled_leaves_no_worker(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        assert spawner.pid is not None
        before = children_of(os.getpid())
        os.kill(spawner.pid, signal.SIGSTOP)
        spawn = asyncio.create_task(spawner.spawn(command("exec", "true")))
        assert await ended(await spawn) == 0  # a program that needs no zygote does not wait for it
        spawn = asyncio.create_task(spawner.spawn(command("run-path", SCRIPTS / "family.py")))
        await eventually(lambda: spawner._requests, "the zygote was asked")
        spawn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawn
        os.kill(spawner.pid, signal.SIGCONT)
        assert await ended(await spawner.spawn(command("script", quick(tmp_path, 4)))) == 4
        # Children of earlier tests may end meanwhile.
        await eventually(lambda: not set(children_of(os.getpid())) - set(before), "it is gone")
        assert told.of("fallback") == []

    with_bare_zygote(scenario)


def test_a_preload_that_touches_cuda_means_exec(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        assert await ended(await spawner.spawn(command("script", quick(tmp_path)))) == 0
        assert told.of("fallback") == ["a preloaded module has used CUDA"]

    (tmp_path / "touching.py").write_text(
        "import sys, types\nsys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "torch.__spec__ = __spec__\n"
        "torch.cuda = types.SimpleNamespace(is_available=lambda: True)\n"
        "torch.cuda._is_in_bad_fork = torch.cuda.is_available\n"
    )
    in_folder(tmp_path, scenario, "touching", warm=False)


def test_a_preload_that_asks_for_devices_forks_workers_that_see_the_same(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        same = command("script", quick(tmp_path))
        assert await ended(await spawner.spawn(same)) == 0 and told.of("fallback") == []
        other = replace(same, env={**same.env, "CUDA_VISIBLE_DEVICES": "3"})
        assert await ended(await spawner.spawn(other)) == 0
        [reason] = told.of("fallback")
        assert reason.startswith("CUDA_VISIBLE_DEVICES is '3' for the worker"), reason

    (tmp_path / "asking.py").write_text("import os\nos.environ.get('CUDA_VISIBLE_DEVICES')\n")
    in_folder(tmp_path, scenario, "asking")


def test_a_zygote_that_always_dies_is_given_up(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        await eventually(lambda: len(told.of("died")) == client.DEATHS_MAX, "no more tries")
        assert await ended(await spawner.spawn(command("script", quick(tmp_path)))) == 0
        assert told.of("fallback")

    (tmp_path / "suicidal.py").write_text("import os; os._exit(3)")
    in_folder(tmp_path, scenario, "suicidal", warm=False)


def test_a_failed_preload_is_reported_and_blocks_no_worker(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        assert [p.partition(":")[0] for p in told.of("problem")] == ["no_such", "raises", "leaves"]
        assert "ValueError: what" in told.of("problem")[1]
        assert await ended(await spawner.spawn(command("script", quick(tmp_path, 2)))) == 2
        assert told.of("fallback") == []

    (tmp_path / "raises.py").write_text("raise ValueError('what')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    in_folder(tmp_path, scenario, "no_such", "no_such.deeper", "raises", "leaves", "json")


def test_a_node_without_torch_has_a_zygote_and_no_store(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, _told: Told) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert await spawner.serve_store(listener) is None
        assert await ended(await spawner.spawn(command("script", quick(tmp_path, 2)))) == 2

    (tmp_path / "without_torch.py").write_text("import sys; sys.modules['torch'] = None")
    in_folder(tmp_path, scenario, "without_torch")


def test_a_preload_that_runs_a_thread_means_exec(tmp_path: Path) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        assert await ended(await spawner.spawn(command("script", quick(tmp_path)))) == 0
        assert "a preloaded module runs 1 threads" in told.of("fallback")[0]
        assert not spawner.warm.is_set()

    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    in_folder(tmp_path, scenario, "threaded", warm=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"PYTHONHASHSEED": "1"}, "PYTHONHASHSEED"), ({"PYTHONPATH": "/x"}, "PYTHONPATH"),
     ({"PYTHONUNBUFFERED": "1"}, "PYTHONUNBUFFERED"), ({"OMP_NUM_THREADS": "2"}, "OMP_NUM"),
     ({"LANG": "C"}, "LANG"), ({"LD_LIBRARY_PATH": "/x"}, "LD_LIBRARY_PATH")],
)  # fmt: skip
def test_a_variable_read_at_start_means_exec_with_the_reason(
    runner: asyncio.Runner,
    zygote: ZygoteSpawner,
    told: Told,
    tmp_path: Path,
    change: dict[str, str],
    why: str,
) -> None:
    told.heard.clear()
    wanted = command("script", quick(tmp_path, 3), env=worker_environment(**change))
    assert runner.run(run_spawned(zygote, wanted, tmp_path)).code == 3
    assert why in told.of("fallback")[0]


def test_a_variable_that_the_script_sets_before_it_imports_torch_means_exec(
    runner: asyncio.Runner, zygote: ZygoteSpawner, told: Told, tmp_path: Path
) -> None:
    told.heard.clear()
    script = tmp_path / "sets.py"
    script.write_text("import os\nos.environ['PYTORCH_JIT'] = '0'\nimport torch\n")
    assert runner.run(run_spawned(zygote, command("script", script), tmp_path)).code == 0
    assert told.of("fallback") == ["the script sets PYTORCH_JIT in line 2, before it imports torch"]


def test_a_variable_that_another_module_sets_is_reported_when_torch_is_imported(
    runner: asyncio.Runner, zygote: ZygoteSpawner, told: Told, tmp_path: Path
) -> None:
    told.heard.clear()
    (tmp_path / "settings.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '7'\n")
    script = tmp_path / "uses.py"
    script.write_text(
        "import settings, sys\nassert 'torch' not in sys.modules\n"
        "from torch.nn import Linear\nimport torch, pickle\n"
        "assert torch.__spec__.origin == torch.__file__ and torch.nn.Linear is Linear\n"
        "assert pickle.loads(pickle.dumps(Linear(1, 1))).weight.shape == (1, 1)\n"
    )
    ended = runner.run(run_spawned(zygote, command("script", script), tmp_path))
    assert ended.code == 0, ended.err
    assert ended.err == (
        "elastane: OMP_NUM_THREADS has no effect: torch was imported before the script set it."
        " Next: --no-zygote starts each worker as a new interpreter\n"
    )
    assert told.of("fallback") == []


def test_another_zygote_takes_over_with_what_workers_imported_but_for_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for name, value in (("calm", "None"), ("ranked", "os.environ.get('RANK')")):
        (site / name).mkdir(parents=True)
        text = f"import os\npid, value = os.getpid(), {value}\n"
        (site / name / "__init__.py").write_text(text)
    script = tmp_path / "imports.py"
    script.write_text(
        "import os, calm, ranked\n"
        "print(calm.pid == os.getpid(), ranked.pid == os.getpid(), ranked.value)\n"
    )
    paths = {"PYTHONPATH": str(site), "PYTHONUSERBASE": str(tmp_path)}
    env = worker_environment(**paths)
    monkeypatch.setattr(client, "DEFAULT_PRELOAD", ("json",))
    become_subreaper()

    async def scenario() -> None:
        told = Told()
        spawner = ZygoteSpawner(("json",), env, sys.executable, told)
        await spawner.start()
        try:
            await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)
            wanted = command("script", script, env={**env, "RANK": "5"})
            first, pid = await run_spawned(spawner, wanted, tmp_path), spawner.pid
            assert (first.out, first.err) == ("True True 5\n", "")
            spawner.learn(("calm", "ranked"))
            await eventually(lambda: spawner.pid not in (pid, None), "another zygote", 60.0)
            second = await run_spawned(spawner, wanted, tmp_path)
            assert (second.out, second.err) == ("False True 5\n", "")
            assert told.of("fallback") == told.of("died") == []
        finally:
            await spawner.close()

    asyncio.run(scenario())


def test_a_preload_that_keeps_the_rank_of_its_import_is_a_problem_and_means_exec(
    tmp_path: Path,
) -> None:
    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        env = worker_environment(RANK="5")
        wanted = command("script", tmp_path / "shows.py", env=env)
        assert (await run_spawned(spawner, wanted, tmp_path)).out == "5\n"
        assert not spawner.warm.is_set()
        [problem] = told.of("problem")
        assert problem.startswith("ranked_early reads RANK when it is imported")
        assert "out of --preload" in problem

    (tmp_path / "ranked_early.py").write_text("import os\nrank = os.environ.get('RANK')\n")
    (tmp_path / "shows.py").write_text("import ranked_early\nprint(ranked_early.rank)\n")
    in_folder(tmp_path, scenario, "ranked_early", warm=False)


@pytest.mark.parametrize("case", ["missing", "folder", "compiled", "hides", "preloaded"])
def test_files_that_only_python_can_run_mean_exec(
    runner: asyncio.Runner, zygote: ZygoteSpawner, told: Told, tmp_path: Path, case: str
) -> None:
    told.heard.clear()
    target, kind, code = quick(tmp_path, 3), "script", 3
    if case == "missing":
        target, code = tmp_path / "no.py", 2
    elif case == "folder":
        (tmp_path / "__main__.py").write_text("import sys; sys.exit(3)")
        target = tmp_path
    elif case == "compiled":
        import py_compile

        target = Path(py_compile.compile(str(target), str(tmp_path / "quick.pyc")) or "")
    elif case == "hides":
        (tmp_path / "numpy.py").write_text("mine = 4")
        target.write_text("import sys, numpy; sys.exit(numpy.mine)")
        code = 4
    else:
        target, kind, code = Path("json"), "module", 1
    left = runner.run(run_spawned(zygote, command(kind, target), tmp_path))  # type: ignore[arg-type]
    assert left.code == code, left.err
    assert len(told.of("fallback")) == 1


def test_a_missing_folder_is_reported(runner: asyncio.Runner, zygote: ZygoteSpawner) -> None:
    from elastane.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="No such file"):
        runner.run(zygote.spawn(command("module", "json.tool", cwd=Path("/no/such"))))


def test_descriptors_arrive_under_their_numbers(
    runner: asyncio.Runner, zygote: ZygoteSpawner, tmp_path: Path
) -> None:
    script = tmp_path / "fds.py"
    script.write_text(
        "import os\n"
        "print(os.read(7, 9), os.read(3, 9), sorted(map(int, os.listdir('/proc/self/fd'))))"
    )
    reads = []
    for text in (b"seven", b"three"):
        read, write = os.pipe()
        os.write(write, text)
        os.close(write)
        reads.append(read)
    wanted = command("script", script, fds={7: reads[0], 3: reads[1]})
    left = runner.run(run_spawned(zygote, wanted, tmp_path))
    for fd in reads:
        os.close(fd)
    assert left.out == "b'seven' b'three' [0, 1, 2, 3, 4, 7]\n", left.err


def test_a_worker_dies_with_its_agent_even_where_the_zygote_made_it(
    runner: asyncio.Runner, zygote: ZygoteSpawner, tmp_path: Path
) -> None:
    script = tmp_path / "deathsig.py"
    script.write_text(
        "import ctypes; n = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(n), 0, 0, 0); print(n.value)"
    )
    left = runner.run(run_spawned(zygote, command("script", script), tmp_path))
    assert left.out == "9\n"


@pytest.mark.parametrize("how", ["fork", "exec", "spare", "spare that died"])
def test_the_store_is_served_on_the_agents_socket(
    runner: asyncio.Runner,
    zygote: ZygoteSpawner,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import sys\nfrom torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)\n"
        "print(store.add('n', 2), store.add('n', 1))"
    )
    monkeypatch.setattr(client, "SPARE_STORE_AFTER_S", DEADLINE_S)  # None that is not asked for.

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            with monkeypatch.context() as patch:
                if how == "exec":
                    patch.setattr(zygote, "warm", asyncio.Event())
                spare = await prepared(zygote) if "spare" in how else None
                if spare is not None and how == "spare that died":
                    spare.kill_group(signal.SIGKILL)
                    assert await ended(spare) == -signal.SIGKILL
                store = await zygote.serve_store(listener)
            assert store is not None and (store is spare) is (how == "spare")
            assert zygote._store_forker is not None and zygote._store_forker.cancel()
            port = str(listener.getsockname()[1])
            left = await run_spawned(zygote, command("script", script, port), tmp_path)
            assert left.out == "2 3\n", left.err
            assert store.exit_code is None
            store.kill_group(signal.SIGKILL)
            assert await ended(store) == -signal.SIGKILL

    runner.run(scenario())


async def prepared(zygote: ZygoteSpawner) -> WorkerProcess:
    """Return the process that waits for the next store's socket."""
    zygote._spare_store = store = await zygote._start_store()
    return store.process


def test_a_spare_store_comes_after_the_first_and_ends_with_the_spawner(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SPARE_STORE_AFTER_S", 0.0)

    async def scenario(spawner: ZygoteSpawner, told: Told) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = await spawner.serve_store(listener)
        await eventually(lambda: spawner._spare_store is not None, "a spare store")
        assert first is not None and spawner._spare_store is not None
        spare = spawner._spare_store.process
        assert spare.exit_code is None and spare is not first and not told.of("fallback")
        await spawner.close()
        assert spare.exit_code == -signal.SIGKILL and spawner._spare_store is None
        first.kill_group(signal.SIGKILL)
        await ended(first)

    in_folder(tmp_path, scenario, "torch")


def test_twenty_forks_leave_nothing(
    runner: asyncio.Runner, zygote: ZygoteSpawner, tmp_path: Path
) -> None:
    script = tmp_path / "leave.py"
    script.write_text("import os; os._exit(0)")

    def counts() -> tuple[int, ...]:
        folders = ("/proc/self/fd", f"/proc/{zygote.pid}/fd", f"/proc/{zygote.pid}/task")
        return (*(len(os.listdir(folder)) for folder in folders), threading.active_count())

    async def scenario(number: int) -> None:
        for _ in range(number):
            assert await ended(await zygote.spawn(command("script", script))) == 0

    runner.run(scenario(1))
    before, children = counts(), children_of(os.getpid())
    runner.run(scenario(20))
    after = counts()  # of this process, what an earlier test left may have gone
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert reap_orphans() == []
    assert {*children_of(os.getpid())} <= {*children}
    assert zygote.pid is not None and children_of(zygote.pid) == []


def test_streams_are_unbuffered_as_by_python_dash_u_on_a_terminal_and_on_a_pipe(
    runner: asyncio.Runner, zygote: ZygoteSpawner, tmp_path: Path
) -> None:
    script = tmp_path / "tty.py"
    script.write_text(
        "import os, sys\n"
        "streams = (sys.stdin, sys.stdout, sys.stderr)\n"
        "facts = [(s.line_buffering, s.isatty(), s.write_through) for s in streams]\n"
        "text = ' '.join(''.join(str(int(fact)) for fact in three) for three in facts)\n"
        "os.write(3, text.encode())"
    )
    read, write = os.pipe()
    master, slave = os.openpty()

    async def scenario(stdio: tuple[int, int, int]) -> str:
        worker = await zygote.spawn(command("script", script, stdio=stdio, fds={3: write}))
        assert await ended(worker) == 0
        return os.read(read, 100).decode()

    assert runner.run(scenario((slave, slave, slave))) == "011 011 011"
    assert runner.run(scenario((read, write, write))) == "001 001 001"
    for fd in (read, write, master, slave):
        os.close(fd)
