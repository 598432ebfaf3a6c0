"""Stacks of a worker by py-spy, or what is done without it. A script stands for the program."""

import asyncio
import os

import pytest

from elastane.agent import outside_stacks
from elastane.agent.outside_stacks import find_py_spy, stacks_of


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return how to install a py-spy of this text; no other one is found."""
    monkeypatch.setattr(outside_stacks.sys, "executable", str(tmp_path / "none" / "python"))

    def install(text):
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return install


def test_native_stacks_are_preferred_and_say_where_they_came_from(program):
    environ = program("echo \"$@\"; echo '  hold (train.py:3)'")
    found = asyncio.run(stacks_of(4711, environ))
    assert found.source == "py-spy --native"
    assert found.text.splitlines() == ["dump --pid 4711 --native", "  hold (train.py:3)"]


def test_without_native_frames_those_of_python_are_shown(program):
    environ = program('[ "$4" = --native ] && exit 1; echo python only')
    found = asyncio.run(stacks_of(4711, environ))
    assert (found.source, found.text) == ("py-spy", "python only")


def test_a_program_that_may_not_trace_or_is_missing_gives_none(program):
    assert asyncio.run(stacks_of(4711, program("echo 'Permission denied' >&2; exit 1"))) is None
    assert not find_py_spy({"PATH": "/nowhere"})
    assert asyncio.run(stacks_of(4711, {"PATH": "/nowhere"})) is None


def test_a_program_that_does_not_end_is_killed(program, monkeypatch):
    monkeypatch.setattr(outside_stacks, "_DUMP_S", 0.2)
    assert asyncio.run(stacks_of(4711, program("exec sleep 600"))) is None
