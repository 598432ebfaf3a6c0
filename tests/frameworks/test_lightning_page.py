"""docs/lightning.md: its script and its command survive the kills that the page asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text("utf-8")
SCRIPT = next(re.finditer(r"```python\n# train.py\n(.*?)```", PAGE, re.DOTALL))[1]
COMMAND = next(re.finditer(r"^elastane (run .*?)$\n^elastane", PAGE, re.DOTALL | re.MULTILINE))[1]
_LINE = re.compile(r"rank (\d+) of (\d+): step (\d+)")
EPOCHS, STEPS = 4, 64 * 4
DEADLINE_S = 240.0


@pytest.mark.soak
def test_the_script_of_the_page_survives_kills(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("max_epochs=10", f"max_epochs={EPOCHS}"))
    output = tmp_path / "output"
    words = COMMAND.replace("\\\n", "").split()
    # A job is found by its name: in this folder there is no other.
    environ = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    program = [sys.executable, "-m", "elastane"]
    with output.open("wb") as sink:
        job = subprocess.Popen(
            [*program, *words], cwd=tmp_path, env=environ, stdout=sink, stderr=subprocess.STDOUT
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while "rank 0 of 2: step" not in output.read_text():
            assert job.poll() is None and time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.1)
        kill = [*program, "chaos", "run7", "--kill-worker", "--every=2", "--duration=3"]
        subprocess.run(kill, check=True, env=environ, capture_output=True, timeout=DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, output.read_text()
    finally:
        job.kill()
        job.wait()
    told = output.read_text()
    seen = [(int(rank), int(world), int(step)) for rank, world, step in _LINE.findall(told)]
    steps = [step for rank, _, step in seen if rank == 0]
    assert steps == list(range(0, STEPS, 20)), told
    assert "replacement:" in told and {world for _, world, _ in seen} >= {2}
