"""A forked worker equals the same program started by hand."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from process_harness import (
    SCRIPTS,
    Ended,
    Told,
    command,
    run_plain,
    run_spawned,
    worker_environment,
)

from elastane.process.process import WorkerCommand
from elastane.process.zygote.client import ZygoteSpawner

Facts = dict[str, Any]


class Both:
    """Runs a command forked and plain."""

    def __init__(
        self, runner: asyncio.Runner, zygote: ZygoteSpawner, told: Told, folder: Path
    ) -> None:
        self.runner, self.zygote, self.told, self.folder = runner, zygote, told, folder

    def __call__(self, wanted: WorkerCommand) -> tuple[Ended, Ended]:
        return self.forked(wanted), run_plain(wanted, self.folder)

    def forked(self, wanted: WorkerCommand) -> Ended:
        self.told.heard.clear()
        forked = self.runner.run(run_spawned(self.zygote, wanted, self.folder))
        assert self.told.of("fallback") == []
        return forked


@pytest.fixture
def both(runner: asyncio.Runner, zygote: ZygoteSpawner, told: Told, tmp_path: Path) -> Both:
    return Both(runner, zygote, told, tmp_path)


def facts(text: str) -> Facts:
    loaded = json.loads(text)
    assert isinstance(loaded, dict)
    return loaded


# Those that import torch are apart: the others are of a program that does not.
PARTS = ("process,main,streams,interpreter,sources,children", "packages,loader")


@pytest.mark.parametrize("parts", PARTS, ids=["without-torch", "with-torch"])
def test_the_probe_finds_the_same(both: Both, parts: str) -> None:
    env = worker_environment(PROBE=parts, FROM_TEST="a b", TMPDIR="/var/tmp", RANK="3")
    forked, plain = both(command("script", SCRIPTS / "probe.py", "--x", "a b", "", env=env))
    assert plain.code == 0, plain.err
    assert forked.err == plain.err
    found, expected = facts(forked.out), facts(plain.out)
    for part in parts.split(","):
        assert found[part].keys() == expected[part].keys()
        pairs = {name: (found[part][name], expected[part][name]) for name in found[part]}
        assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == {}
    assert forked.code == 0


@pytest.mark.parametrize("target", ["probe.py", "./probe.py", "../scripts/probe.py", "link.py"])
def test_a_relative_path_is_shown_as_by_hand(both: Both, target: str, tmp_path: Path) -> None:
    env = worker_environment(PROBE="main,interpreter,sources")
    folder = SCRIPTS
    if target == "link.py":
        (tmp_path / "link.py").symlink_to(SCRIPTS / "probe.py")
        folder = tmp_path
    forked, plain = both(command("script", target, env=env, cwd=folder))
    assert plain.code == 0, plain.err
    assert facts(forked.out) == facts(plain.out)


def test_a_module_is_run_as_by_dash_m(both: Both) -> None:
    env = worker_environment(PROBE="main,interpreter,sources,children")
    forked, plain = both(command("module", "probe", "-v", env=env))
    assert plain.code == 0, plain.err
    assert facts(forked.out) == facts(plain.out)


def test_a_package_is_run_by_its_main(both: Both) -> None:
    forked, plain = both(command("module", "probepkg", "one"))
    assert plain.code == 0, plain.err
    assert facts(forked.out) == facts(plain.out)


def test_a_path_is_run_as_by_runpy(both: Both) -> None:
    env = worker_environment(PROBE="streams,process")
    forked, plain = both(command("run-path", SCRIPTS / "probe.py", "two", env=env))
    assert plain.code == 0, plain.err
    assert facts(forked.out) == facts(plain.out)


ENDINGS = {
    "falls-off": "print('x', end='')",
    "exit-int": "import sys; sys.exit(3)",
    "exit-none": "import sys; sys.exit(None)",
    "exit-text": "import sys; sys.exit('what went wrong')",
    "exit-bare": "raise SystemExit",
    "exit-builtin": "exit(5)",
    "uncaught": "def f(n):\n    return 1 // n\n\nf(0)",
    "chained": (
        "def f():\n    try:\n        {}['a']\n    except KeyError as e:\n"
        "        raise ValueError('b') from e\nf()"
    ),
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "recursion": "import sys\ndef f(): f()\ntry:\n    f()\nexcept RecursionError: print('deep')",
    "bad-syntax": "x = (1,\ny = 2",
    "bad-indent": "if True:\nprint(1)",
    "interrupt": "raise KeyboardInterrupt",
    "sigint": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "sigterm": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)",
    "abort": "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()",
    "hard-exit": "import os; print('lost'); os._exit(7)",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')",
    "atexit-raises": "import atexit\natexit.register(lambda: 1 // 0)",
    "thread": (
        "import threading, time\ngo = threading.Event()\n"
        "t = threading.Thread(target=lambda: (go.wait(5), print('joined')))\n"
        "t.start()\nthreading.Timer(0.05, go.set).start()\nprint('main ends')"
    ),
    "thread-raises": "import threading\nt = threading.Thread(target=lambda: 1 // 0)\nt.start()",
    "excepthook": (
        "import sys, traceback\ndef hook(k, v, tb):\n    print(k, len(traceback.extract_tb(tb)))\n"
        "sys.excepthook = hook\n1 / 0"
    ),
    "last-value": (
        "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value), "
        "sys.last_traceback.tb_lineno))\n1 / 0"
    ),
    "logged": (
        "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('m')"
    ),
    "warned": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "latin": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))",
    "futures": "def f(x: undefined) -> None: ...\n",
    "annotated": "x: int = 3\nprint(__annotations__)",
    "stdin": "import sys; print(repr(sys.stdin.read()))",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\nA()",
    "module-del": "import os\nclass A:\n    def __del__(self): os.write(1, b'gone')\na = A()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_would_by_hand(both: Both, ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(ENDINGS[ending].encode("latin-1" if ending == "latin" else "utf-8"))
    forked, plain = both(command("script", script, cwd=tmp_path))
    assert _plain(repr(forked)) == _plain(repr(plain))


def _plain(text: str) -> str:
    """Return the output without addresses and without a fork's extra frames in fatal stacks."""
    text = re.sub("0x[0-9a-f]+", "0x", text)
    head, fatal, stack = text.partition("Fatal Python error")
    return head + fatal + stack.partition("in <module>")[0] if fatal else text


