"""The environment of a worker: torchrun's contract, elastane's additions, and secrets."""

from dataclasses import replace

import msgspec
import pytest

from elastane.errors import ConfigurationError
from elastane.process.worker_environment import (
    RunFacts,
    WorkerFacts,
    place_variables,
    why_without_place,
    worker_args,
    worker_environment,
)
from elastane.protocol.model import Assignment, Fence

ASSIGNMENT = Assignment(
    fence=Fence(3, 1),
    node_rank=1,
    nodes=2,
    rank_base=4,
    world_size=6,
    role_rank_base=1,
    role_world_size=3,
    master_addr="10.0.0.1",
    master_port=40001,
    agent_store=True,
    restarts_used=2,
    max_restarts=5,
    reason="test",
)
RUN = RunFacts(job="digits-1", node_id="host-a", role="trainer", local_world_size=2)


def env(base=None, local_rank=1, **changes):
    worker = WorkerFacts(
        local_rank=local_rank, error_file="/logs/error.json", page_fd=7, process_mark="abc"
    )
    return worker_environment(base or {}, ASSIGNMENT, replace(RUN, **changes), worker)


def test_every_variable_that_torchrun_sets_is_set():
    assert (
        env().items()
        >= {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "GROUP_RANK": "1",
            "ROLE_RANK": "2",
            "ROLE_NAME": "trainer",
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "6",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "40001",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "5",
            "TORCHELASTIC_RUN_ID": "digits-1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": "1",
        }.items()
    )


def test_elastane_variables_give_job_node_round_and_attempt():
    assert (
        env().items()
        >= {
            "ELASTANE_JOB": "digits-1",
            "ELASTANE_NODE": "host-a",
            "ELASTANE_ROUND": "3",
            "ELASTANE_ATTEMPT": "1",
            "ELASTANE_STATUS_PAGE_FD": "7",
            "ELASTANE_PROCESS_MARK": "abc",
        }.items()
    )


def test_the_agents_environment_is_handed_on_and_not_changed():
    base = {"PATH": "/bin", "RANK": "77", "HOME": "/home"}
    found = env(base)
    assert (found["PATH"], found["HOME"], found["RANK"]) == ("/bin", "/home", "5")
    assert base["RANK"] == "77"


def test_the_secret_never_reaches_a_worker():
    conf = "join_timeout=3, token=hush,silence=4,password=hush"
    base = {"ELASTANE_TOKEN": "hush", "PET_RDZV_CONF": conf}
    found = env(base)
    assert not [name for name, value in found.items() if "hush" in value]
    assert found["PET_RDZV_CONF"] == "join_timeout=3,silence=4"


