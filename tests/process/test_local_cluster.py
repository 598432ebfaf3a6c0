"""elastane.testing for its users: local clusters, planned faults, the pytest fixture."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_harness import until

from elastane.errors import UsageError
from elastane.process.files import process_start
from elastane.testing import ClusterError, Fault, FaultPlan, LocalCluster
from elastane.testing.plans import KINDS
from elastane.testing.processes import marked

pytest_plugins = ("pytester",)
LIGHT = {"preload": "json", "shutdown_timeout": 5, "nproc_per_node": 2}
# Each worker writes its rank, and runs until a file tells it to exit with 0.
SCRIPT = """\
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "600"])
part = folder / f"part.{os.getpid()}"
part.write_text(str(child.pid))
part.rename(folder / f"up.{os.getpid()}")
while not (folder / "done").exists():
    time.sleep(0.02)
child.kill()
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "work.py").write_text(SCRIPT)
    return [str(tmp_path / "work.py"), str(tmp_path)]


def test_a_cluster_forms_worlds_and_survives_its_nodes(tmp_path, script):
    options = {**LIGHT, "nnodes": "1:2", "max_restarts": 3}
    with LocalCluster(script, folder=tmp_path / "c", **options) as cluster:
        cluster.start("a"), cluster.start("b")
        first = cluster.wait_world(nodes=2)
        assert sorted(first.nodes) == ["a", "b"]
        assert {len(pids) for pids in first.pids.values()} == {2}
        with pytest.raises(UsageError, match=r"kill_worker\(2\): node b has 2 workers"):
            cluster.node("b").kill_worker(2)
        killed = cluster.node("b").kill_worker(1)
        assert killed == first.pids["b"][1]
        second = cluster.wait_world(nodes=2, after=first)
        assert second.fence == (first.round, first.attempt + 1)
        assert "SIGKILL" in cluster.wait_event("incident").reason
        cluster.node("b").kill()
        third = cluster.wait_world(nodes=1, after=second)
        assert third.nodes == ("a",) and third.round > second.round
        until(lambda: not any(map(process_start, second.pids["b"])), "the killed node's workers")
        again = cluster.start("b")
        fourth = cluster.wait_world(nodes=2, after=third)
        assert again is cluster.node("b") and again.workers() == fourth.pids["b"]
        (tmp_path / "done").touch()
        cluster.wait_done()
        mark = cluster._mark
    assert not marked(mark)


def test_a_paused_node_continues_and_a_stopped_node_ends(tmp_path, script):
    options = {**LIGHT, "nnodes": "1:2", "rdzv_conf": {"silence": 2}}
    with LocalCluster(script, folder=tmp_path / "c", **options) as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        b = cluster.start("b")
        both = cluster.wait_world(nodes=2)
        b.pause()
        alone = cluster.wait_world(nodes=1, after=both)
        b.resume()
        back = cluster.wait_world(nodes=2, after=alone)
        b.stop()
        cluster.wait_world(nodes=1, after=back)
        assert b.wait() == 143
        with pytest.raises(ClusterError, match="node b ended with exit code 143") as caught:
            (tmp_path / "done").touch()
            cluster.wait_done()
        assert "--- events" in caught.value.story and "drain-started" in caught.value.story


def test_no_process_outlives_the_context(tmp_path, script):
    with pytest.raises(RuntimeError) as caught, LocalCluster(script, **LIGHT) as cluster:
        cluster.start("a")
        pids = cluster.wait_world(nodes=1).pids["a"]
        cluster.wait(lambda: len(list(tmp_path.glob("up.*"))) == 2, "both workers work")
        children = [int(p.read_text()) for p in tmp_path.glob("up.*")]
        folder = cluster.folder
        raise RuntimeError("of the test")
    assert "--- events" in caught.value.__notes__[0]
    assert not any(map(process_start, [*pids, *children])) and len(children) == 2
    assert not folder.exists()


