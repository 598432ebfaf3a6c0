"""A TorchX component: `torchx run -s SCHEDULER elastane.torchx.run -j 1:4x8 --script train.py`.

It owns the translation of TorchX's arguments into one role, whose replicas are the nodes of a job
and each start `elastane run`. Only this module imports torchx. It fails with UsageError for an
invalid `-j` or a missing script; each replica reports what `elastane run` refuses.

TorchX reads annotations from the source, and its release 0.7 knows them only in typing's spelling.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Dict, List, Optional, Tuple

import torchx
from torchx import specs

from elastane.errors import UsageError

__all__ = ["run"]

_SIZE = re.compile(r"(?:(?:(\d+):)?(\d+)x)?(\d+|auto|cpu|gpu)")
# The backends whose coordinator is on one of the replicas.
_HOSTED = ("elastane", "c10d", "static")
# Two replicas may be on one host. Replica 0 becomes rank 0, whose output people read.
_IDENTITY = [
    *("--rdzv-id", specs.macros.app_id),
    *("--node-rank", specs.macros.replica_id),
    *("--node-id", f"replica-{specs.macros.replica_id}"),
]
# TorchX gives replica 0 of a pod or of AWS Batch no name at which other replicas reach it.
_FIND_HOST = (
    f'host="$${{{specs.macros.rank0_env}:-localhost}}"; '
    'if [ "$$host" = localhost ] && [ -n "$$KUBERNETES_SERVICE_HOST$$AWS_BATCH_JOB_ID" ]; '
    'then host="$$HOSTNAME"; fi; '
)


def run(  # noqa: PLR0913 - TorchX makes options of them
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    j: str = "1x1",
    max_restarts: int = 0,
    in_place: bool = False,
    rdzv_backend: str = "elastane",
    rdzv_endpoint: Optional[str] = None,
    rdzv_port: int = 29400,
    image: str = torchx.IMAGE,
    name: Optional[str] = None,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Describe a job of `elastane run`, with a replica for each node; raise UsageError.

    Args:
        script_args: arguments of the script
        script: the script, as the image or the working folder has it
        m: the module to run in place of a script
        j: [[MIN:]NODESx]WORKERS, workers on each node: a number, auto, cpu or gpu
        max_restarts: how often workers may be restarted after failures, in total
        in_place: a lost worker of an unmodified DDP script leaves the others running
        rdzv_backend: elastane, whose coordinator is on replica 0; static; or a store
        rdzv_endpoint: where the nodes meet, if not on replica 0: the address of a store
        rdzv_port: the port on replica 0
        image: the container image, which has elastane; local_cwd needs none
        name: the name of the job and of its role, if not that of the script
        h: a named resource, in place of cpu, gpu and memMB
        cpu: CPUs of each replica
        gpu: GPUs of each replica
        memMB: memory of each replica in MB
        env: variables, also of other options: ELASTANE_TOKEN=...,ELASTANE_MIN_WORKERS=2,PET_TEE=3
        mounts: type=bind,src=/host,dst=/job[,readonly],...
        max_retries: how often the scheduler may start the job or a replica again
    """
    least, most, options = _size(j)
    options += ["--max-restarts", str(max_restarts), *(["--in-place"] if in_place else [])]
    meeting = _meeting(most, rdzv_backend, rdzv_endpoint, rdzv_port)
    stem, program = _program(script, m)
    role = specs.Role(
        name=name or stem,
        image=image,
        entrypoint="bash",
        args=["-c", meeting.command(options, [*program, *script_args])],
        env=dict(env or {}),
        num_replicas=most,
        min_replicas=least,
        max_retries=max_retries,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        port_map=meeting.ports,
        mounts=specs.parse_mounts(mounts or []),
    )
    return specs.AppDef(name=role.name, roles=[role])


def _size(j: str) -> Tuple[int, int, List[str]]:
    """Read `[[MIN:]NODESx]WORKERS`; return the least and the most nodes, and the options."""
    matched = _SIZE.fullmatch(j)
    if matched is None:
        raise UsageError(
            f"-j {j!r}",
            slug="bad-nnodes",
            expected="[[MIN:]NODESx]WORKERS, with WORKERS a number, auto, cpu or gpu",
            next_step="-j 2x8 for two nodes of eight workers, -j 1:4x8 for one to four nodes",
        )
    most = int(matched[2] or 1)
    least = int(matched[1] or most)
    return least, most, ["--nnodes", f"{least}:{most}", "--nproc-per-node", matched[3]]


def _program(script: Optional[str], module: Optional[str]) -> Tuple[str, List[str]]:
    """Return the program's name, and its words after the options."""
    if script and not module:
        return PurePath(script).stem, [script]
    if module and not script:
        return module.rpartition(".")[2], ["-m", module]
    raise UsageError(
        "both --script and -m" if script else "neither --script nor -m",
        slug="usage",
        expected="one of the two",
        next_step="torchx run elastane.torchx.run -j 1x2 --script train.py",
    )


@dataclass(frozen=True)
class _Meeting:
    """The rendezvous of the replicas: its options, and its port if that is on replica 0."""

    options: List[str]
    port: Optional[int] = None

    @property
    def ports(self) -> Dict[str, int]:
        return {} if self.port is None else {"elastane": self.port}

    def command(self, options: List[str], program: List[str]) -> str:
        """Return what bash runs on each replica."""
        agent = f"exec {shlex.join(['elastane', 'run', *options, *self.options])}"
        if self.port is None:
            return f"{agent} {shlex.join(program)}"
        return f'{_FIND_HOST}{agent} --rdzv-endpoint "$$host:{self.port}" {shlex.join(program)}'


def _meeting(most: int, backend: str, endpoint: Optional[str], port: int) -> _Meeting:
    on_replica_0 = endpoint is None and backend in _HOSTED
    if on_replica_0 and most == 1:
        return _Meeting(["--standalone"])
    options = ["--rdzv-backend", backend, *_IDENTITY]
    options += [] if endpoint is None else ["--rdzv-endpoint", endpoint]
    return _Meeting(options, port if on_replica_0 else None)
