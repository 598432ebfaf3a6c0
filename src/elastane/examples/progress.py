"""Progress files of the examples that recover in place: a line a step, and one at the end."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from torch import nn

import elastane
from elastane.examples.digits import SLOW_DOWN, SLOW_STEP_S


class ProgressFiles:
    """Files to which rank 0 appends a JSON line for each step, and each worker one at its end."""

    def __init__(self, path: Path, job: elastane.Job, total_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.job, self.total_steps = path, job, total_steps

    def report(self, **values: float) -> None:
        """Append one line, on rank 0 only."""
        if self.job.rank == 0:
            about = {"total_steps": self.total_steps, "world_size": self.job.world_size}
            about |= {"pid": os.getpid(), "round": self.job.fence.round}
            self._append(self.path, {"time": time.time(), **values, **about})
            if self.path.with_name(SLOW_DOWN).exists():
                time.sleep(SLOW_STEP_S)

    def end(self, net: nn.Module) -> str:
        """Append this worker's end; return the hash of the weights."""
        weights = fingerprint(net)
        about = {"pid": os.getpid(), "rank": self.job.rank, "steps": self.job.committed}
        self._append(self.path.with_name("final.jsonl"), {"weights": weights, **about})
        return weights

    @staticmethod
    def _append(path: Path, line: dict[str, object]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def fingerprint(net: nn.Module) -> str:
    """Return the SHA-256 of all weights, as hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
