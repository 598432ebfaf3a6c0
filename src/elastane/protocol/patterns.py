"""The table of signs by which a worker's output tells what ended it. Pure.

Each pattern has a class, whether another attempt may succeed, and what a person can do. The
coordinator finds the next step of a failed job by it; `elastane explain` finds the class of each
failure, also by the patterns of a user, which come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from elastane.protocol.verdicts import Outlook

# The length of a line that is quoted.
CLUE_CHARS_MAX = 300
# A line that is longer is compared up to here.
_LINE_CHARS_MAX = 4096

# What gloo and NCCL say when a peer is gone (torch 2.13); compared in lower case.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "read timeout",
    "timed out waiting",
)


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A sign in one line, and what it means. `kind` is a stable word.

    `anywhere`: the sign counts in each line of an output. Otherwise it counts in the line that
    names the error alone, since a script may print such words and continue. `{}` in the next step
    is the first group of the sign.
    """

    kind: str
    sign: re.Pattern[str]
    outlook: Outlook
    next_step: str
    anywhere: bool = False

    def clue(self, line: str) -> Clue | None:
        """Return what a line tells; None if it has not the sign."""
        found = self.sign.search(line[:_LINE_CHARS_MAX])
        if found is None:
            return None
        group = found.group(1) if found.re.groups and found.group(1) else ""
        return Clue(
            kind=self.kind,
            outlook=self.outlook,
            line=line.strip()[:CLUE_CHARS_MAX],
            next_step=self.next_step.replace("{}", group),
        )


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """The class of a failure, and the line that tells it."""

    kind: str
    outlook: Outlook
    line: str
    next_step: str


def _pattern(
    kind: str, outlook: Outlook, sign: str, next_step: str, *, anywhere: bool = False
) -> Pattern:
    return Pattern(
        kind=kind, sign=re.compile(sign), outlook=outlook, next_step=next_step, anywhere=anywhere
    )


