"""Reads what `rules` judges of this node: from /proc, the kernel, and two programs.

Everything that can hang has a limit: the import of torch is a process of its own, and so is the
driver's nvidia-smi. It writes one file of 1 MiB into each folder and removes it, and opens one
connection to the endpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from elastane.doctor.network_rules import GlooPlace, NodePage
from elastane.doctor.rules import EndpointFacts, FolderFacts, GpuFacts, NodeFacts, TorchFacts
from elastane.errors import ElastaneError
from elastane.options.facts import versions
from elastane.process.endpoint import Endpoint, is_mine, local_addresses
from elastane.process.files import runtime_folder
from elastane.version import __version__

# From a cold network file system the import takes a minute; one that takes longer hangs.
IMPORT_LIMIT_S = 180.0
DRIVER_LIMIT_S = 30.0
CONNECT_LIMIT_S = 3.0
_PROBE = """
import json, time
begun = time.monotonic()
import torch
import_s = time.monotonic() - begun
dist = torch.distributed.is_available()
cuda = torch.cuda.is_available()
count = torch.cuda.device_count() if cuda else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist else ""
print(json.dumps({
    "version": torch.__version__, "import_s": import_s, "cuda": torch.version.cuda or "",
    "devices": [torch.cuda.get_device_name(i) for i in range(count)],
    "has_distributed": dist, "nccl": nccl,
}))
"""
_DRIVER = ("nvidia-smi", "--format=csv,noheader,nounits")
_QUERY = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
_MIB = 1 << 20
_CALLS = ("pidfd_open", "memfd_create", "pidfd_send_signal")
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_SIOCGIFADDR = 0x8915
_SHARED_MEMORY = "/dev/shm"
# adjtimex's state of a clock that is not synchronized.
_UNSYNCHRONIZED, _CLOCK_ERROR = 0x40, 5


def read_facts(
    folders: Mapping[str, str],
    workers: int,
    endpoint: Endpoint | None,
    environ: Mapping[str, str],
) -> NodeFacts:
    """Return the facts; `folders`: what each is for, and its path; `workers`: 0 for the default."""
    gpus, gpu_error = read_gpus()
    torch = read_torch(environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = socket.gethostname()
    card = environ.get("GLOO_SOCKET_IFNAME", "")
    return NodeFacts(
        workers=workers or len(torch.devices) or 1,
        python=platform.python_version(),
        elastane=__version__,
        torch=torch,
        kernel=platform.release(),
        missing_calls=_missing_calls(),
        gpus=gpus,
        gpu_error=gpu_error,
        shared_memory=_free(_SHARED_MEMORY),
        shared_memory_error=read_folder("shared memory", _SHARED_MEMORY).error,
        descriptors=hard,
        soft_descriptors=soft,
        processes_left=_processes_left(),
        cpus=_cpus(),
        host_cpus=os.cpu_count() or 1,
        memory=_memory(),
        host=host,
        host_addresses=resolved(host),
        own_addresses=tuple(sorted(a for a in local_addresses() if not _is_loopback(a))),
        interface=_default_interface(),
        gloo_card=card,
        gloo_error=read_gloo(environ, read_interfaces()).error if card else "",
        clock_is_synchronized=_clock_is_synchronized(),
        folders=(
            _read_runtime_folder(environ),
            *(read_folder(use, path) for use, path in folders.items()),
        ),
        endpoint=read_endpoint(endpoint) if endpoint else None,
    )


def read_torch(environ: Mapping[str, str], program: str = _PROBE) -> TorchFacts:
    """Ask a fresh interpreter about torch."""
    words = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, env=dict(environ),
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"its import did not end within {IMPORT_LIMIT_S:g} s")
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        last = lines[-1] if lines else f"exit code {done.returncode}"
        return TorchFacts(error=last)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return TorchFacts(**{**found, "devices": tuple(found["devices"])})
    except (IndexError, ValueError, KeyError, TypeError):
        return TorchFacts(error=f"it printed {done.stdout[-200:]!r}")


def read_gpus(command: Iterable[str] = _DRIVER) -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs that NVIDIA's driver shows, and why its command failed, if it did."""
    words = [*command, f"--query-gpu={_QUERY}"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False
        )
    except FileNotFoundError:
        return (), ""
    except subprocess.TimeoutExpired:
        return (), f"no answer within {DRIVER_LIMIT_S:g} s"
    except OSError as error:
        return (), str(error.strerror)
    if done.returncode:
        text = (done.stdout + done.stderr).strip().splitlines()
        return (), text[-1] if text else f"exit code {done.returncode}"
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.count(",") >= 4), ""