def test_a_users_own_thread_count_and_nccl_setting_stay():
    found = env({"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert found["OMP_NUM_THREADS"] == "4"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_gloo_listens_on_the_loopback_for_a_job_on_one_machine_unless_the_user_says_otherwise():
    assert env(on_one_machine=True)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in env()
    assert env({"GLOO_SOCKET_IFNAME": "eth1"}, on_one_machine=True)["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_single_worker_keeps_all_threads():
    assert "OMP_NUM_THREADS" not in env(local_rank=0, local_world_size=1)


def test_variables_of_an_outer_worker_are_not_inherited():
    base = {
        "TORCHELASTIC_ERROR_FILE": "/outer",
        "ELASTANE_STATUS_PAGE_FD": "3",
        "ELASTANE_PROCESS_MARK": "4",
    }
    found = worker_environment(base, ASSIGNMENT, RUN, WorkerFacts(local_rank=0))
    assert not found.keys() & base.keys()


def test_a_process_group_store_in_a_worker_is_announced():
    plain = msgspec.structs.replace(ASSIGNMENT, agent_store=False)
    found = worker_environment({}, plain, RUN, WorkerFacts(local_rank=0))
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_a_worker_without_a_place_has_no_variable_of_one_and_keeps_its_own():
    waiting = msgspec.structs.replace(ASSIGNMENT, waiting=True)
    base = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "outer"}
    found = worker_environment(base, waiting, RUN, WorkerFacts(local_rank=1))
    place = place_variables(ASSIGNMENT, 1)
    assert place["RANK"] == "5" and place["MASTER_PORT"] == "40001"
    assert found.keys() & place.keys() == {"TORCHELASTIC_RESTART_COUNT"}
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2")


def test_ranks_count_the_workers_that_take_part():
    some = msgspec.structs.replace(ASSIGNMENT, workers=(1,))
    assert place_variables(some, 1)["RANK"] == "4"


def test_the_end_of_a_worker_that_read_its_rank_too_early_is_explained():
    words = "  File \"train.py\", line 3\nKeyError: 'WORLD_SIZE'"
    assert "call elastane.init() before WORLD_SIZE is read" in why_without_place(words)
    assert why_without_place("KeyError: 'weights'") == ""


def test_a_local_rank_that_the_node_does_not_have_is_our_bug():
    with pytest.raises(AssertionError):
        env(local_rank=2)


def test_the_macro_is_replaced_in_every_argument():
    args = ("--device=cuda:${local_rank}", "x", "${local_rank}-${local_rank}")
    assert worker_args(args, 3) == ("--device=cuda:3", "x", "3-3")


def test_torchruns_own_list_of_variables_is_covered():
    """The names come from the source of the installed torch, so that a new one is noticed."""
    import re
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    source = Path(spec.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    body = source.read_text().split("worker_env = {")[1].split("}\n")[0]
    names = set(re.findall(r'"([A-Z_]+)":', body))
    assert len(names) > 10
    assert names <= env().keys()


# The variables that a node may change for its workers.


@pytest.mark.parametrize(
    ("devices", "local_rank", "seen"),
    [(None, 1, "1"), ("4,5", 1, "5"), (" 4 , GPU-7f ", 1, "GPU-7f"), ("3", 0, "3")],
)
def test_a_virtual_local_rank_is_0_with_one_device(devices, local_rank, seen):
    base = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    found = env(base, local_rank, virtual_local_rank=True)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", seen)
    assert found["RANK"] == str(4 + local_rank)
    assert found["LOCAL_WORLD_SIZE"] == "2"


def test_the_devices_are_the_nodes_where_the_local_rank_is_not_virtual():
    assert "CUDA_VISIBLE_DEVICES" not in env()
    assert env({"CUDA_VISIBLE_DEVICES": "4,5"})["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.parametrize("devices", ["4", "", "4,", ",4"])
def test_a_worker_without_device_is_refused(devices):
    with pytest.raises(ConfigurationError, match="local rank 1 has no device") as caught:
        env({"CUDA_VISIBLE_DEVICES": devices}, virtual_local_rank=True)
    assert caught.value.slug == "no-device-for-worker"


def test_the_timer_file_is_the_agents_when_it_watches_and_inherited_otherwise():
    base = {"TORCHELASTIC_TIMER_FILE": "/users"}
    assert env(base)["TORCHELASTIC_TIMER_FILE"] == "/users"
    assert env(base, timer_file="/ours")["TORCHELASTIC_TIMER_FILE"] == "/ours"


def test_the_handled_signals_are_passed_as_torchrun_passes_them():
    found = env({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP"}, signals=("SIGTERM", "SIGINT"))
    assert found["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT"


def test_the_snapshot_server_is_this_nodes_and_never_that_of_an_outer_job():
    assert "ELASTANE_SNAPSHOT_SERVER" not in env({"ELASTANE_SNAPSHOT_SERVER": "/outer"})
    assert (
        env({"ELASTANE_SNAPSHOT_SERVER": "/outer"}, snapshot_server="/own")[
            "ELASTANE_SNAPSHOT_SERVER"
        ]
        == "/own"
    )
