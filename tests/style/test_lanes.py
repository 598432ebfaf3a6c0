"""`make test` runs every test file, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_file_is_in_one_lane():
    told = re.findall(
        r"^(?:PURE|LANE)_\d := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    words = " ".join(told).replace("\\\n", " ").replace("$(wildcard", "").replace(")", "").split()
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for file in files:
        lanes = [word for word in words if file.match(word) or Path(word) in file.parents]
        assert len(lanes) == 1, (file, lanes)