def test_agents_end_with_the_program_that_started_them(tmp_path, script):
    program = (
        "import os, sys\nfrom elastane.testing import LocalCluster\n"
        f"with LocalCluster({script!r}, folder={str(tmp_path / 'c')!r}, **{LIGHT!r}) as cluster:\n"
        "    cluster.start('a')\n"
        "    print(*cluster.wait_world(nodes=1).pids['a'], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    pids = list(map(int, ended.stdout.split()))
    assert len(pids) == 2
    until(lambda: not any(map(process_start, pids)), "its workers are gone too")


def test_a_wait_that_times_out_is_an_error_with_the_story(tmp_path, script):
    with LocalCluster(script, folder=tmp_path / "c", nnodes="2", **LIGHT) as cluster:
        node = cluster.start("only")
        with pytest.raises(ClusterError, match=r"not within 0.1 s: node only has workers"):
            node.kill_worker(deadline_s=0.1)
        with pytest.raises(ClusterError, match="a world of 2 nodes with workers") as caught:
            cluster.wait_event("waiting")
            cluster.wait_world(nodes=2, deadline_s=0.1)
        assert "1 of at least 2 nodes are here" in str(caught.value)


@pytest.mark.parametrize("options", [{"max_restart": 1}, {"nproc_per_node": object}])
def test_impossible_cluster_options_are_refused_before_anything_starts(options):
    with pytest.raises(UsageError):
        LocalCluster(["x.py"], **options)


def test_variables_of_the_program_that_tests_are_not_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "s.py").write_text(
        f"import os\nopen({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ)))\n"
    )
    options = {"preload": "json", "env": {"MINE": "yes"}}
    with LocalCluster([str(tmp_path / "s.py")], folder=tmp_path / "c", **options) as cluster:
        cluster.start("a", env={"THEIRS": "too"})
        cluster.wait_done()
    found = eval((tmp_path / "env").read_text())
    assert (found["MINE"], found["THEIRS"], found["RANK"]) == ("yes", "too", "0")
    assert "PET_NNODES" not in found


# Plans


def test_a_plan_is_the_same_for_the_same_seed():
    plans = [FaultPlan.random(seed, duration_s=100, every_s=2) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert {fault.kind for fault in plans[0].faults} == set(KINDS)
    gaps = [b.at_s - a.at_s for a, b in zip(plans[0].faults, plans[0].faults[1:], strict=False)]
    assert all(1.0 <= gap <= 3.0 for gap in gaps)


@pytest.mark.parametrize(
    "faults",
    [
        (Fault(2, "kill-node"), Fault(1, "kill-node")),
        (Fault(-1, "kill-node"),),
        (Fault(1, "kil-node"),),
        (Fault(1, "kill-node", 1.0),),
    ],
    ids=["disorder", "before", "kind", "pick"],
)
def test_an_impossible_plan_is_refused(faults):
    with pytest.raises(UsageError):
        FaultPlan(faults)


@pytest.mark.soak
def test_a_plan_is_carried_out_and_the_job_survives_it(tmp_path, script):
    plan = FaultPlan(tuple(Fault(0.3 * n, kind, 0.6) for n, kind in enumerate(KINDS)), back_s=0.5)
    options = {**LIGHT, "nnodes": "1:4", "max_restarts": 9, "rdzv_conf": {"gather": 0.2}}
    with LocalCluster(script, folder=tmp_path / "c", **options) as cluster:
        cluster.start("a"), cluster.start("b"), cluster.start("c")
        cluster.wait_world(nodes=3)
        told = plan.run(cluster)
        words = " ".join(told)
        assert all(kind in words for kind in KINDS if kind != "pause-node"), told
        assert words.count("comes back") >= 2
        cluster.wait_world(nodes=4)
        (tmp_path / "done").touch()
        cluster.wait(lambda: all(not node.is_alive for node in cluster.nodes), "all have ended")
        assert cluster.events("job-ended")[-1].data["ok"] is True


# pytest


def test_the_fixture_makes_clusters_and_shows_their_story_where_a_test_fails(pytester):
    pytester.makepyfile(
        """
        def test_it(local_cluster, tmp_path):
            (tmp_path / "s.py").write_text("import sys; sys.exit(5)")
            cluster = local_cluster(str(tmp_path / "s.py"), preload="json")
            cluster.start("here")
            cluster.wait_done()
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*node here ended with exit code 1*", "*local cluster 0: cluster-*"]
    )


def test_the_fixture_imports_nothing_until_it_is_used():
    code = (
        "import sys, elastane.testing.pytest_plugin\n"
        "sys.exit('elastane.testing.cluster' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
