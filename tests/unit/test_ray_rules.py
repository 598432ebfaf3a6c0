"""Agents on the nodes of a Ray cluster: where they start, and what their ends mean."""

import pytest

from elastane.errors import UsageError
from elastane.ray import rules
from elastane.ray.rules import Placement, RayDrain, RayNode, drains_of, is_final, nodes_of

LARGE = {"CPU": 8.0, "GPU": 2.0}


def node(name, *, free=None, **resources):
    resources = resources or LARGE
    return RayNode(name, f"10.0.0.{name}", resources, resources if free is None else free)


def placed(placement, nodes, now_s=0.0):
    return [one.node_id for one in placement.due(nodes, now_s)]


def test_each_node_that_is_large_enough_gets_one_agent_up_to_the_most():
    placement = Placement(2, {"CPU": 4.0, "GPU": 2.0})
    nodes = [node("1", CPU=2.0, GPU=2.0), node("2"), node("3", CPU=8.0), node("4"), node("5")]
    assert placed(placement, nodes) == ["2", "4"]
    assert placed(placement, nodes) == []


def test_a_node_whose_resources_are_in_use_keeps_no_other_from_its_place():
    placement = Placement(1, {"CPU": 4.0, "GPU": 1.0})
    busy = node("1", free={"CPU": 8.0})
    assert placement.is_large_enough(busy)
    assert placed(placement, [busy]) == []
    assert placed(placement, [busy, node("2")]) == ["2"]


def test_nodes_that_are_gone_are_forgotten():
    placement = Placement(1, {})
    for name in map(str, range(9)):
        assert placed(placement, [node(name)]) == [name]
        placement.ended(name, None, 0.0)
    assert len(placement._trials) == 1


def test_a_lost_agent_is_replaced_elsewhere_at_once_and_on_its_node_after_a_while():
    placement = Placement(1, {"CPU": 1.0})
    assert placed(placement, [node("1")]) == ["1"]
    placement.ended("1", None, 10.0)
    assert placed(placement, [node("1")], 10.0) == []
    assert placed(placement, [node("1"), node("2")], 10.0) == ["2"]
    placement.ended("2", 75, 10.1)
    assert placed(placement, [node("1")], 10.0 + rules.RETRY_S) == ["1"]


def test_waits_for_a_node_double_until_an_agent_lived_for_long():
    placement = Placement(1, {})
    now_s, waits = 0.0, []
    for _ in range(8):
        assert placed(placement, [node("1")], now_s) == ["1"]
        placement.ended("1", -9, now_s)
        began_s = now_s
        while not placed(placement, [node("1")], now_s):
            now_s += 1.0
        waits.append(now_s - began_s)
        placement._running.clear()
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    placed(placement, [node("1")], now_s)
    placement.ended("1", 137, now_s := now_s + rules.GOOD_S + 1)
    assert placed(placement, [node("1")], now_s + rules.RETRY_S) == ["1"]


def test_an_unfit_node_is_left_out_for_long():
    placement = Placement(1, {})
    placed(placement, [node("1")])
    placement.ended("1", 69, 0.0)
    assert placed(placement, [node("1")], rules.UNFIT_S - 1) == []
    assert placed(placement, [node("1")], rules.UNFIT_S) == ["1"]


@pytest.mark.parametrize(
    ("codes", "code"), [([0], 0), ([1, 0], 1), ([0, 78], 78), ([None, 0], 0), ([75, 1], 1)]
)
def test_the_first_failure_that_ends_the_job_is_its_code(codes, code):
    placement = Placement(3, {})
    placed(placement, [node("1"), node("2"), node("3")])
    for name, ended in zip("12", codes, strict=False):
        placement.ended(name, ended, 5.0)
    assert placement.code == code
    assert placed(placement, [node("4")], 99.0) == [], "no agent starts after the end of the job"


@pytest.mark.parametrize("code", [None, -9, -15, 69, 75, 137, 143])
def test_lost_drained_and_unfit_agents_do_not_end_the_job(code):
    assert not is_final(code)


def test_dead_nodes_are_not_listed():
    listed = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": LARGE, "Alive": True},
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Resources": {}, "Alive": False},
    ]
    free = {"a": {"CPU": 1.0}}
    assert nodes_of(listed, free, {}) == [RayNode("a", "10.0.0.1", LARGE, {"CPU": 1.0})]


