"""What `make coverage` holds, shown on reports made up here."""

import json

import pytest
from reach import CONTROL_PLANE, PURE, Room, every_room, main, measured, rooms_of, told
from style_sources import SRC


def file(reached, there, lines=(), branches=()):
    figures = {"num_statements": there, "covered_lines": reached}
    return {
        "summary": figures | {"num_branches": 0, "covered_branches": 0},
        "missing_lines": list(lines),
        "missing_branches": [list(branch) for branch in branches],
    }


def _names():
    return [room.name for room in every_room()]


def report(**changed):
    """A report in which every room is reached in full, but for what is changed."""
    files = {f"src/{name.replace('.', '/')}/a.py": file(10, 10) for name in _names()}
    return {"files": files | changed}


def verdict(tmp_path, files):
    written = tmp_path / "reached.json"
    written.write_text(json.dumps(files))
    return main(written)


def test_rooms_are_those_that_never_import_torch_and_each_is_there():
    assert {"elastane.protocol", "elastane.coordinator.rules"} <= set(rooms_of(PURE))
    assert {"elastane.agent", "elastane.worker.drain"} <= set(rooms_of(CONTROL_PLANE))
    assert "elastane.elastic" not in _names()
    for name in _names():
        place = SRC.parent / name.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), name


@pytest.mark.parametrize(
    ("path", "reached", "holds"),
    [
        ("src/elastane/protocol/b.py", 9_999, False),
        ("src/elastane/protocol/b.py", 10_000, True),
        ("src/elastane/agent/b.py", 8_980, False),
        ("src/elastane/agent/b.py", 9_001, True),
        ("src/elastane/worker/drain.py", 8_980, False),
        ("/elsewhere/src/elastane/errors.py", 8_980, False),
        # Not of the control plane.
        ("src/elastane/worker/step.py", 0, True),
        ("src/elastane/elastic/core/b.py", 0, True),
    ],
)
def test_pure_rooms_are_reached_whole_and_others_to_nine_tenths(
    tmp_path, capsys, path, reached, holds
):
    files = report(**{path: file(reached, 10_000, lines=[7, 9], branches=[(3, 5), (4, -1)])})
    assert verdict(tmp_path, files) == (0 if holds else 1)
    miss = f"{path[path.index('elastane/') :]}: lines 7, 9; 3->5, 4->-1"
    assert (miss in capsys.readouterr().out) == (not holds)


def test_a_room_that_the_report_does_not_have_falls_short(tmp_path):
    files = report()
    del files["files"]["src/elastane/stores/a.py"]
    assert verdict(tmp_path, files) == 1


def test_branches_count_as_statements_do():
    half = file(10, 10)
    half["summary"] |= {"num_branches": 30, "covered_branches": 10}
    [room] = measured({"files": {"src/elastane/agent/a.py": half}}, [Room("elastane.agent", 90.0)])
    assert room.percent == 50


def test_the_worst_file_of_a_room_is_told_first():
    files = {f"elastane/agent/{n}.py": file(n, 10, lines=[n]) for n in (5, 2, 8)}
    [room] = measured({"files": files}, [Room("elastane.agent", 90.0)])
    short = [line.strip() for line in told([room])][1:]
    assert short == [f"elastane/agent/{n}.py: lines {n}" for n in (2, 5, 8)]
