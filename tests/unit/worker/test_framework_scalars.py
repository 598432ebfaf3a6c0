"""Scalars of a framework are written once per step by rank 0, whichever worker has it."""

import json

import pytest

from elastane.worker.framework_scalars import FrameworkScalars


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTANE_ROUND", "1")
    monkeypatch.setenv("ELASTANE_ATTEMPT", "0")
    return tmp_path / "scalars.jsonl"


def logged(scalars, *steps, is_writer, is_resumed=False):
    for step in steps:
        values = {"loss": step / 10, "note": "no number"}
        scalars.log(values, step, is_writer=is_writer, is_resumed=is_resumed)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_next_rank_0_adds_what_a_lost_one_had_not_written(path):
    first, second = FrameworkScalars((path,)), FrameworkScalars((path,))
    logged(first, 4, 8, is_writer=True)
    logged(second, 4, 8, 12, is_writer=False)
    logged(second, 16, is_writer=True)
    assert steps(path) == [4, 8, 12, 16]


def test_a_worker_that_joined_and_becomes_rank_0_continues_the_file(path, monkeypatch):
    logged(FrameworkScalars((path,)), 4, 8, is_writer=True)
    monkeypatch.setenv("ELASTANE_ROUND", "3")
    logged(FrameworkScalars((path,)), 12, is_writer=True)
    assert steps(path) == [4, 8, 12]


def test_steps_that_a_restart_makes_again_are_left_out(path, monkeypatch):
    logged(FrameworkScalars((path,)), 4, 8, 12, is_writer=True)
    monkeypatch.setenv("ELASTANE_ATTEMPT", "1")
    logged(FrameworkScalars((path,)), 4, 8, 12, 16, is_writer=True)
    assert steps(path) == [4, 8, 12, 16]


def test_a_training_that_was_resumed_continues_and_another_one_begins_again(path):
    logged(FrameworkScalars((path,)), 4, 8, 12, is_writer=True)
    logged(FrameworkScalars((path,)), 8, 12, 16, is_writer=True, is_resumed=True)
    assert steps(path) == [4, 8, 12, 16]
    logged(FrameworkScalars((path,)), 4, 8, is_writer=True)
    assert steps(path) == [4, 8, 12, 16, 4, 8]


def test_values_logged_after_the_end_are_added(path):
    scalars = FrameworkScalars((path,))
    logged(scalars, 4, is_writer=True)
    scalars.end()
    logged(scalars, 8, is_writer=True)
    assert steps(path) == [4, 8]
