"""The hostile tests attack real jobs, with the harness of the process tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "process"))
