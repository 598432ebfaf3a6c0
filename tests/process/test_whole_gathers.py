"""All-gathers that survivors can repeat are bitwise equal to torch's."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "whole_gathers.py"


def test_a_gather_by_a_sum_gives_the_bits_of_an_all_gather(tmp_path):
    command = [sys.executable, str(SCRIPT)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert said == ["equal\n"] * 2
