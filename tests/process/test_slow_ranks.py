"""A rank that makes the others wait in each step is named, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "slow_rank.py"


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, {"in_place": True}])
@pytest.mark.parametrize(("how", "why"), [("loader", "loader"), ("sleep", "other")])
def test_a_slow_rank_of_a_script_is_named_with_its_reason(tmp_path, how, why, options):
    """5 s to 16 s, most of them the start and the comparisons after which a noise is known."""
    given = {"nproc_per_node": 3, "rdzv_conf": {"heartbeat": 0.5}, **options}
    with LocalCluster([str(SCRIPT), how], folder=tmp_path, **given) as cluster:
        cluster.start("a")
        cluster.wait(lambda: cluster.events("straggler"), "a straggler")
        [found] = cluster.events("straggler")
        assert (found.node, found.data["rank"]) == ("a", 1), found.reason
        assert found.data["why"] == why, found.reason
