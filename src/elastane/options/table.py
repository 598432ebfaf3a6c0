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
SCRIPT = "script"
FAULTS = "failures and shutdown"
LOGS = "logs"
OURS = "elastane only (not in torchrun)"
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
        "number of workers on this node: a number, cpu (one per usable CPU), gpu (one per device "
        "in CUDA_VISIBLE_DEVICES, or else in /dev/nvidia*), another device type such as xpu, or "
        "auto (gpu if torch can use one, otherwise cpu)",
        NODES,
        metavar="N|auto|cpu|gpu",
    ),
    Option("role", "default", "role name of the workers on this node", NODES, metavar="NAME"),
    Option(
        "node-rank",
        "0",
        "requested rank of this node; with the static backend, node 0 runs the coordinator",
        NODES,
        kind="int",
        metavar="N",
    ),
    Option(
        "local-addr",
        "",
        "address at which other nodes reach this one (default: the source address of its "
        "connection to the coordinator); a numeric address is also where this node listens",
        NODES,
        metavar="ADDR",
    ),
    Option(
        "rdzv-backend",
        "static",
        "elastane (or c10d), static, file (a folder that all nodes share), etcd, etcd-v2, "
        "kubernetes, redis, or a store or handler from an installed package; the default is "
        "standalone for one node, elastane with --rdzv-endpoint, otherwise static",
        RENDEZVOUS,
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        "",
        "address of the coordinator: HOST[:PORT], port 29400 by default; for file, the folder; "
        "for etcd, one or more HOST[:PORT] or URLs; for kubernetes, the namespace (optional)",
        RENDEZVOUS,
        metavar="HOST[:PORT]",
    ),
    Option(
        "rdzv-id",
        "none",
        "name of the job, the same on all nodes (default: generated)",
        RENDEZVOUS,
        metavar="NAME",
    ),
    Option(
        "rdzv-conf",
        "",
        "further rendezvous settings as KEY=VALUE,...: join_timeout, last_call_timeout, "
        "keep_alive_interval, token, and every duration in docs/rdzv-conf.md, in seconds",
        RENDEZVOUS,
        metavar="K=V,...",
        kind="pairs",
    ),
    Option(
        "standalone",
        "0",
        "run the job on this machine only; chooses the backend, endpoint and id",
        RENDEZVOUS,
        kind="flag",
    ),
    Option(
        "master-addr",
        "127.0.0.1",
        "host of node 0, for the static backend",
        RENDEZVOUS,
        metavar="HOST",
    ),
    Option(
        "master-port",
        "29500",
        "port on --master-addr, for the static backend",
        RENDEZVOUS,
        kind="int",
        metavar="PORT",
    ),
    Option(
        "module", "0", "SCRIPT is a module name, as in python -m", SCRIPT, kind="flag", short="m"
    ),
    Option("no-python", "0", "execute SCRIPT directly, without python", SCRIPT, kind="flag"),
    Option("run-path", "0", "run SCRIPT with runpy.run_path", SCRIPT, kind="flag"),
    Option(
        "start-method",
        "spawn",
        "only with --run-path: spawn starts a new interpreter for each worker, fork and forkserver "
        "fork one that has already imported torch (default: fork)",
        SCRIPT,
        kind="choice",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        "virtual-local-rank",
        "0",
        "give each worker LOCAL_RANK=0 and only its own device in CUDA_VISIBLE_DEVICES",
        SCRIPT,
        kind="flag",
    ),
    Option(
        "numa-binding",
        "",
        "bind each worker to CPUs near its GPU: the NUMA node (node), the socket (socket), a "
        "separate share of the node's cores (exclusive), or the cores of one cache "
        "(core-complex); without GPUs, workers are spread over the NUMA nodes",
        SCRIPT,
        kind="choice",
        choices=("node", "socket", "exclusive", "core-complex"),
        variable=False,
    ),
    Option(
        "max-restarts",
        "0",
        "how often workers may be restarted after failures before the job fails, in total",
        FAULTS,
        kind="int",
        metavar="N",
    ),
    Option(
        "shutdown-timeout",
        "",
        "seconds between SIGTERM and SIGKILL when workers are stopped (default 30, or "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
        FAULTS,
        kind="float",
        metavar="S",
    ),
    Option(
        "signals-to-handle",
        SIGNALS,
        "signals that make the agent drain its workers and leave the job",
        FAULTS,
        metavar="SIG,...",
        kind="list",
    ),
    Option(
        "monitor-interval",
        "0.1",
        "accepted for compatibility with torchrun, without effect",
        FAULTS,
        kind="float",
        metavar="S",
        idle="the end of a worker is detected at once, without polling",
    ),
    Option(
        "log-dir",
        "",
        "folder for logs; each job creates a subfolder in it; /dev/null writes no files",
        LOGS,
        metavar="DIR",
        kind="path",
    ),
    Option(
        "redirects",
        "0",
        "streams that are written to files instead of the console: 0 none, 1 stdout, 2 stderr, "
        "3 both; or per local rank, such as 0:3,1:2",
        LOGS,
        short="r",
        metavar="STD",
        kind="list",
    ),
    Option(
        "tee",
        "0",
        "streams that are written to files and to the console, in the format of --redirects",
        LOGS,
        short="t",
        metavar="STD",
        kind="list",
    ),
    Option(
        "local-ranks-filter",
        "",
        "show only these local ranks on the console",
        LOGS,
        metavar="N,...",
        kind="list",
    ),
    Option(
        "duplicate-stdout-filters",
        "",
        "copy lines of teed stdout that contain one of these texts to filtered_stdout.log in the "
        "folder of the attempt (filtered_stdout.rank_N.log on a node whose first rank N is not "
        "0); write a comma inside a text as two commas",
        LOGS,
        metavar="TEXT,...",
        kind="needles",
    ),
    Option(
        "duplicate-stderr-filters",
        "",
        "copy lines of teed stderr that contain one of these texts to filtered_stderr.log in the "
        "folder of the attempt (filtered_stderr.rank_N.log on a node whose first rank N is not "
        "0); write a comma inside a text as two commas",
        LOGS,
        metavar="TEXT,...",
        kind="needles",
    ),
    Option(
        "event-log-handler",
        "null",
        "console prints each event on stderr too, as a JSON line in torch's format; null writes "
        "only to the event log under --log-dir",
        LOGS,
        metavar="NAME",
    ),
    Option(
        "logs-specs",
        "",
        "entry point in torchrun.logs_specs whose class decides where output is written",
        LOGS,
        metavar="NAME",
        variable=False,
    ),
    Option(
        "node-id",
        "",
        "stable name of this node; an agent that returns with the same name gets its previous "
        "rank (default: derived from the host name)",
        OURS,
        metavar="NAME",
        ours=True,
    ),
    Option(
        "topology",
        "",
        "where this node is in the network, from the largest part to the smallest, such as "
        "zone/rack/host; nodes of one part get ranks next to each other whenever all workers start "
        "(default under Slurm: from SLURM_TOPOLOGY_ADDR)",
        OURS,
        metavar="PATH",
        ours=True,
    ),
    Option(
        "in-place",
        "0",
        "if a worker or node of an unmodified DDP script is lost, the others keep running (scripts "
        "that call elastane.init() do so without this option; see docs/unmodified-scripts.md)",
        OURS,
        kind="flag",
        ours=True,
    ),
    Option(
        "ranks-may-change",
        "0",
        "with --in-place: the script asks for its rank and the world size wherever it uses them, "
        "so another worker can become rank 0 (default: it sees its first ones until all workers "
        "restart, sums of floats are scaled to that size, and the loss of rank 0 restarts all)",
        OURS,
        kind="flag",
        ours=True,
    ),
    Option(
        "min-workers",
        "0",
        "minimum number of workers that continue after a fault, if the script recovers in place "
        "(elastane.init or --in-place; default: the workers of MIN nodes)",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "spares-per-node",
        "0",
        "warm spare workers on each node, which wait in elastane.init() to replace a lost worker",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "snapshot-replicas",
        "0",
        "copies of each node's shards in the memory of another node, 0 or 1; with 1 the job "
        "recovers from the loss of one node from memory (see docs/checkpoints.md)",
        OURS,
        metavar="N",
        ours=True,
        kind="int",
    ),
    Option(
        "preload",
        ",".join(DEFAULT_PRELOAD),
        "modules to import once, before workers are forked",
        OURS,
        metavar="MOD,...",
        ours=True,
        kind="list",
    ),
    Option(
        "no-zygote",
        "0",
        "start a new interpreter for each worker instead of forking",
        OURS,
        kind="flag",
        ours=True,
    ),
    Option(
        "no-collective-ring",
        "0",
        "do not record the last collectives of each worker; then a wait is not explained by the "
        "worker that causes it (see docs/who-is-to-blame.md)",
        OURS,
        kind="flag",
        ours=True,
    ),
    Option(
        "drain-timeout",
        "",
        "seconds that workers get to checkpoint before a planned change (default 30)",
        OURS,
        kind="float",
        metavar="S",
        ours=True,
    ),
    Option(
        "notices",
        "",
        "where this node's agent reads that the node is about to go, and leaves before that: aws, "
        "gcp, azure, auto (whichever this machine is in), file:PATH, command:WORDS (see "
        "docs/notices.md; a comma in PATH or WORDS is ,,)",
        OURS,
        kind="needles",
        metavar="SOURCE,...",
        ours=True,
    ),
    Option(
        "health-check",
        "",
        "a program that says whether this node is fit, by its exit code: it runs before the node "
        "joins, and after each fault of a worker here, beside the recovery; a node that is not fit "
        "does not join, or leaves (see docs/health-checks.md)",
        OURS,
        metavar="COMMAND",
        ours=True,
    ),
    Option(
        "health-check-timeout",
        "",
        "seconds that --health-check may take; if it takes longer, the node counts as not fit "
        "(default 120)",
        OURS,
        kind="float",
        metavar="S",
        ours=True,
    ),
    Option(
        "serve",
        "",
        "serve the job's page on this port of the loopback for as long as this agent runs; 0 takes "
        "a free port (see docs/dashboard.md)",
        OURS,
        metavar="PORT",
        ours=True,
    ),
    Option(
        "metrics-port",
        "",
        "serve the job's metrics to Prometheus on this port of all addresses, or of ADDRESS, for "
        "as long as this agent runs; 0 takes a free port (see docs/metrics.md)",
        OURS,
        metavar="[ADDRESS:]PORT",
        ours=True,
    ),
    Option(
        "report-file",
        "",
        "write the outcome of the job to this file, as JSON (see docs/report.md)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
    Option(
        "token-file",
        "",
        "file with the secret of the job, the same on all nodes (or set ELASTANE_TOKEN)",
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
    Option(
        "tls-key",
        "",
        "private key of --tls-cert (PEM)",
        OURS,
        metavar="FILE",
        ours=True,
        kind="path",
    ),
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
        "settings file, or its folder (default: elastane.toml, or [tool.elastane] in "
        "pyproject.toml, in this folder or a parent folder in the project)",
        OURS,
        metavar="FILE",
        ours=True,
        setting=False,
    ),
    Option(
        "show-config",
        "0",
        "print every option with its value and origin, and exit",
        OURS,
        kind="flag",
        ours=True,
        variable=False,
        setting=False,
    ),
    Option(
        "json",
        "0",
        "with --show-config: print JSON",
        OURS,
        kind="flag",
        ours=True,
        variable=False,
        setting=False,
    ),
)
BY_DEST = {option.dest: option for option in TABLE}
