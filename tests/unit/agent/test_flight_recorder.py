"""What torch's flight recorder left of a worker, read from its file without making any object."""

import json
import os
import pickle

import pytest

from elastane.agent.flight_recorder import dump_path, open_collectives, read_open_collectives


def entry(number, group="default_pg", **changes):
    """Return a record as torch 2.13 writes it, of a collective that did not complete."""
    frames = [
        {
            "name": "all_reduce",
            "filename": "/venv/lib/python3.11/site-packages/torch/c.py",
            "line": 3,
        },
        {"name": "main", "filename": "/code/train.py", "line": 88},
    ]
    return {
        "frames": frames,
        "process_group": ("0", group),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "state": "started",
        "retired": False,
        "is_p2p": False,
        **changes,
    }


def dump(*entries):
    return {"version": "2.10", "entries": [*entries], "pg_config": {}, "pg_status": {}}


@pytest.mark.parametrize("encode", [pickle.dumps, lambda made: json.dumps(made).encode()])
def test_the_first_open_collective_of_each_group_is_named_with_its_line(encode):
    made = dump(
        entry(40, retired=True, state="completed"),
        entry(42),
        entry(41),
        entry(7, "tensor", profiling_name="nccl:_all_gather_base", frames=[]),
        entry(1, "pipe", is_p2p=True),
    )
    said = open_collectives(encode(made))
    assert said == (
        "_all_gather_base #7 of tensor did not complete;"
        " all_reduce #41 of default_pg (train.py:88) did not complete"
    )
    assert not open_collectives(encode(dump(entry(1, retired=True))))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\x80\x04",
        pickle.dumps(dump(Evil())),
        pickle.dumps({"entries": [{"state": 1}]}),
        pickle.dumps(dump(entry("many"))),
        pickle.dumps([]),
    ],
)
def test_damage_and_objects_say_nothing_and_run_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_collectives(data) == ""
    assert not [*tmp_path.iterdir()]


def test_only_a_file_that_is_younger_than_the_worker_counts(tmp_path):
    environ = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/trace_"}
    path = dump_path(environ, 3)
    assert path == tmp_path / "trace_3"
    assert read_open_collectives(path, 0.0) == ""
    path.write_bytes(pickle.dumps(dump(entry(41))))
    os.utime(path, (100.0, 100.0))
    said = read_open_collectives(path, 99.0)
    assert said.startswith(f"torch's flight recorder ({path}): all_reduce #41")
    assert read_open_collectives(path, 101.0) == ""


def test_the_newer_name_of_the_prefix_comes_first_and_the_default_is_in_the_cache():
    both = {"TORCH_FR_DUMP_TEMP_FILE": "/a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b_"}
    assert str(dump_path(both, 0)) == "/a_0"
    assert str(dump_path({"HOME": "/h"}, 1)) == "/h/.cache/torch/comm_lib_trace_rank_1"
    cached = {"HOME": "/h", "XDG_CACHE_HOME": "/c"}
    assert str(dump_path(cached, 1)) == "/c/torch/comm_lib_trace_rank_1"