def test_a_node_that_ray_drains_gets_no_agent():
    listed = [
        {"NodeID": name, "NodeManagerAddress": "h", "Resources": LARGE, "Alive": True}
        for name in "abc"
    ]
    free = dict.fromkeys("abc", LARGE)
    drains = drains_of({"a": 5000, "b": 0, "gone": 7000}, now_s=2.0)
    nodes = nodes_of(listed, free, drains)
    assert [one.drain for one in nodes] == [RayDrain(3.0), RayDrain(None), None]
    assert drains_of({"a": 5000}, now_s=9.0) == {"a": RayDrain(0.0)}
    assert placed(Placement(3, {"CPU": 1.0}), nodes) == ["c"]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Return what `elastane ray` with these words asks of the job, without a cluster."""
    from elastane.cli.main import run_verb
    from elastane.ray import job

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = []
    monkeypatch.setattr(job, "run_job", lambda request: found.append(request) or 0)

    def ask(*words):
        assert run_verb("ray", [*words], "elastane ray") == 0
        return found.pop()

    return ask


def test_ray_reserves_what_the_workers_need(asked):
    assert asked("train.py").need == {"CPU": 1.0}
    request = asked("--nnodes", "1:4", "--gpus-per-node", "8", "train.py", "--lr", "1")
    assert request.need == {"CPU": 8.0, "GPU": 8.0}
    words = request.words
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert words[-3:] == ("train.py", "--lr", "1")
    assert (request.config.spec.min_nodes, request.config.spec.max_nodes) == (1, 4)
    assert request.config.spec.job == words[words.index("--rdzv-id") + 1] != "none"
    more = asked(
        "--cpus-per-node=96", "--resources=TPU=4,a=0.5", "--nproc-per-node=cpu", "train.py"
    )
    assert more.need == {"CPU": 96.0, "TPU": 4.0, "a": 0.5}
    assert more.config.node.local_world_size == 96


def test_the_secret_of_the_job_goes_to_the_agents_by_their_environment(asked, monkeypatch):
    monkeypatch.setenv("ELASTANE_TOKEN", "a" * 32)
    request = asked("train.py")
    assert request.environ["ELASTANE_TOKEN"] == request.config.rendezvous.token == "a" * 32
    assert "a" * 32 not in " ".join(request.words)


def test_agents_get_the_values_of_the_settings_file_and_flags_that_are_off_have_no_word(
    asked, monkeypatch, tmp_path
):
    settings = tmp_path / "conf" / "of_the_job.toml"
    settings.parent.mkdir()
    settings.write_text('[run]\nnnodes = "2:4"\nin-place = true\n')
    monkeypatch.setenv("ELASTANE_CONFIG", str(settings))
    monkeypatch.setenv("PET_STANDALONE", "0")
    request = asked("train.py")
    words = request.words
    assert words[words.index("--nnodes") + 1] == "2:4" and "--in-place" in words
    assert request.config.spec.max_nodes == 4
    assert not {"--config", "--standalone"} & {*words}
    assert "ELASTANE_CONFIG" not in request.environ
    monkeypatch.setenv("ELASTANE_IN_PLACE", "0")
    assert "--in-place" not in asked("train.py").words


def test_sources_of_notices_go_to_the_agents_by_their_environment(asked, monkeypatch):
    """There the actor of an agent adds its own."""
    request = asked("--notices", "file:/run/going", "train.py", "--notices", "the script's")
    assert request.environ["ELASTANE_NOTICES"] == "file:/run/going"
    assert request.words[-3:] == ("train.py", "--notices", "the script's")
    assert "--notices" not in request.words[:-3]
    monkeypatch.setenv("ELASTANE_NOTICES", "aws")
    assert asked("train.py").environ["ELASTANE_NOTICES"] == "aws"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rdzv-endpoint", "host:1", "train.py"], "--rdzv-endpoint"),
        (["--standalone", "train.py"], "--standalone"),
        (["--node-rank", "1", "train.py"], "--node-rank"),
        (["--rdzv-backend", "etcd", "train.py"], "--rdzv-backend etcd"),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node gpu"),
        (["--nproc-per-node", "auto", "train.py"], "--nproc-per-node auto"),
        (["--gpus-per-node", "many", "train.py"], "--gpus-per-node"),
        (["--resources", "TPU", "train.py"], "--resources"),
        (["--resources", "GPU=1", "train.py"], "--resources"),
        (["nowhere.py"], "nowhere.py"),
    ],
)
def test_options_that_have_no_place_are_refused_by_name(asked, words, named):
    with pytest.raises(UsageError, match=named) as caught:
        asked(*words)
    assert caught.value.next_step
