"""What may import what, beyond what import-linter holds (see pyproject.toml)."""

import ast
import subprocess
import sys

import pytest
from reach import PURE, rooms_of
from style_sources import SRC, nodes_of, offenders, package_files

# signal stays allowed: the rules use its table of names, which is data.
IMPURE = {
    "asyncio", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "socket", "subprocess", "sys", "threading", "time", "torch", "uuid",
}  # fmt: skip


def _pure():
    """The files of the rooms that pyproject.toml calls pure."""
    for name in rooms_of(PURE):
        place = SRC.parent / name.replace(".", "/")
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


RULES = list(_pure())


def _imported(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_rules_are_pure():
    def impure(path):
        return {name.split(".")[0] for name in _imported(path)} & IMPURE

    assert not offenders(RULES, impure)


def test_rules_do_no_io():
    def called(path):
        calls = (node for node in nodes_of(path) if isinstance(node, ast.Call))
        return {node.func.id for node in calls if isinstance(node.func, ast.Name)}

    assert not offenders(RULES, lambda path: called(path) & {"open", "print", "input"})


# torch's own launcher: we are in its place, and its packages may change under us.
_TORCHS_OWN = ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")


# The modules of torch that `elastic` gives a second name; none of them loads torch's plug-ins.
_SECOND_NAMES = tuple(
    f"torch.distributed.elastic.{name}"
    for name in ("events", "metrics", "multiprocessing", "timer", "utils")
)


def test_only_the_torchrun_plug_in_meets_torchs_own_launcher():
    def meets(path):
        known = _SECOND_NAMES if path.is_relative_to(SRC / "elastic") else ()
        found = [name for name in _imported(path) if name.startswith(_TORCHS_OWN)]
        return [name for name in found if not name.startswith(known)]

    plug_in = ("torchrun.py", "torchrun_handler.py")
    others = [path for path in package_files() if path.name not in plug_in]
    assert not offenders(others, meets)


# The processes of workers, which get their rank by their environment. `elastic` and
# `integrations` are imported there too.
_WORKER_SIDE = (
    *("process/zygote/", "worker/", "comms/", "synchrony/"),
    *("examples/", "elastic/", "integrations/"),
)


def test_one_module_of_the_control_plane_reads_the_environment():
    readers = [
        str(path.relative_to(SRC))
        for path in package_files()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and getattr(node.value, "id", "") == "os"
    ]
    others = [path for path in readers if not path.startswith(_WORKER_SIDE)]
    assert set(others) == {"process/environment.py"}


def test_importing_elastane_imports_nothing_heavy():
    code = (
        "import sys, elastane;"
        "heavy = ('torch', 'numpy', 'rich', 'asyncio', 'msgspec', 'argparse');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_of_the_package_resolves():
    import elastane

    assert elastane.__all__
    for name in elastane.__all__:
        assert getattr(elastane, name) is not None
    assert set(elastane.__all__) <= set(dir(elastane))
    with pytest.raises(AttributeError):
        _ = elastane.no_such_name


def test_nothing_waits_by_wait_for():
    """That of Python 3.11 loses a cancellation that comes with the result."""

    def waits(path):
        return [
            node.lineno
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
            and node.attr == "wait_for"
            and getattr(node.value, "id", "") == "asyncio"
        ]

    assert not offenders(package_files(), waits), "use asyncio.timeout"
