"""The environment of a worker: torchrun's contract, and elastane's additions.

A pure function of the agent's assignment, the job, and the environment that the agent was started
in. It reads nothing itself, and its result never holds the job's secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastane.errors import ConfigurationError
from elastane.protocol.model import Assignment

# Variables for one process of one attempt. They are not inherited from the agent's environment,
# because the agent may itself be a worker of another job.
_PER_WORKER = (
    "TORCHELASTIC_ERROR_FILE",
    "ELASTANE_STATUS_PAGE_FD",
    "ELASTANE_CONTROL_FD",
    "ELASTANE_REPORT_FILE",
    "ELASTANE_PROCESS_MARK",
    "ELASTANE_SNAPSHOT_SERVER",
    "ELASTANE_JOB_FOLDER",
)
# The module that runs an unmodified script, with its path and arguments (`--in-place`).
RUN_IN_PLACE = "elastane.worker.unmodified"
# Its option, before the script's path.
RANKS_MAY_CHANGE = "--ranks-may-change"
# Variables for a worker's rank in its world. A worker that waits for an assignment has none.
RANK_VARIABLES = (
    *("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("ELASTANE_ROUND", "ELASTANE_ATTEMPT"),
)
_RANK_MISSING = re.compile(rf"KeyError: '({'|'.join(RANK_VARIABLES)})'")
SLUG = "variable-before-place"
_SECRET = "ELASTANE_TOKEN"
_CONF = "PET_RDZV_CONF"
_SECRET_ENDINGS = ("token", "password", "passwd", "secret")
# ROCm reads it too.
_DEVICES = "CUDA_VISIBLE_DEVICES"
_LOOPBACK_INTERFACE = "lo"
LOCAL_RANK_MACRO = "${local_rank}"


@dataclass(frozen=True)
class RunFacts:
    """The facts that all local workers of a job share in every round.

    `virtual_local_rank`: each worker sees one device, as number 0. `timer_file`: the pipe on which
    workers set timers on themselves; "" if no agent reads it. `signals`: the signals at which the
    agent drains. `snapshot_server`: the path of the snapshot server's socket; "" if there is none.
    `on_one_machine`: gloo listens on the loopback. `job_folder`: where the job logs; "" without.
    """

    job: str
    node_id: str
    role: str
    local_world_size: int
    virtual_local_rank: bool = False
    timer_file: str = ""
    signals: tuple[str, ...] = ()
    snapshot_server: str = ""
    on_one_machine: bool = False
    job_folder: str = ""


@dataclass(frozen=True)
class WorkerFacts:
    """The facts about one worker; an empty or absent value sets no variable.

    `process_mark`: the process mark of this agent, by which the orphan reaper finds its processes.
    """

    local_rank: int
    error_file: str = ""
    page_fd: int | None = None
    control_fd: int | None = None
    process_mark: str = ""


def worker_environment(
    base: Mapping[str, str], assignment: Assignment, run: RunFacts, worker: WorkerFacts
) -> dict[str, str]:
    """Return the whole environment of one worker, based on `base`, the agent's own.

    TORCHELASTIC_RESTART_COUNT is the job's count, the same on all nodes; torchrun's is each agent's
    own. OMP_NUM_THREADS is 1 if several workers share a node, unless `base` sets it.
    """
    env = without_secrets(base)
    for name in (*_PER_WORKER, *RANK_VARIABLES):
        env.pop(name, None)
    env.update(_constant_variables(assignment, run, worker))
    if not assignment.waiting:
        env.update(place_variables(assignment, worker.local_rank))
    if run.virtual_local_rank:
        env.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=only_device(base, worker.local_rank))
    if run.timer_file:
        env["TORCHELASTIC_TIMER_FILE"] = run.timer_file
    if run.signals:
        env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(run.signals)
    if worker.error_file:
        env["TORCHELASTIC_ERROR_FILE"] = worker.error_file
    if worker.page_fd is not None:
        env["ELASTANE_STATUS_PAGE_FD"] = str(worker.page_fd)
    if worker.control_fd is not None:
        env["ELASTANE_CONTROL_FD"] = str(worker.control_fd)
    own = {
        "ELASTANE_SNAPSHOT_SERVER": run.snapshot_server,
        "ELASTANE_PROCESS_MARK": worker.process_mark,
        "ELASTANE_JOB_FOLDER": run.job_folder,
    }
    env.update({name: value for name, value in own.items() if value})
    return {**_defaults(run), **env}


def _defaults(run: RunFacts) -> dict[str, str]:
    """Return the variables that apply unless the user sets another value."""
    # The fault handler prints the stacks of all threads at a fatal signal, in child processes too.
    found = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONFAULTHANDLER": "1"}
    if run.on_one_machine:
        found["GLOO_SOCKET_IFNAME"] = _LOOPBACK_INTERFACE
    if run.local_world_size > 1:
        found["OMP_NUM_THREADS"] = "1"
    return found


def only_device(base: Mapping[str, str], local_rank: int) -> str:
    """Return the one device of `base` that a worker sees.

    Raises ConfigurationError if `base` names too few. An empty name ends the list, as in CUDA.
    """
    if _DEVICES not in base:
        return str(local_rank)
    names = [name.strip() for name in base[_DEVICES].split(",")]
    if local_rank >= len(names) or "" in names[: local_rank + 1]:
        raise ConfigurationError(
            f"--virtual-local-rank: local rank {local_rank} has no device:"
            f" {_DEVICES}={base[_DEVICES]}",
            slug="no-device-for-worker",
            expected="as many devices as workers on this node",
            next_step="--nproc-per-node with the number of devices that it names",
        )
    return names[local_rank]


def worker_args(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Return the script's arguments with `${local_rank}` replaced."""
    return tuple(arg.replace(LOCAL_RANK_MACRO, str(local_rank)) for arg in args)


