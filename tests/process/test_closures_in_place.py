"""A worker lost inside `optimizer.step(closure)` leaves the others' state bitwise right."""

from __future__ import annotations

from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "closures.py"


@pytest.mark.parametrize("kind", [pytest.param("adamw", marks=pytest.mark.soak), "lbfgs"])
def test_a_worker_lost_in_a_closure_leaves_the_others_equal_to_the_last_bit(tmp_path, kind):
    said = tmp_path / "said"
    said.mkdir()
    told = Growing(said)
    options = {"nproc_per_node": 3, "max_restarts": 10, "min_workers": 1, "tee": "0"}
    options["preload"] = PRELOAD_OPTIMIZER
    script = [str(SCRIPT), str(said), kind]
    with LocalCluster(script, folder=tmp_path / "c", **options) as cluster:
        node = cluster.start("a")

        def committed() -> dict[str, list[int]]:
            lines = told.lines().items()
            return {n: [x["step"] for x in all_ if x["what"] == "committed"] for n, all_ in lines}

        def wait(count: int) -> None:
            """Wait until three living workers have made this number of further steps."""
            begun = {pid: len(steps) for pid, steps in committed().items()}

            def there() -> bool:
                alive = {str(pid) for pid in node.workers()}
                far = [p for p, s in committed().items() if len(s) >= begun.get(p, 0) + count]
                return len(alive.intersection(far)) == 3

            cluster.wait(there, f"{count} steps more")

        wait(3)
        for _ in range(2):
            (said / "kill").touch()
            cluster.wait(lambda: not (said / "kill").exists(), "a worker dies")
            wait(3)
        (said / "enough").touch()
        assert node.wait() == 0
    digests: dict[int, set[str]] = {}
    retried = 0
    for lines in told.lines().values():
        at = -1
        for line in lines:
            if line["what"] == "begin":
                # Also of a step that is retried: it begins with what the one before it has left.
                digests.setdefault(line["step"] - 1, set()).add(line["digest"])
                retried += line["step"] == at
                at = line["step"]
            else:
                digests.setdefault(line["step"], set()).add(line["digest"])
    assert retried, "no step was retried"
    assert {step: seen for step, seen in digests.items() if len(seen) > 1} == {}
