"""The options that follow from the environment of a Slurm step.

`srun` starts one task on each node of a step, and each task is an agent. All agents find the same
name, size and place to meet in their variables. Options that the user gives count before these.
Outside a step, and where the user names another place to meet, nothing is found. An environment
that contradicts itself or the options fails with ConfigurationError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastane.errors import ConfigurationError
from elastane.options.build import read_nnodes
from elastane.options.parser import Options, Origin
from elastane.options.rendezvous import is_builtin
from elastane.slurm.hostlist import expand
from elastane.stores import registry

# Below the ports that the kernel gives to clients (32768 and up). Jobs that follow each other get
# ports that differ: two of them may share their first node.
PORTS = range(20_000, 30_000)
# Steps and restarts of one job get ports that are far apart. Both are prime, and no divisors.
_STEP_STRIDE, _RESTART_STRIDE = 1_009, 4_001
# A job that lost a node waits for it for so long: srun starts no task again, so only an agent that
# is alive can come back, once the network does.
RETURN_S = 60
# A user who gives one of these has chosen torchrun's static rendezvous.
_STATIC = ("master_addr", "master_port", "node_rank")
_TASKS = re.compile(r"([0-9]+)(?:\(x[0-9]+\))?")
# Set for workers: a launcher in a worker belongs to that worker, not to the step.
_IN_WORKER = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class SlurmStep:
    """One node's view of a step with one task on each node.

    `job` is the id that Slurm's commands take, `number` the step in it, `restarts` how often the
    job was requeued. `hosts` are the nodes in Slurm's order, `node` this node's place among them.
    """

    job: str
    number: int
    restarts: int
    hosts: tuple[str, ...]
    node: int
    node_name: str
    gpus: int
    cluster: str

    def name(self, *, in_store: bool) -> str:
        """Return the name of the elastane job.

        A requeued job keeps its name in a store, which continues to count rounds. Elsewhere rounds
        begin at 1 again, and two runs of one name would be mixed up in its log.
        """
        run = f".r{self.restarts}" if self.restarts and not in_store else ""
        return f"slurm-{self.job}" + (f".{self.number}" if self.number else "") + run

    @property
    def host(self) -> str:
        """The node that serves the rendezvous."""
        return self.hosts[0]

    @property
    def serves(self) -> bool:
        """Whether this node serves the rendezvous."""
        return self.node_name == self.host if self.node_name in self.hosts else self.node == 0

    def port(self, job_id: int) -> int:
        """Return the port of the rendezvous; `job_id` is Slurm's number of the job."""
        strides = self.number * _STEP_STRIDE + self.restarts * _RESTART_STRIDE
        return PORTS[(job_id + strides) % len(PORTS)]


@dataclass(frozen=True)
class Found:
    """The result of reading a Slurm step: the options with it, a line for the user, the step.

    `step` is None if nothing was added. `needs_token`: the agents meet at an address, and the user
    gave no secret.
    """

    options: Options
    note: str = ""
    step: SlurmStep | None = None
    needs_token: bool = False


def find(options: Options, environ: Mapping[str, str]) -> Found:
    """Return `options` with what the step says about those that the user did not give."""
    if not _is_step(environ):
        return Found(options, _advice(options, environ))
    if _IN_WORKER in environ or _is_elsewhere(options):
        return Found(options)
    step = read_step(environ)
    _check_size(options, step)
    job_id = _number(environ, "SLURM_JOB_ID")
    in_store = registry.is_store(options.text("rdzv_backend").lower())
    values = _values(step, environ, job_id, in_store=in_store)
    meets = len(step.hosts) > 1 and not in_store
    found = _with(options, values)
    if len(step.hosts) > 1 and "join_timeout" not in options.text("rdzv_conf"):
        found = _with_conf(found, f"rejoin_timeout={RETURN_S}", "SLURM_STEP_ID")
    if meets:
        found = _serving(found, step)
    has_token = (
        environ.get("ELASTANE_TOKEN", "").strip()
        or options.text("token_file")
        or "token=" in options.text("rdzv_conf").replace(" ", "")
    )
    return Found(found, _note(found, step), step, needs_token=meets and not has_token)


