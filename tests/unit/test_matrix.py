"""`make matrix`: which torch it takes, what it leaves out without one, and what its table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matrix


def report(*names: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


def test_a_cuda_build_of_torch_is_not_taken() -> None:
    assert matrix.torch_fault(report("torch", "sympy")) == ""
    found = matrix.torch_fault(report("torch", "sympy", "nvidia-cublas", "cuda-bindings"))
    assert found == "torch: the wheel for it is a CUDA build, of 4 packages"
    assert matrix.torch_fault(report()) == "", "it is installed already"


def test_a_python_is_found_by_the_version_that_it_says() -> None:
    found = matrix.find_python("{}.{}".format(*sys.version_info[:2]))
    assert found is not None
    assert matrix.find_python("3.99") is None


def test_the_table_says_what_ran_and_what_could_not() -> None:
    ran = matrix.Row("3.12", passed=40, skipped=2, left_out=7, why="no torch")
    absent = matrix.Row("3.14", why="this Python is not on the machine")
    lines = matrix.table([ran, absent]).splitlines()
    assert lines[2:] == [
        "| 3.12 | - | 40 | 0 | 2 | 7 | no torch |",
        "| 3.14 | - | 0 | 0 | 0 | 0 | this Python is not on the machine |",
    ]


def test_the_reason_names_the_requirements_that_conflict() -> None:
    out = (
        "Collecting a\n\nThe conflict is caused by:\n    The user requested b<2\n"
        "    a 1.0 depends on b==3\n\nTo fix this you could try to:\n1. loosen\n"
    )
    err = "ERROR: Cannot install a\nERROR: ResolutionImpossible: for help visit x\n"
    assert matrix.reason(out, err) == "The user requested b<2; a 1.0 depends on b==3"
    none = "ERROR: No matching distribution found for torch==9\n[notice] A new release of pip\n"
    assert matrix.reason("Looking in indexes\n", none) == none.splitlines()[0]
    assert matrix.reason("", "") == "no reason given"


def test_without_torch_its_tests_are_left_out_and_others_still_fail(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (tmp_path / "test_importing.py").write_text(missing)
    (tmp_path / "test_others.py").write_text(
        "import pytest\n"
        f"def test_importing():\n    {missing}"
        "@pytest.mark.torch\ndef test_starting():\n    assert False\n"
        "def test_failing():\n    assert False\n"
        "def test_passing():\n    pass\n"
    )
    shared = str(Path(matrix.__file__).parent)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {shared}\nmarkers = torch\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "without_torch"]
    done = subprocess.run(
        [*words, f"--left-out={tmp_path / 'left'}", "."],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "1 failed, 1 passed, 3 skipped" in done.stdout, done.stdout
    assert (tmp_path / "left").read_text() == "test_importing.py\n"
    assert done.returncode == 1
