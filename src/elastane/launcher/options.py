"""Every option of `elastane run` as one table: torchrun's, by its names and meaning, then ours.

The parser, the help, the variables (PET_* for torchrun's, ELASTANE_* for ours) and the checks of
what this version does not do are all made from this table. It reads nothing and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "int", "float", "flag", "choice"]

# What a worker's start imports beyond the script itself: torch, and what the first optimizer and
# the first DDP pull in on first use, which is about half of a start (FACTS: 0.95 of 2.07 s).
DEFAULT_PRELOAD = (
    "torch,torch.distributed,torch.optim,torch._dynamo,torch.nn.parallel,torch.utils.data"
)
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class Option:
    """One option: its name, how its value is read, and what to say where it cannot work.

    `later` is set where this version does not do it: any value but the default is refused with
    that advice. `idle` is set where the option has nothing left to do: it is taken with a note.
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
    later: str = ""
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
        """The variable that stands in for it, or an empty string."""
        prefix = "ELASTANE" if self.ours else "PET"
        return f"{prefix}_{self.dest.upper()}" if self.variable else ""


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
        "names, else /dev/nvidia*), or auto (gpu where torch can use one, else cpu)",
        NODES,
        metavar="N|auto|cpu|gpu",
    ),
    Option("role", "default", "role of this node's workers", NODES),
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
        "address of this node as other nodes reach it (default: the one its connection shows)",
        NODES,
        metavar="ADDR",
    ),
    Option(
        "rdzv-backend",
        "static",
        "elastane (also named c10d), static, file (a folder that all nodes share); the default is "
        "standalone for one node, elastane where --rdzv-endpoint is given, else static",
        RENDEZVOUS,
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        "",
        "where the coordinator is: HOST[:PORT], port 29400 by default; for file, the folder",
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
        "and every duration of elastane.core.limits.Timing, in seconds, fractions allowed",
        RENDEZVOUS,
        metavar="K=V,...",
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
        "taken for torchrun's sake",
        SCRIPT,
        kind="choice",
        choices=("spawn", "fork", "forkserver"),
        idle="workers are forked from the zygote, or executed with --no-zygote",
    ),
    Option(
        "virtual-local-rank",
        "0",
        "LOCAL_RANK=0 and one device for each worker",
        SCRIPT,
        kind="flag",
        later="set CUDA_VISIBLE_DEVICES at the top of the script from LOCAL_RANK",
    ),
    Option(
        "numa-binding",
        "",
        "bind workers to CPUs near their device",
        SCRIPT,
        kind="choice",
        choices=("node", "socket", "exclusive", "core-complex"),
        variable=False,
        later="start the script under numactl with --no-python",
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
    ),
    Option(
        "redirects",
        "0",
        "streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, "
        "0:3,1:2",
        LOGS,
        short="r",
        metavar="STD",
    ),
    Option(
        "tee",
        "0",
        "streams that go to files and to the console, written as in --redirects",
        LOGS,
        short="t",
        metavar="STD",
    ),
    Option(
        "local-ranks-filter",
        "",
        "only these local ranks are shown on the console",
        LOGS,
        metavar="N,...",
    ),
    Option(
        "duplicate-stdout-filters",
        "",
        "copy matching lines of stdout to one more file",
        LOGS,
        metavar="TEXT,...",
        later="search the files under --log-dir with grep",
    ),
    Option(
        "duplicate-stderr-filters",
        "",
        "copy matching lines of stderr to one more file",
        LOGS,
        metavar="TEXT,...",
        later="search the files under --log-dir with grep",
    ),
    Option(
        "event-log-handler",
        "null",
        "where torchrun's events go",
        LOGS,
        metavar="NAME",
        later="read the job's event log: elastane status, or the JSON lines under --log-dir",
    ),
    Option(
        "logs-specs",
        "",
        "entry point in torchrun.logs_specs",
        LOGS,
        metavar="NAME",
        variable=False,
        later="use --log-dir, --redirects, --tee and --local-ranks-filter",
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
        "preload",
        DEFAULT_PRELOAD,
        "modules that are imported once, before workers are forked",
        OURS,
        metavar="MOD,...",
        ours=True,
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
        "token-file",
        "",
        "file with the job's secret, the same on all nodes (or ELASTANE_TOKEN)",
        OURS,
        metavar="FILE",
        ours=True,
    ),
    Option("tls-cert", "", "certificate of this node (PEM)", OURS, metavar="FILE", ours=True),
    Option("tls-key", "", "its private key (PEM)", OURS, metavar="FILE", ours=True),
    Option(
        "tls-ca",
        "",
        "certificate of the authority that all nodes trust (PEM)",
        OURS,
        metavar="FILE",
        ours=True,
    ),
)

BY_DEST = {option.dest: option for option in TABLE}
