"""A rank that makes the others wait in each step is named, with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastane.cli.main import main
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "slow_rank.py"


def test_the_step_rate_of_a_script_that_reports_no_steps_is_shown(tmp_path, capsys):
    options = {"nproc_per_node": 2, "rdzv_conf": {"heartbeat": 0.2}}
    with LocalCluster([str(SCRIPT), "even"], folder=tmp_path, **options) as cluster:
        cluster.start("a")
        cluster.wait_event("workers-started")

        measured = []

        def shown():
            assert main(["status", "--json", cluster.job]) == 0
            [job] = json.loads(capsys.readouterr().out)["jobs"]
            nodes = job["report"]["nodes"] if job["report"] else []
            measured.extend(node for node in nodes if node["steps_per_s"])
            return measured

        cluster.wait(shown, "a measured rate")
        node = measured[0]
        # Steps take 15 ms and more; a first rate, of 0.2 s, may count one that began before.
        assert node["steps_per_s"] < 100.0
        assert node["progress"] is None


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, {"in_place": True}])
@pytest.mark.parametrize(("how", "why"), [("loader", "loader"), ("sleep", "other")])
def test_a_slow_rank_of_a_script_is_named_with_its_reason(tmp_path, how, why, options):
    """Takes 5 s to 16 s, mostly for the start and the comparisons from which noise is learned."""
    given = {"nproc_per_node": 3, "rdzv_conf": {"heartbeat": 0.5}, **options}
    with LocalCluster([str(SCRIPT), how], folder=tmp_path, **given) as cluster:
        cluster.start("a")
        cluster.wait(lambda: cluster.events("straggler"), "a straggler")
        [found] = cluster.events("straggler")
        assert (found.node, found.data["rank"]) == ("a", 1), found.reason
        assert found.data["why"] == why, found.reason