def read_step(environ: Mapping[str, str]) -> SlurmStep:
    """Return the step; ConfigurationError names the variable that makes no sense."""
    list_name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = expand(environ.get(list_name, ""), list_name)
    count_name = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node = _number(environ, "SLURM_NODEID")
    if _number(environ, count_name) != len(hosts) or len(set(hosts)) != len(hosts):
        raise _contradiction(environ, list_name, count_name)
    if node >= len(hosts):
        raise _contradiction(environ, list_name, "SLURM_NODEID")
    _check_tasks(environ)
    return SlurmStep(
        job=_job(environ),
        number=_number(environ, "SLURM_STEP_ID"),
        restarts=_number(environ, "SLURM_RESTART_COUNT", missing=0),
        hosts=hosts,
        node=node,
        node_name=environ.get("SLURMD_NODENAME", ""),
        gpus=_number(environ, "SLURM_GPUS_ON_NODE", missing=0),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
    )


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of srun; a batch script and `srun --pty` are none."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ and not _is_shell(environ)


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Whether a person types in `srun --pty`, where any number of jobs may follow each other."""
    return "SLURM_PTY_PORT" in environ


def _is_elsewhere(options: Options) -> bool:
    """Whether the user says where to meet, or that there is nothing to meet."""
    given, backend = options.given, options.text("rdzv_backend").lower()
    if options.flag("standalone") or any(name in given for name in _STATIC):
        return True
    if "rdzv_backend" in given and (backend == "static" or not is_builtin(backend)):
        return True
    if "nnodes" in given and read_nnodes(options.text("nnodes"))[1] == 1:
        return True
    return "rdzv_endpoint" in given and not registry.is_store(backend)


def _values(
    step: SlurmStep, environ: Mapping[str, str], job_id: int, *, in_store: bool
) -> dict[str, tuple[str, str]]:
    """Return each option's value, and the variable that it is from."""
    job = "SLURM_ARRAY_TASK_ID" if "_" in step.job else "SLURM_JOB_ID"
    values = {"rdzv_id": (step.name(in_store=in_store), job)}
    if step.node_name:
        values["node_id"] = (step.node_name, "SLURMD_NODENAME")
    if step.gpus:
        values["nproc_per_node"] = (str(step.gpus), "SLURM_GPUS_ON_NODE")
    if topology := _topology(environ):
        values["topology"] = (topology, "SLURM_TOPOLOGY_ADDR")
    if len(step.hosts) > 1:
        hosts = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        values["nnodes"] = (str(len(step.hosts)), hosts)
        values["node_rank"] = (str(step.node), "SLURM_NODEID")
        if not in_store:
            values["rdzv_backend"] = ("elastane", "SLURM_JOB_ID")
            values["rdzv_endpoint"] = (f"{step.host}:{step.port(job_id)}", hosts)
    return values


