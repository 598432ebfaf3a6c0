"""The code of docs/testing.md does what the page describes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastane.testing import FaultPlan, LocalNode
from elastane.testing.plans import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text("utf-8")
FIRST, PLAN, FIXTURE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Longer than the page's faults between two of its starts.
SCRIPT = "import time\ntime.sleep(4)\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("ELASTANE_PRELOAD", "json")

    def run(*words: str) -> str:
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def light(code: str) -> str:
    """The page's code, with agents that start faster and run for a shorter time."""
    code = code.replace("LocalCluster([", 'LocalCluster(preload="json", script=[')
    return code.replace("duration_s=30, every_s=3", "duration_s=4, every_s=1")


def test_the_first_example_runs_to_its_end(run):
    run("-c", light(FIRST))


def test_the_plan_reports_what_it_did(run):
    told = run("-c", light(PLAN)).splitlines()
    assert told and all(re.match(r"\d+\.\d s: ", line) for line in told)


def test_the_pytest_example_passes(run, tmp_path):
    code = FIXTURE.replace('local_cluster("train.py"', 'local_cluster("train.py", preload="json"')
    (tmp_path / "test_train.py").write_text(code)
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py")


def test_names_and_kinds_of_the_page_are_those_of_the_code():
    methods = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
    for method in re.findall(r"(\w+)\(", " ".join(methods)):
        assert hasattr(LocalNode, method), method
    told = re.search(r"Kinds are\n(.*?);", PAGE, re.DOTALL)
    assert told and set(re.findall(r"`([a-z-]+)`", told[1])) == set(KINDS)
    assert (FaultPlan(()).back_s, FaultPlan(()).keep) == (2.0, 1)
