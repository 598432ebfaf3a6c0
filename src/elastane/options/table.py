"""Every option of `elastane run` as one table: torchrun's, with their names and meaning, then
elastane's.

The parser, the help, the variables (PET_* for torchrun's, ELASTANE_* for elastane's) and the
settings file are all made from this table. It reads nothing and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastane.process.zygote import DEFAULT_PRELOAD

# How a value is written. A list has commas between its items; in needles two commas mean one comma
# inside an item; pairs are KEY=VALUE,...
Kind = Literal["text", "int", "float", "flag", "choice", "list", "needles", "pairs", "path"]


@dataclass(frozen=True)
class Option:
    """One option: its name, how its value is written, and where it may be set.

    `idle`: why the option has no effect here; it is accepted with a note. `setting`: whether a
    settings file may contain it.
    """

    name: str
    default: str
    help: str
    group: str
    kind: Kind = "text"
    short: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    ours: bool = False
    variable: bool = True
    setting: bool = True
    idle: str = ""

    @property
    def dest(self) -> str:
        """The name as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write it on a command line."""
        long = dict.fromkeys((f"--{self.name}", f"--{self.dest}"))
        return ((f"-{self.short}",) if self.short else ()) + tuple(long)

    @property
    def env(self) -> str:
        """The variable that sets it, or an empty string."""
        prefix = "ELASTANE" if self.ours else "PET"
        return f"{prefix}_{self.dest.upper()}" if self.variable else ""


SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
NODES = "nodes and workers"
RENDEZVOUS = "rendezvous"
SCRIPT = "what is run"
FAULTS = "faults and stopping"
LOGS = "logs"
OURS = "elastane's own (torchrun has none of these)"
TABLE: tuple[Option, ...] = (
    Option(
        "nnodes",
        "1:1",
        "number of nodes, or MIN:MAX for an elastic job",
        NODES,
        metavar="N|MIN:MAX",
    ),
    Option(
        "nproc-per-node",
        "1",
        "workers on this node: a number, cpu (usable CPUs), gpu (devices that CUDA_VISIBLE_DEVICES "
        "names, else /dev/nvidia*), another kind such as xpu, or auto (gpu where torch can use "
        "one, else cpu)",
        NODES,
        metavar="N|auto|cpu|gpu",
    ),
    Option("role", "default", "role of this node's workers", NODES, metavar="NAME"),
    Option(
        "node-rank",
        "0",
        "wished place of this node; for the static backend, 0 hosts the coordinator",
        NODES,
        kind="int",
        metavar="N",
    ),
    Option(
        "local-addr",
        "",
        "address of this node as other nodes reach it (default: the one its connection shows); a "
        "numeric one is also where this node listens",
        NODES,
        metavar="ADDR",
    ),
    Option(
        "rdzv-backend",
        "static",
        "elastane (also named c10d), static, file (a folder that all nodes share), etcd, etcd-v2, "
        "kubernetes, redis, or the name of an installed package's store or handler; the default is "
        "standalone for one node, elastane where --rdzv-endpoint is given, else static",
        RENDEZVOUS,
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        "",
        "where the coordinator is: HOST[:PORT], port 29400 by default; for file, the "
        "folder; for etcd, one or more HOST[:PORT] or URLs; for kubernetes, the namespace or "
        "nothing",
        RENDEZVOUS,
        metavar="HOST[:PORT]",
    ),
    Option(
        "rdzv-id",
        "none",
        "name of the job (default: made up; see docs/errors.md, wrong-job)",
        RENDEZVOUS,
        metavar="NAME",
    ),
    Option(
        "rdzv-conf",
        "",
        "more of it as KEY=VALUE,...: join_timeout, last_call_timeout, keep_alive_interval, token "
        "and every duration of elastane.protocol.limits.Timing, in seconds, fractions allowed",
        RENDEZVOUS,
        metavar="K=V,...",
        kind="pairs",
    ),
    Option(
        "standalone",
        "0",
        "a job of this machine alone; sets backend, endpoint and id by itself",
        RENDEZVOUS,
        kind="flag",
    ),
    Option(
        "master-addr",
        "127.0.0.1",
        "host of node rank 0, for the static backend",
        RENDEZVOUS,
        metavar="HOST",
    ),
    Option(
        "master-port",
        "29500",
        "port at --master-addr, for the static backend",
        RENDEZVOUS,
        kind="int",
        metavar="PORT",
    ),
    Option(
        "module", "0", "the script is a module, as in python -m", SCRIPT, kind="flag", short="m"
    ),
    Option("no-python", "0", "execute the script itself, without python", SCRIPT, kind="flag"),
    Option("run-path", "0", "run the script by runpy.run_path", SCRIPT, kind="flag"),
    Option(
        "start-method",
        "spawn",
        "for --run-path only, as in torchrun: spawn starts a new interpreter for each worker, fork "
        "and forkserver fork a warm one (default: as fork)",
        SCRIPT,
        kind="choice",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        "virtual-local-rank",
        "0",
        "LOCAL_RANK=0 for each worker, and CUDA_VISIBLE_DEVICES with its one device",
        SCRIPT,
        kind="flag",
    ),
    Option(
        "numa-binding",
        "",
        "bind each worker to CPUs near the GPU of its local rank: all of the NUMA node or socket, "
        "a share of its cores, or those of one cache; without GPUs, spread over the NUMA nodes",
        SCRIPT,
        kind="choice",
        choices=("node", "socket", "exclusive", "core-complex"),
        variable=False,
    ),
    Option(
        "max-restarts",
        "0",
        "restarts of the workers before the job fails, counted over the whole job",
        FAULTS,
        kind="int",
        metavar="N",
    ),
    Option(
        "shutdown-timeout",
        "",
        "seconds from SIGTERM to SIGKILL wherever workers are stopped (default 30, or "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
        FAULTS,
        kind="float",
        metavar="S",
    ),
    Option(
        "signals-to-handle",
        SIGNALS,
        "signals at which the agent drains and leaves",
        FAULTS,
        metavar="SIG,...",
        kind="list",
    ),
    Option(
        "monitor-interval",
        "0.1",
        "taken for torchrun's sake",
        FAULTS,
        kind="float",
        metavar="S",
        idle="a worker's end is noticed at once, without polling",
    ),
    Option(
        "log-dir",
        "",
        "folder under which each job makes one of its own; /dev/null for no files",
        LOGS,
        metavar="DIR",
        kind="path",
    ),
    Option(
        "redirects",
        "0",
        "streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, "
        "0:3,1:2",
        LOGS,
        short="r",
        metavar="STD",
        kind="list",
    ),
    Option(
        "tee",
        "0",
        "streams that go to files and to the console, written as in --redirects",
        LOGS,
        short="t",
        metavar="STD",
        kind="list",
    ),
    Option(
        "local-ranks-filter",
        "",
        "only these local ranks are shown on the console",
        LOGS,
        metavar="N,...",
        kind="list",
    ),
    Option(
        "duplicate-stdout-filters",
        "",
        "copy lines of teed stdout that hold one of these texts to filtered_stdout.log in the "
        "attempt's folder (filtered_stdout.rank_N.log on a node whose first rank N is not 0); "
        "two commas are one that belongs to a text",
        LOGS,
        metavar="TEXT,...",
        kind="needles",
    ),
    Option(
        "duplicate-stderr-filters",
        "",
        "copy lines of teed stderr that hold one of these texts to filtered_stderr.log in the "
        "attempt's folder (filtered_stderr.rank_N.log on a node whose first rank N is not 0); "
        "two commas are one that belongs to a text",
        LOGS,
        metavar="TEXT,...",
        kind="needles",
    ),
    Option(
        "event-log-handler",
        "null",
        "console: each event also on stderr, as a JSON line of torch's form; null: only in the "
        "event log under --log-dir",
        LOGS,
        metavar="NAME",
    ),
    Option(
        "logs-specs",
        "",
        "entry point in torchrun.logs_specs: a class that decides where output goes",
        LOGS,
        metavar="NAME",
        variable=False,
    ),
    Option(
        "node-id",
        "",
        "stable name of this node; an agent that comes back under it takes its old place "
        "(default: made from the host's name)",
        OURS,
        metavar="NAME",
        ours=True,
    ),
    Option(
        "min-workers",
        "0",
        "the fewest workers that train on after a fault, where the script recovers in place"
        " (elastane.init; default: those of MIN whole nodes)",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "spares-per-node",
        "0",
        "workers that wait in elastane.init() on each node, for the place of one that is lost",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "snapshot-replicas",
        "0",
        "copies of a node's part of a sharded state in the memory of another, 0 or 1: with 1 the "
        "loss of any one node is made good from memory (see docs/checkpoints.md)",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "preload",
        ",".join(DEFAULT_PRELOAD),
        "modules that are imported once, before workers are forked",
        OURS,
        metavar="MOD,...",
        ours=True,
        kind="list",
    ),
    Option(
        "no-zygote",
        "0",
        "start each worker as a new interpreter instead of forking it",
        OURS,
        kind="flag",
        ours=True,
    ),
    Option(
        "drain-timeout",
        "",
        "seconds that workers have to checkpoint before a planned change (default 30)",
        OURS,
        kind="float",
        metavar="S",
        ours=True,
    ),
    Option(
        "report-file",
        "",
        "where to write how the job ended, as JSON (see docs/report.md)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
    Option(
        "token-file",
        "",
        "file with the job's secret, the same on all nodes (or ELASTANE_TOKEN)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
    Option(
        "tls-cert",
        "",
        "certificate of this node (PEM)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
    Option("tls-key", "", "its private key (PEM)", OURS, metavar="FILE", ours=True, kind="path"),
    Option(
        "tls-ca",
        "",
        "certificate of the authority that all nodes trust (PEM)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
    Option(
        "config",
        "",
        "settings file, or its folder (default: elastane.toml, or [tool.elastane] of "
        "pyproject.toml, in this folder or above it within the project)",
        OURS,
        metavar="FILE",
        ours=True,
        setting=False,
    ),
    Option(
        "show-config",
        "0",
        "print every option with its value and where it comes from, and start nothing",
        OURS,
        kind="flag",
        ours=True,
        variable=False,
        setting=False,
    ),
    Option(
        "json",
        "0",
        "print that as JSON",
        OURS,
        kind="flag",
        ours=True,
        variable=False,
        setting=False,
    ),
)
BY_DEST = {option.dest: option for option in TABLE}