def _topology(environ: Mapping[str, str]) -> str:
    """Return the switches or the block above this node, and its name, such as s0/s2/node7.

    Slurm separates them by dots, of which the name of the node, the last part, may have its own.
    Without a topology it writes the name alone.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", levels)
    return "/".join(parts) if levels and all(parts) else ""


def _with(options: Options, found: Mapping[str, tuple[str, str]]) -> Options:
    values, origins = dict(options.values), dict(options.origins)
    for dest, (value, variable) in found.items():
        if dest not in options.given:
            values[dest], origins[dest] = value, Origin("Slurm", variable)
    return replace(options, values=values, origins=origins)


def _serving(options: Options, step: SlurmStep) -> Options:
    """Say which node serves: names may resolve differently on the nodes of a cluster."""
    if "is_host" in options.text("rdzv_conf"):
        return options
    pair = f"is_host={'true' if step.serves else 'false'}"
    return _with_conf(options, pair, "SLURM_NODEID")


def _with_conf(options: Options, pair: str, variable: str) -> Options:
    """Return the options with another pair of --rdzv-conf, which the step gives."""
    values, origins = dict(options.values), dict(options.origins)
    values["rdzv_conf"] = ",".join(filter(None, [options.text("rdzv_conf"), pair]))
    origins.setdefault("rdzv_conf", Origin("Slurm", variable))
    return replace(options, values=values, origins=origins)


def _check_size(options: Options, step: SlurmStep) -> None:
    low, high = read_nnodes(options.text("nnodes"))
    if "nnodes" not in options.given or low <= len(step.hosts):
        return
    raise ConfigurationError(
        f"--nnodes {options.text('nnodes')} in a Slurm step of {_nodes(step)}",
        slug="slurm-nodes",
        where=f"Slurm job {step.job}, step {step.number}",
        expected=f"MIN at most {len(step.hosts)}: no other node can join the step",
        next_step=f"leave --nnodes out, or ask for the nodes: srun --nodes {high}",
    )


def _check_tasks(environ: Mapping[str, str]) -> None:
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = environ.get(name, "1")
    counts = [_TASKS.fullmatch(each) for each in text.split(",")]
    if not all(counts):
        raise _bad(name, text, "numbers of tasks, such as 1(x4)")
    if all(count is not None and int(count[1]) == 1 for count in counts):
        return
    raise ConfigurationError(
        f"{name} = {text}: srun starts several agents on one node",
        slug="slurm-tasks",
        expected="one agent on each node, which starts the workers: --nproc-per-node",
        next_step="srun --ntasks-per-node=1 elastane run ...; --standalone makes each task a job "
        "of its own",
    )


def _job(environ: Mapping[str, str]) -> str:
    """Return the job's id as Slurm's commands take it; of an array, with the task."""
    if "SLURM_ARRAY_TASK_ID" in environ and "SLURM_ARRAY_JOB_ID" in environ:
        array = _number(environ, "SLURM_ARRAY_JOB_ID")
        return f"{array}_{_number(environ, 'SLURM_ARRAY_TASK_ID')}"
    return str(_number(environ, "SLURM_JOB_ID"))


def _advice(options: Options, environ: Mapping[str, str]) -> str:
    """Return a note for a command in a batch script that was meant for all nodes, else nothing."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    alone = "nnodes" not in options.given and not options.flag("standalone")
    if "SLURM_JOB_ID" not in environ or _is_shell(environ) or nodes == "1" or not alone:
        return ""
    return (
        f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} nodes, and this runs on one of them; "
        "to run on all: srun --ntasks-per-node=1 elastane run ..."
    )


def _note(options: Options, step: SlurmStep) -> str:
    """Return the line about what was found; only the first node prints it."""
    if step.node:
        return ""
    where = options.text("rdzv_endpoint")
    restarts = f", requeued {step.restarts} times" if step.restarts > 1 else ", requeued once"
    return (
        f"Slurm job {step.job}"
        + (restarts if step.restarts else "")
        + f": {_nodes(step)}"
        + (f", rendezvous at {where}" if where else "")
        + _after_a_loss(options, step)
    )


def _after_a_loss(options: Options, step: SlurmStep) -> str:
    """Say what follows the loss of a node, if the job cannot do without one."""
    waits = f"rejoin_timeout={RETURN_S}" in options.text("rdzv_conf")
    if not waits or read_nnodes(options.text("nnodes"))[0] < len(step.hosts):
        return ""
    return (
        f"; srun starts no lost agent again, so a lost node ends the job after {RETURN_S} s"
        f" (--nnodes 1:{len(step.hosts)} continues without it)"
    )


def _nodes(step: SlurmStep) -> str:
    return f"{len(step.hosts)} nodes" if len(step.hosts) > 1 else "1 node"


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first variable that is set, else the first name."""
    return next((name for name in names if environ.get(name)), names[0])


def _number(environ: Mapping[str, str], name: str, missing: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and missing is not None:
        return missing
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise _bad(name, text, "a number")
    return int(text)


def _bad(name: str, text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} = {text[:200]!r}" if text else f"{name} is not set in a Slurm step",
        slug="slurm-environment",
        expected=expected,
        next_step="start the agents by srun itself, or give --rdzv-endpoint HOST:PORT and --nnodes",
    )


def _contradiction(environ: Mapping[str, str], first: str, second: str) -> ConfigurationError:
    return _bad(
        second,
        environ.get(second, ""),
        f"a number that fits {first} = {environ.get(first, '')[:200]!r}",
    )
