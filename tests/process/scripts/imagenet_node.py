"""Runs an example in the folder of its node, NODE_FOLDER: paths of its arguments are from there.

Where there is a file PACE, its workers go no further than to the step whose number it holds.

    imagenet_node.py SCRIPT ARGUMENTS
"""

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path


def keep_pace(ledger, pace):
    """Let workers wait after they have written a step."""
    did = ledger.did

    def did_and_waits(self, place, samples, loss):
        did(self, place, samples, loss)
        with contextlib.suppress(FileNotFoundError):
            while place["step"] >= int(pace.read_text()):
                time.sleep(0.01)

    ledger.did = did_and_waits


if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0].endswith("train_in_place.py"):
        import uncompiled  # noqa: F401
    sys.path[0] = os.path.dirname(sys.argv[0])
    from common import Ledger

    keep_pace(Ledger, Path(os.environ["PACE"]))
    os.makedirs(os.environ["NODE_FOLDER"], exist_ok=True)
    os.chdir(os.environ["NODE_FOLDER"])
    runpy.run_path(sys.argv[0], run_name="__main__")
