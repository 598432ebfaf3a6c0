"""The environment of a Slurm step: the configuration that it gives, and refused values."""

import pytest

from elastane.errors import ConfigurationError
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.options.show import as_lines
from elastane.slurm.hostlist import HOSTS_MAX, expand
from elastane.slurm.secret import token_of
from elastane.slurm.step import find, read_step

LOSS = (
    "srun starts no lost agent again, so a lost node ends the job after 60 s"
    " (--nnodes 1:4 continues without it)"
)


def step(node=1, **more):
    """Return the variables of a task of `srun -N4 --ntasks-per-node=1`, as in Slurm 22.05."""
    return {
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "SLURM_JOB_NODELIST": "n[1-8]",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURMD_NODENAME": f"n{node + 1}",
    } | more


def found(words=(), **more):
    return find(parse([*words, __file__], {}), step(**more))


def value(result, dest):
    return result.options.text(dest)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[001-003,7],m[1-2]x", ["n001", "n002", "n003", "n7", "m1x", "m2x"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
        ("gpu-a.lab.org,gpu-b.lab.org", ["gpu-a.lab.org", "gpu-b.lab.org"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("[1-2]", ["1", "2"]),
        ("n[5]", ["n5"]),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text, hosts):
    assert list(expand(text, "SLURM_NODELIST")) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "n[1-", "n]1", "n[]", "n[a-b]", "n[2-1]", "n1,,n2", "n1,", ",n1", "n[1-2]]", "n 1",
     "n[[1]]", "n[1--2]", f"n[0-{HOSTS_MAX}]", "n[0-999]m[0-999]", "n[0-99999999999999999999]"],
)  # fmt: skip
def test_a_damaged_or_endless_node_list_is_refused(text):
    with pytest.raises(ConfigurationError, match="SLURM_NODELIST") as refused:
        expand(text, "SLURM_NODELIST")
    assert refused.value.slug == "slurm-environment" and refused.value.next_step


@pytest.mark.parametrize(
    ("address", "pattern", "topology"),
    [
        ("s0.s2.n2", "switch.switch.node", "s0/s2/n2"),
        ("block3.n2.lab.org", "block.node", "block3/n2.lab.org"),
        ("n2", "node", ""),
        ("", "switch.node", ""),
        ("s0..n2", "switch.switch.node", ""),
    ],
)
def test_the_switches_above_a_node_are_its_topology(address, pattern, topology):
    addressed = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert value(found(**addressed), "topology") == topology
    assert value(found(["--topology", "r1"], **addressed), "topology") == "r1"


def test_a_step_says_size_place_name_and_rank():
    result = found()
    assert value(result, "nnodes") == "4"
    assert value(result, "rdzv_endpoint") == "n1:20123"
    assert value(result, "rdzv_id") == "slurm-123"
    assert value(result, "node_rank") == "1"
    assert value(result, "node_id") == "n2"
    assert value(result, "nproc_per_node") == "1"
    assert value(result, "rdzv_conf") == "rejoin_timeout=60,is_host=false"
    assert result.needs_token and result.note == ""
    assert found(node=0).note == f"Slurm job 123: 4 nodes, rendezvous at n1:20123; {LOSS}"
    assert value(found(node=0), "rdzv_conf") == "rejoin_timeout=60,is_host=true"


def test_a_step_determines_the_configuration():
    config = build(found().options, step(ELASTANE_TOKEN="s"))
    assert (config.spec.job, config.spec.min_nodes, config.spec.max_nodes) == ("slurm-123", 4, 4)
    where = config.rendezvous
    assert (where.backend, where.host, where.port, where.hosts) == ("elastane", "n1", 20123, False)
    assert (config.node.node_id, config.node.node_rank) == ("n2", 1)
    assert "SIGTERM" in config.repeated_signals and "SIGINT" not in config.repeated_signals
    assert build(parse(["--standalone", __file__], {}), {}).repeated_signals == ()


def test_gpus_of_the_node_are_workers():
    assert value(found(SLURM_GPUS_ON_NODE="8"), "nproc_per_node") == "8"
    assert value(found(["--nproc-per-node", "2"], SLURM_GPUS_ON_NODE="8"), "nproc_per_node") == "2"
    assert value(found(SLURM_GPUS_ON_NODE="0"), "nproc_per_node") == "1"


def test_steps_and_requeues_have_ports_and_names_of_their_own():
    first, second = found(), found(SLURM_STEP_ID="1")
    again = found(node=0, SLURM_RESTART_COUNT="1")
    ports = {value(each, "rdzv_endpoint") for each in (first, second, again)}
    assert len(ports) == 3
    assert value(second, "rdzv_id") == "slurm-123.1"
    assert value(again, "rdzv_id") == "slurm-123.r1"
    assert value(found(SLURM_STEP_ID="1", SLURM_RESTART_COUNT="2"), "rdzv_id") == "slurm-123.1.r2"
    assert "123, requeued once: 4 nodes" in again.note
    assert "requeued 2 times" in found(node=0, SLURM_RESTART_COUNT="2").note


