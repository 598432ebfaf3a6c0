"""A fault plan for a cluster that changes while the plan reads it."""

import subprocess
from types import SimpleNamespace

from elastane.testing import FaultPlan
from elastane.testing.plans import Fault


def test_a_worker_is_killed_even_if_its_world_was_replaced_meanwhile():
    worker = subprocess.Popen(["sleep", "600"])
    try:
        looks = iter([(worker.pid,)])
        node = SimpleNamespace(name="a", is_alive=True, workers=lambda: next(looks, ()))
        cluster = SimpleNamespace(nodes=[node], events=lambda kind: [])
        (told,) = FaultPlan((Fault(0.0, "kill-worker", 0.0),)).run(cluster)
        assert worker.wait(10) == -9
    finally:
        worker.kill()
        worker.wait()
    assert told.endswith(f"kill-worker {worker.pid} of a")
