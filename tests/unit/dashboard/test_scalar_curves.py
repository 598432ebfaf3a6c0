"""The curves of a page are those of the newest run, and bounded for any content of the files."""

import json

from elastane.dashboard.scalars import NAMES_MAX, POINTS_MAX, ScalarReader


def wrote(folder, node, *lines):
    with (folder / f"scalars.{node}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def entry(step, **values):
    return {"step": step, "time": 1000.0 + step, **values}


def curves(reader):
    reader.read()
    return {one.name: dict(zip(one.steps, one.values, strict=True)) for one in reader.curves}


def test_files_of_several_nodes_are_one_curve_which_grows(tmp_path):
    reader = ScalarReader(tmp_path)
    wrote(tmp_path, "b", entry(3, loss=0.3), entry(4, loss=0.2))
    wrote(tmp_path, "a", entry(1, loss=0.5), entry(2, loss=0.4, accuracy=0.9))
    assert curves(reader) == {"loss": {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2}, "accuracy": {2: 0.9}}
    wrote(tmp_path, "a", entry(4, loss=9.0), entry(5, loss=0.1))
    assert curves(reader)["loss"] == {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2, 5: 0.1}


def test_another_run_replaces_the_curves(tmp_path):
    reader = ScalarReader(tmp_path)
    wrote(tmp_path, "a", entry(1, loss=0.5), entry(2, old=0.4))
    wrote(tmp_path, "a", {**entry(1, loss=0.7), "time": 2000.0})
    assert curves(reader) == {"loss": {1: 0.7}}


def test_a_long_curve_has_a_bound_and_keeps_its_ends(tmp_path):
    reader = ScalarReader(tmp_path)
    wrote(tmp_path, "a", *(entry(step, loss=step) for step in range(1, 10_001)))
    found = curves(reader)["loss"]
    assert POINTS_MAX / 2 <= len(found) <= POINTS_MAX
    assert min(found) < 100 and max(found) == 10_000
    gaps = [b - a for a, b in zip([*found], [*found][1:-1], strict=False)]
    assert len({*gaps}) == 1, "evenly"


def test_names_have_a_bound_and_what_is_no_number_is_left_out(tmp_path):
    reader = ScalarReader(tmp_path)
    many = {f"n{number}": number for number in range(NAMES_MAX + 10)}
    wrote(tmp_path, "a", entry(1, text="x", some=[1], bad="NaN", **many))
    found = curves(reader)
    assert len(found) == NAMES_MAX and "text" not in found and found["bad"] == {1: None}


def test_lines_that_are_no_entries_are_skipped_and_a_torn_one_is_read_later(tmp_path):
    reader = ScalarReader(tmp_path)
    path = tmp_path / "scalars.a.jsonl"
    path.write_bytes(b'\xff\n[]\n{"step": -1, "time": 1}\n{"step": "1", "time": 1}\n')
    with path.open("ab") as file:
        file.write(b'{"step": 1, "ti')
    assert curves(reader) == {}
    with path.open("ab") as file:
        file.write(b'me": 1, "loss": 0.5}\n')
    assert curves(reader) == {"loss": {1: 0.5}}