def place_variables(assignment: Assignment, local_rank: int) -> dict[str, str]:
    """Return the variables for a worker's rank in the world of its assignment.

    They change with each world that it enters. The others are set once, when it starts.
    """
    assert not assignment.waiting, "a worker without a place has no rank"
    index = assignment.index_of(local_rank)
    found = {
        "RANK": str(assignment.rank_base + index),
        "GROUP_RANK": str(assignment.node_rank),
        "ROLE_RANK": str(assignment.role_rank_base + index),
        "WORLD_SIZE": str(assignment.world_size),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_WORLD_SIZE": str(assignment.role_world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(assignment.agent_store),
        "ELASTANE_ROUND": str(assignment.fence.round),
        "ELASTANE_ATTEMPT": str(assignment.fence.attempt),
    }
    assert found.keys() == {*RANK_VARIABLES}, "a worker without a place lacks these, and no others"
    return {**found, **_restarts(assignment)}


def why_without_place(message: str) -> str:
    """Explain the end of a worker without a rank, if one of these variables was missing.

    `message`: the last lines of its output. Returns "" if the cause is another one.
    """
    found = _RANK_MISSING.search(message)
    if found is None:
        return ""
    return (
        f"{found[1]} is absent: this worker replaces another or joins later, and has no place"
        f" before elastane.init(). Next step: call elastane.init() before {found[1]} is read,"
        f" or read job.rank and job.world_size instead [{SLUG}]"
    )


def _restarts(assignment: Assignment) -> dict[str, str]:
    return {"TORCHELASTIC_RESTART_COUNT": str(assignment.restarts_used)}


def _constant_variables(
    assignment: Assignment, run: RunFacts, worker: WorkerFacts
) -> dict[str, str]:
    """Return the variables that a worker has from its start, with or without a rank."""
    assert 0 <= worker.local_rank < run.local_world_size, worker
    return {
        **_restarts(assignment),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(run.local_world_size),
        "ROLE_NAME": run.role,
        "TORCHELASTIC_MAX_RESTARTS": str(assignment.max_restarts),
        "TORCHELASTIC_RUN_ID": run.job,
        "ELASTANE_JOB": run.job,
        "ELASTANE_NODE": run.node_id,
    }


def without_secrets(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` without the job's secrets, for a process that needs none.

    After a fork, /proc shows the environment that the forked program was started with, whatever
    that program changed later. So a zygote must be started without the secrets.
    """
    env = dict(base)
    env.pop(_SECRET, None)
    if _CONF in env:
        pairs = env[_CONF].split(",")
        env[_CONF] = ",".join(
            pair
            for pair in pairs
            if not pair.partition("=")[0].strip().lower().endswith(_SECRET_ENDINGS)
        )
    return env