def test_ports_stay_in_their_range():
    for job in ("1", "9999", "4294967294"):
        result = found(SLURM_JOB_ID=job, SLURM_STEP_ID="77", SLURM_RESTART_COUNT="500")
        port = int(value(result, "rdzv_endpoint").partition(":")[2])
        assert 20_000 <= port < 30_000


def test_a_task_of_an_array_is_named_as_slurm_names_it():
    array = {"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "3"}
    result = found(node=0, **array)
    assert value(result, "rdzv_id") == "slurm-120_3"
    assert result.note.startswith("Slurm job 120_3: 4 nodes")


def test_a_job_of_a_fixed_size_waits_for_a_lost_node_for_a_minute_and_says_so():
    config = build(found().options, step(ELASTANE_TOKEN="s"))
    assert config.spec.timing.lost_wait_s == 60.0 < config.spec.timing.join_timeout_s
    elastic = found(["--nnodes", "2:4"], node=0)
    assert "rejoin_timeout=60" in value(elastic, "rdzv_conf") and LOSS[:20] not in elastic.note
    for own in ("join_timeout=900", "rejoin_timeout=5"):
        mine = found(["--rdzv-conf", own], node=0)
        assert "rejoin_timeout=60" not in value(mine, "rdzv_conf") and LOSS[:20] not in mine.note


def test_one_node_has_no_rendezvous():
    one = {"SLURM_STEP_NODELIST": "n7", "SLURM_STEP_NUM_NODES": "1"}
    result = found(node=0, SLURM_STEP_TASKS_PER_NODE="1", SLURMD_NODENAME="n7", **one)
    assert result.note == "Slurm job 123: 1 node" and not result.needs_token
    config = build(result.options, {})
    assert config.rendezvous.backend == "standalone" and config.spec.job == "slurm-123"


def test_the_node_that_serves_is_found_by_name_where_names_are_known():
    arbitrary = {"SLURM_STEP_NODELIST": "n[3,1-2,4]", "SLURMD_NODENAME": "n3"}
    assert value(found(node=2, **arbitrary), "rdzv_conf") == "rejoin_timeout=60,is_host=true"
    unnamed = found(node=0, SLURMD_NODENAME="")
    assert (
        value(unnamed, "rdzv_conf") == "rejoin_timeout=60,is_host=true"
        and value(unnamed, "node_id") == ""
    )


def test_the_users_settings_override_those_of_the_step():
    result = found(["--nnodes", "1:4", "--rdzv-id", "mine", "--node-id", "x"])
    assert value(result, "nnodes") == "1:4"
    assert (value(result, "rdzv_id"), value(result, "node_id")) == ("mine", "x")
    assert value(found(["--rdzv-conf", "is_host=1"]), "rdzv_conf") == "is_host=1,rejoin_timeout=60"
    assert value(found(["--rdzv-conf", "join_timeout=9"]), "rdzv_conf") == (
        "join_timeout=9,is_host=false"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["--rdzv-endpoint", "head:29500"],
        ["--rdzv-endpoint", "head:29500", "--rdzv-backend", "c10d"],
        ["--master-addr", "head", "--nnodes", "4"],
        ["--rdzv-backend", "static"],
        ["--rdzv-backend", "someone-elses"],
        ["--nnodes", "1"],
    ],
)
def test_nothing_changes_where_the_user_says_where_to_meet(words):
    options = parse([*words, __file__], {})
    result = find(options, step(SLURM_STEP_TASKS_PER_NODE="8(x4)"))
    assert result.options is options and result.note == "" and result.step is None


def test_nothing_changes_outside_a_step():
    options = parse([__file__], {})
    for environ in ({}, step(TORCHELASTIC_RUN_ID="of-a-worker"), step(SLURM_PTY_PORT="4711")):
        assert find(options, environ).options is options
    batch = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1"}
    assert find(options, batch).note == ""


def test_a_batch_script_without_srun_gets_a_note_that_it_uses_one_node():
    batch = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0"}
    options = parse([__file__], {})
    result = find(options, batch)
    assert result.options is options and "has 4 nodes" in result.note and "srun" in result.note
    assert find(parse(["--standalone", __file__], {}), batch).note == ""
    assert find(options, batch | {"SLURM_PTY_PORT": "1"}).note == ""