_MAY, _SAME, _UNKNOWN = Outlook.MAY_PASS, Outlook.SAME_AGAIN, Outlook.UNKNOWN
# torch.save on a full disk says one of the last three (torch 2.13).
DISK_FULL = _pattern(
    "disk-full",
    _SAME,
    r"No space left on device|Disk quota exceeded|basic_ios::clear: iostream error"
    r"|PytorchStreamWriter failed writing|inline_container.* unexpected pos \d+ vs \d+",
    "free space on the disk of that node (df -h), or write elsewhere",
)
MISSING_FILE = _pattern(
    "missing-file",
    _SAME,
    r"^FileNotFoundError: ",
    "give each node the file that the error names, or its right path",
)
# The first that fits counts, so a sign of one cause stands before one of several causes.
PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        "gpu-memory",
        _SAME,
        r"(CUDA|HIP|XPU) out of memory|OutOfMemoryError|CUDA error: out of memory"
        r"|Failed to CUDA (calloc|malloc)",
        "let each worker use less memory of its GPU: smaller batches, sharding",
    ),
    _pattern(
        "memory",
        _UNKNOWN,
        r"^(?:\w+\.)*\w*MemoryError\b|(Cannot|can't) allocate memory|\(out of memory[:,]",
        "give the workers more memory, or let each use less: fewer of them on this node, smaller"
        " batches, fewer loader processes",
    ),
    DISK_FULL,
    _pattern(
        "shared-memory",
        _SAME,
        r"DataLoader worker .*killed by signal: Bus error",
        "give the data loader more shared memory (df -h /dev/shm; docker run --shm-size), or let it"
        " use less: fewer num_workers, smaller batches",
    ),
    _pattern(
        "loader-killed",
        _UNKNOWN,
        r"DataLoader worker .*killed by signal: Killed",
        "find who killed the process of the data loader: often the kernel or a container that ran"
        " out of memory (dmesg | grep -i killed); fewer num_workers need less",
    ),
    # The second is what a data loader says whose tensors come as descriptors (torch 2.13).
    _pattern(
        "open-files",
        _SAME,
        r"Too many open files|received 0 items of ancdata",
        "raise the limit of open files where elastane run is started: ulimit -n 65536",
    ),
    # What a shell, or a program that starts another, makes of its SIGKILL: 128 and its number.
    _pattern(
        "killed-child",
        _UNKNOWN,
        r"^exit code 137$",
        "find who sent SIGKILL, which a shell reports as exit code 137: often the kernel or a"
        " container that ran out of memory (dmesg | grep -i killed)",
    ),
    # What follows the name is of a file that hides a package.
    _pattern(
        "missing-module",
        _SAME,
        r"^(?:\S+: ){1,2}No module named '?([\w.]+)'?$",
        "install {} in the Python environment of elastane run, or add its folder to PYTHONPATH",
    ),
    _pattern(
        "import-error",
        _SAME,
        r"^ImportError: |undefined symbol: |cannot open shared object file"
        r"|version [`']\S+' not found|numpy\.(core\.multiarray|dtype size changed)",
        "reinstall the package that the traceback names, for this Python and this torch: the parts"
        " of the environment do not fit together",
    ),
    _pattern(
        "gpu-ecc",
        _MAY,
        r"uncorrectable ECC error|[Dd]ouble[- ][Bb]it ECC|\bDBE\b.*\bECC\b|row remapping failure",
        "take that node's GPU out of use and reset it (nvidia-smi -q -d ECC, nvidia-smi -r), and"
        " start an agent on another node; --health-check keeps such a node out",
        anywhere=True,
    ),
    _pattern(
        "gpu-xid",
        _MAY,
        r"\bNVRM: Xid\b.*?: (\d+)",
        "look up Xid {} in NVIDIA's list, and start an agent on another node; --health-check keeps"
        " such a node out",
        anywhere=True,
    ),
    _pattern(
        "gpu-lost",
        _MAY,
        r"fallen off the bus|GPU is lost|busy or unavailable$"
        r"|No CUDA GPUs are available|no CUDA-capable device|CUDA driver initialization failed",
        "see whether the node still has its GPUs (nvidia-smi, dmesg | grep -i xid), and start an"
        " agent on another node",
        anywhere=True,
    ),
    _pattern(
        "gpu-assert",
        _SAME,
        r"device-side assert triggered",
        "mend the script: an index or a label is out of its range; CUDA_LAUNCH_BLOCKING=1 names the"
        " line",
    ),
    _pattern(
        "gpu-build",
        _SAME,
        r"no kernel image is available|driver version is insufficient|NVIDIA driver on your system"
        r" is too old|not compiled with CUDA",
        "install a build of torch that fits the GPU and its driver (elastane doctor)",
    ),
    _pattern(
        "gpu-access",
        _UNKNOWN,
        r"illegal memory access|misaligned address|unspecified launch failure"
        r"|an illegal instruction was encountered",
        "run once with CUDA_LAUNCH_BLOCKING=1, which names the kernel; if it is on one node only,"
        " suspect its GPU (nvidia-smi -q -d ECC)",
    ),
    _pattern(
        "nccl-timeout",
        _UNKNOWN,
        r"[Ww]atchdog caught collective operation timeout|Some NCCL operations have failed or timed"
        r" out",
        "find the rank that did not enter the collective: the culprits above, and"
        " TORCH_FR_BUFFER_SIZE=2000 for its line",
        anywhere=True,
    ),
    _pattern(
        "nccl",
        _MAY,
        r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclInvalidUsage|NCCL error|"
        r"NCCL WARN (?!.*(environment|ignored))",
        "check the network of that node (elastane doctor --nodes N; NCCL_SOCKET_IFNAME), and read"
        " NCCL's own lines with NCCL_DEBUG=INFO",
        anywhere=True,
    ),
    _pattern(
        "stale-file",
        _MAY,
        r"Stale (NFS )?file handle|nfs: server \S+ not responding|Remote I/O error"
        r"|Transport endpoint is not connected|Input/output error",
        "check the storage of that node: its mounts, the file server and the disk (dmesg, df)",
        anywhere=True,
    ),
    _pattern(
        "read-only",
        _MAY,
        r"Read-only file system",
        "mount that file system for writing, or write elsewhere; after an error of its disk the"
        " kernel mounts it read-only (dmesg)",
    ),
    _pattern(
        "network",
        _MAY,
        r"No route to host|Network is unreachable|Name or service not known"
        r"|Temporary failure in name resolution|SSLError|HTTPError: 5\d\d",
        "check the network and the names that this node can resolve (elastane doctor)",
    ),
    MISSING_FILE,
    _pattern(
        "permission",
        _SAME,
        r"^PermissionError: ",
        "let the job's user read and write what the error names",
    ),
)
# Of these, nothing but the words says that another worker is the cause.
_PEER_LOST = _pattern(
    "peer-lost",
    _MAY,
    "(?i:" + "|".join(map(re.escape, LOST_PEER)) + ")",
    "look at the cause of the incident: this worker only lost another one",
)
# By which each other end has a class.
_ENDS = (
    _pattern("hung", _UNKNOWN, r"since it hung\)", "read its stacks, which its agent asked it for"),
    _pattern(
        "python",
        _UNKNOWN,
        r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Timeout)\b",
        "mend the script; the traceback has the line",
    ),
    _pattern(
        "killed",
        _MAY,
        r"^SIG(KILL|TERM|INT|HUP|QUIT|XCPU|USR1|USR2)\b",
        "find who sent SIG{}: a scheduler, a person, or the kernel (dmesg | grep -i killed)",
    ),
    _pattern("crash", _UNKNOWN, r"^(SIG\w+|signal \d+)", "read its stacks: {} ended it"),
    _pattern("exit", _UNKNOWN, r"^exit code \d+", "read its log: it gave no reason"),
)


def find_clue(lines: Iterable[str], patterns: Sequence[Pattern] = PATTERNS) -> Clue | None:
    """Return what the lines about an end tell; the first pattern that fits one of them counts."""
    told = tuple(lines)
    clues = (pattern.clue(line) for pattern in patterns for line in told)
    return next((clue for clue in clues if clue is not None), None)


def class_of(ends: Sequence[str], output: Iterable[str], own: Sequence[Pattern] = ()) -> Clue:
    """Return the class of a failure.

    `ends`: how the process ended, and the line that names its error. `output`: the lines that it
    wrote, in which the last sign counts. `own`: the patterns of a user.
    """
    found = find_clue(ends, (*own, _PEER_LOST, *PATTERNS))
    if found is None:
        anywhere = tuple(one for one in (*own, *PATTERNS) if one.anywhere)
        for line in output:
            found = find_clue((line,), anywhere) or found
    found = found or find_clue(ends, _ENDS)
    return found or Clue(kind="unknown", outlook=_UNKNOWN, line="", next_step="read its log")
