"""A snapshot server imports what storage needs when it first needs it, in any thread."""

import ast
import subprocess
import sys
from pathlib import Path

import elastane.snapshots

FOLDER = Path(elastane.snapshots.__file__).parent


def test_threads_that_need_storage_at_the_same_time_import_it_from_above():
    """A thread that imports a submodule may wait for a thread that imports its package."""
    functions = [
        (path.name, node)
        for path in FOLDER.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    ]
    found = [(n, node.module) for n, node in functions if isinstance(node, ast.ImportFrom)]
    assert ("writer.py", "elastane.storage") in found
    assert not [each for each in found if each[1].startswith("elastane.storage.")]


def test_a_snapshot_server_loads_no_event_loop_and_no_tls():
    """Each node has a snapshot server with its own memory, and these two take 5 MB."""
    code = "import sys, elastane.snapshots.server; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert not {"asyncio", "ssl", "torch"} & {*said.stdout.split()}