def test_a_store_keeps_its_place_and_gets_the_rest():
    words = ["--rdzv-backend", "file", "--rdzv-endpoint", "/shared/elastane"]
    result = found(words, node=0)
    assert value(result, "rdzv_endpoint") == "/shared/elastane"
    assert (value(result, "nnodes"), value(result, "rdzv_id")) == ("4", "slurm-123")
    assert value(result, "rdzv_conf") == "rejoin_timeout=60" and not result.needs_token
    assert value(found(words, SLURM_RESTART_COUNT="3"), "rdzv_id") == "slurm-123"
    assert result.note == f"Slurm job 123: 4 nodes, rendezvous at /shared/elastane; {LOSS}"


@pytest.mark.parametrize(
    ("tasks", "slug"),
    [("8(x4)", "slurm-tasks"), ("2,1(x3)", "slurm-tasks"), ("one", "slurm-environment")],
)
def test_several_agents_on_one_node_are_refused(tasks, slug):
    with pytest.raises(ConfigurationError, match="SLURM_STEP_TASKS_PER_NODE") as refused:
        found(SLURM_STEP_TASKS_PER_NODE=tasks)
    assert refused.value.slug == slug
    assert slug != "slurm-tasks" or "--ntasks-per-node=1" in refused.value.next_step


def test_more_nodes_than_the_step_has_are_refused():
    with pytest.raises(ConfigurationError, match="--nnodes 5 in a Slurm step of 4 nodes") as error:
        found(["--nnodes", "5"])
    assert error.value.slug == "slurm-nodes"
    with pytest.raises(ConfigurationError, match="of 1 node"):
        found(["--nnodes", "2"], node=0, SLURM_STEP_NODELIST="n1", SLURM_STEP_NUM_NODES="1")
    assert value(found(["--nnodes", "2:9"]), "nnodes") == "2:9"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES"),
        ({"SLURM_STEP_NODELIST": "n[1,1,2,3]"}, "SLURM_STEP_NUM_NODES"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID is not set"),
        ({"SLURM_JOB_ID": "x" * 500}, "SLURM_JOB_ID"),
        ({"SLURM_RESTART_COUNT": "-1"}, "SLURM_RESTART_COUNT"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused_by_name(changed, named):
    with pytest.raises(ConfigurationError, match=named) as refused:
        read_step(step() | changed)
    assert refused.value.slug == "slurm-environment" and len(str(refused.value)) < 700


def test_the_origin_of_each_value_is_shown():
    shown = "\n".join(as_lines(found().options, {}))
    assert "Slurm SLURM_STEP_NODELIST" in shown and "Slurm SLURM_JOB_ID" in shown


def test_all_nodes_of_a_run_have_one_token_and_each_run_another(tmp_path):
    environ = {"HOME": str(tmp_path)}
    first = token_of(read_step(step(node=0)), environ)
    assert len(first) == 64 and first == token_of(read_step(step(node=3)), environ)
    others = [step(SLURM_RESTART_COUNT="1"), step(SLURM_STEP_ID="1"), step(SLURM_JOB_ID="124")]
    assert len({first, *(token_of(read_step(each), environ) for each in others)}) == 4
    key = tmp_path / ".config" / "elastane" / "slurm-key"
    assert key.stat().st_mode & 0o777 == 0o600 and first not in key.read_text()
    assert [path.name for path in key.parent.iterdir()] == ["slurm-key"]
    elsewhere = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "x")}
    assert token_of(read_step(step()), elsewhere) != first


def test_the_first_of_two_keys_counts(tmp_path, monkeypatch):
    from elastane.slurm import secret

    key = tmp_path / ".config" / "elastane" / "slurm-key"
    key.parent.mkdir(parents=True)

    def beaten(source, target):
        key.touch(mode=0o600)
        key.write_text("ab" * 32)
        raise FileExistsError(target)

    monkeypatch.setattr(secret.os, "link", beaten)
    token = token_of(read_step(step()), {"HOME": str(tmp_path)})
    assert token == token_of(read_step(step(node=2)), {"HOME": str(tmp_path)})


def test_without_a_home_there_is_no_token(tmp_path):
    (tmp_path / ".config").touch()
    assert token_of(read_step(step()), {"HOME": str(tmp_path)}) == ""
    assert token_of(read_step(step()), {}) == ""


@pytest.mark.parametrize(("text", "mode"), [("ab" * 32, 0o640), ("short", 0o600)])
def test_a_key_that_is_readable_by_others_or_missing_is_refused(tmp_path, text, mode):
    key = tmp_path / ".config" / "elastane" / "slurm-key"
    key.parent.mkdir(parents=True)
    key.touch(mode=mode)
    key.chmod(mode)
    key.write_text(text)
    with pytest.raises(ConfigurationError, match="slurm-key") as refused:
        token_of(read_step(step()), {"HOME": str(tmp_path)})
    assert text not in str(refused.value)