def _gpu(line: str) -> GpuFacts:
    index, name, memory, used, errors = (word.strip() for word in line.split(",")[:5])
    return GpuFacts(
        index=_number(index),
        name=name,
        memory=_number(memory) * _MIB,
        used=_number(used) * _MIB,
        uncorrected=_number(errors),
    )


def _number(word: str) -> int:
    """Return the number of a cell; 0 where the device has none ("[N/A]")."""
    return int(word) if word.isdigit() else 0


def _read_runtime_folder(environ: Mapping[str, str]) -> FolderFacts:
    use = "runtime folder"
    try:
        return read_folder(use, str(runtime_folder(environ)))
    except OSError as error:
        path = environ.get("XDG_RUNTIME_DIR") or environ.get("TMPDIR") or "/tmp"
        return FolderFacts(use=use, path=path, error=error.strerror or str(error))
    except ElastaneError as error:
        return FolderFacts(use=use, path="", error=f"{error.what}; {error.next_step}")


def read_folder(use: str, path: str) -> FolderFacts:
    """Write, sync, lock and remove a file in the nearest folder above `path` that is there."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".elastane-doctor-") as file:
            begun = time.monotonic()
            file.write(bytes(_MIB))
            file.flush()
            os.fsync(file.fileno())
            sync_s = time.monotonic() - begun
            locks = _takes_locks(file.fileno())
        room = os.statvfs(folder)
    except OSError as error:
        return FolderFacts(use=use, path=path, error=error.strerror or str(error))
    return FolderFacts(
        use=use,
        path=path,
        free=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        sync_s=sync_s,
        locks=locks,
    )


def _takes_locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_endpoint(endpoint: Endpoint) -> EndpointFacts:
    """Try a connection to the endpoint."""
    where = f"{endpoint.host}:{endpoint.port}"
    addresses = resolved(endpoint.host)
    if not addresses:
        return EndpointFacts(
            endpoint=where, outcome=f"host {endpoint.host!r} does not resolve here"
        )
    try:
        socket.create_connection((addresses[0], endpoint.port), CONNECT_LIMIT_S).close()
        outcome = "connected"
    except OSError as error:
        outcome = connection_outcome(error)
    return EndpointFacts(
        endpoint=where, addresses=addresses, is_here=is_mine(addresses), outcome=outcome
    )


def connection_outcome(error: OSError) -> str:
    """Return why a connection could not be made: "refused", "timeout", or the system's text."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    return error.strerror or str(error)


