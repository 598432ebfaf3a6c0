"""The files for the project's host: they can be read, and the commands that they run exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / ".github").rglob("*.yml"),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_developers_run(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    matrix = [
        target
        for job in jobs
        for target in job.get("strategy", {}).get("matrix", {}).get("target", [])
    ]
    made = {*re.findall(r"^make ([a-z-]+)", "\n".join(commands), re.MULTILINE), *matrix}
    assert made or ".ci/run" in commands
    assert made <= TARGETS
    permitted = yaml.safe_load(path.read_text())["permissions"]
    assert permitted == {"contents": "read"}
