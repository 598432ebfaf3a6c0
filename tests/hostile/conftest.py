"""The hostile tests play against real jobs: they share the process tests' harness."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "process"))