def resolved(host: str) -> tuple[str, ...]:
    """Return the addresses of a host's name here; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_page(endpoint: Endpoint, environ: Mapping[str, str]) -> NodePage:
    """Return what other nodes need to know of this one, before anything is measured."""
    interfaces = read_interfaces()
    low, high = (int(word) for word in (_lines(_PORT_RANGE) or ["0 0"])[0].split())
    return NodePage(
        name=socket.gethostname(),
        versions=versions(),
        address="",
        probe_port=0,
        gloo=read_gloo(environ, interfaces),
        interfaces=tuple(interfaces.items()),
        ports=(low, high),
        endpoint=resolved(endpoint.host),
    )


def read_gloo(environ: Mapping[str, str], interfaces: Mapping[str, tuple[str, ...]]) -> GlooPlace:
    """Return where gloo would listen in a worker: as torch chooses if the script does not."""
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        chosen_by = f"GLOO_SOCKET_IFNAME={named}"
        cards = named.split(",")
        missing = [card for card in cards if card not in interfaces]
        if missing:
            return GlooPlace(chosen_by=chosen_by, error=f"there is no network card {missing[0]}")
        if not interfaces[cards[0]]:
            return GlooPlace(chosen_by=chosen_by, error=f"{cards[0]} has no address")
        return GlooPlace(chosen_by=chosen_by, address=interfaces[cards[0]][0])
    host = socket.gethostname()
    own = local_addresses()
    fit = (one for one in resolved(host) if one in own or one.startswith("127."))
    # torch takes the loopback if the name has no address of this host.
    return GlooPlace(chosen_by=f"the host's name {host}", address=next(fit, "127.0.0.1"))


def read_interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each network card, without those of its link alone."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, addresses in found.items():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    for line in _lines("/proc/net/if_inet6"):
        number, *_, name = line.split()
        address = str(ipaddress.IPv6Address(bytes.fromhex(number)))
        if name in found and not address.startswith("fe80:"):
            found[name].append(address)
    return {name: tuple(addresses) for name, addresses in found.items()}


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "fe80:")) or address == "::1"


def _default_interface() -> str:
    for line in _lines("/proc/net/route")[1:]:
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return ""


def _missing_calls() -> tuple[str, ...]:
    """Return the system calls that this kernel or sandbox refuses."""
    missing = [name for name in _CALLS if not _has_call(name)]
    return tuple(missing)


def _has_call(name: str) -> bool:
    with contextlib.suppress(OSError):
        if name == "memfd_create":
            os.close(os.memfd_create("elastane-doctor"))
            return True
        pidfd = os.pidfd_open(os.getpid())
        try:
            if name == "pidfd_send_signal":
                from signal import pidfd_send_signal

                pidfd_send_signal(pidfd, 0)
        finally:
            os.close(pidfd)
        return True
    return False


def _free(path: str) -> int | None:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _processes_left() -> int | None:
    """Return how many processes and threads this user's limit and the cgroup leave."""
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        mine = sum(_threads_of(entry) for entry in Path("/proc").glob("[0-9]*"))
        left.append(soft - mine)
    for limit, used in _cgroup_pairs("pids.max", "pids.current"):
        left.append(limit - used)
    return max(0, min(left)) if left else None


def _threads_of(entry: Path) -> int:
    try:
        return len(os.listdir(entry / "task")) if entry.stat().st_uid == os.getuid() else 0  # noqa: PTH208 - counted only
    except OSError:
        return 0


def _cpus() -> float:
    """Return how many CPUs this process may use: its affinity, and the quota of its cgroup."""
    allowed = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups():
        words = "".join(_lines(f"{folder}/cpu.max")).split()
        if len(words) == 2 and words[0].isdigit():
            allowed = min(allowed, int(words[0]) / int(words[1]))
    return allowed


def _memory() -> int:
    """Return the memory that is available: of the host, and of the cgroup."""
    found = dict(line.split(":", 1) for line in _lines("/proc/meminfo") if ":" in line)
    left = [int(found.get("MemAvailable", "0").split()[0]) << 10]
    left += [limit - used for limit, used in _cgroup_pairs("memory.max", "memory.current")]
    return max(0, min(left))


def _cgroup_pairs(limit: str, used: str) -> list[tuple[int, int]]:
    pairs = []
    for folder in _cgroups():
        words = [" ".join(_lines(f"{folder}/{name}")) for name in (limit, used)]
        if all(word.isdigit() for word in words):
            pairs.append((int(words[0]), int(words[1])))
    return pairs


def _cgroups() -> list[str]:
    """Return the folders of this process's cgroup (version 2) and of those above it."""
    for line in _lines("/proc/self/cgroup"):
        if line.startswith("0::"):
            folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
            above = [one for one in folder.parents if one.is_relative_to("/sys/fs/cgroup")]
            return [str(folder), *map(str, above)]
    return []


def _clock_is_synchronized() -> bool | None:
    """Ask the kernel by adjtimex, which changes nothing with an empty request."""
    request = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None).adjtimex(request)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    # struct timex: modes (4 bytes and 4 of padding), four longs, then the status.
    status = int.from_bytes(request.raw[40:44], sys.byteorder)
    return not (state == _CLOCK_ERROR and status & _UNSYNCHRONIZED)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
