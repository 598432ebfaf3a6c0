"""The example of a small GPT under plain python: it runs and learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import elastane

SCRIPT = Path(elastane.__file__).parent / "examples" / "gpt.py"


def test_the_example_runs_under_plain_python_and_learns(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dir", str(tmp_path), "--steps", "15"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert said.returncode == 0, said.stderr
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 16), 15]
    assert lines[0]["loss"] > 5.0 and lines[14]["loss"] < 4.5
    assert json.loads((tmp_path / "final.jsonl").read_text())["weights"] in said.stdout