@pytest.mark.parametrize("ending", ["uncaught", "exit-text", "interrupt", "bad-syntax"])
@pytest.mark.parametrize("kind", ["module", "run-path"])
def test_modules_and_paths_end_as_by_hand_too(
    both: Both, kind: Any, ending: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    target = "script" if kind == "module" else str(script)
    forked, plain = both(command(kind, target, cwd=tmp_path))
    assert forked == plain


def test_a_module_that_is_missing_is_reported_as_by_python(both: Both, tmp_path: Path) -> None:
    forked, plain = both(command("module", "no_such_module", cwd=tmp_path))
    assert forked == plain
    assert forked.code == 1


def test_two_workers_draw_different_numbers_unless_seeded(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, sys, uuid, numpy, torch, multiprocessing\n"
        "print(random.random()); print(numpy.random.rand()); print(torch.rand(1).item())\n"
        "print(multiprocessing.current_process().authkey.hex())\n"
        "print(torch.initial_seed()); print(numpy.random.default_rng().random())\n"
        "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    )
    first, plain = both(command("script", script))
    second = both.forked(command("script", script))
    *three, seeded = zip(*(one.out.splitlines() for one in (first, second, plain)), strict=True)
    assert len(three) == 6 and all(len(set(drawn)) == 3 for drawn in three)
    assert len(set(seeded)) == 1 and seeded[0]


def test_the_debug_level_of_the_worker_counts(both: Both) -> None:
    def at(level: str) -> WorkerCommand:
        env = worker_environment(PROBE="packages", TORCH_DISTRIBUTED_DEBUG=level)
        return command("script", SCRIPTS / "probe.py", env=env)

    forked, plain = both(at("DETAIL"))
    expected = facts(plain.out)["packages"]
    assert facts(forked.out)["packages"] == expected and "DETAIL" in expected["debug"]
    for level in ("INFO", "OFF"):
        found = facts(both.forked(at(level)).out)["packages"]
        assert found == expected | {"debug": expected["debug"].replace("DETAIL", level)}


def test_an_environment_of_hundreds_of_kilobytes_arrives(both: Both, tmp_path: Path) -> None:
    big = {f"BIG_{n}": chr(ord("a") + n) * 100_000 for n in range(5)}
    script = tmp_path / "big.py"
    script.write_text("import os; print(sum(len(v) for k, v in os.environ.items() if 'BIG' in k))")
    forked, plain = both(command("script", script, env=worker_environment(**big)))
    assert forked == plain
    assert forked.out == "500000\n"


def test_bytes_that_are_no_text_pass_through(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "raw.py"
    script.write_text("import os, sys; print(os.environb[b'RAW'], os.fsencode(sys.argv[1]))")
    raw = b"\xff\xfe".decode("utf-8", "surrogateescape")
    forked, plain = both(command("script", script, raw, env=worker_environment(RAW=raw)))
    assert forked == plain
    assert "xff" in forked.out
