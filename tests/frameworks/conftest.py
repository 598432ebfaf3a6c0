"""The agents of real frameworks start with a warm zygote, as those of tests/process do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "process"))

import warm_start

from elastane.testing import processes

processes.start = warm_start.start
