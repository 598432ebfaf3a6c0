"""The name of a job: the user's, or one that two different jobs never share.

Without `--rdzv-id`, a job of one node gets a random name. The nodes of a larger job must find the
same name before they meet, so the name is a fingerprint of what they have in common: endpoint,
program and node count. Two different jobs that meet at one endpoint by mistake thus have different
names, and the later one is refused with both. Two runs of the same command at the same time and
endpoint can be told apart only by `--rdzv-id`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import PurePath

from elastane.errors import ConfigurationError
from elastane.kubernetes.store.settings import POD_VARIABLE
from elastane.options.config import RendezvousConfig
from elastane.options.parser import Options
from elastane.protocol.limits import NAME_CHARS_MAX

_STEM_CHARS_MAX = 40
_UNSPECIFIED = ("", "none")


def job_id(
    options: Options, rendezvous: RendezvousConfig, nodes: tuple[int, int]
) -> tuple[str, bool]:
    """Return the job's name, and whether no other machine is meant to join."""
    named = options.text("rdzv_id")
    # As with torchrun, a job of one machine may get any name; an unusable name is replaced.
    if named not in _UNSPECIFIED and (rendezvous.backend != "standalone" or _is_plain(named)):
        check_name("--rdzv-id", named)
        return named, rendezvous.alone
    stem = _stem(options.script)
    if rendezvous.backend == "standalone" or nodes[1] == 1:
        return f"{stem}-{secrets.token_hex(4)}", True
    if rendezvous.store:
        raise ConfigurationError(
            f"a job of several nodes in a store ({rendezvous.backend}) needs a name",
            slug="rdzv-id-missing",
            where=rendezvous.store,
            expected="--rdzv-id, since the store remembers a job that ended",
            next_step=f"--rdzv-id {stem}-1, the same on all nodes and new for each job",
        )
    return f"{stem}-{fingerprint(options, rendezvous, nodes)}", False


def new_incarnation(environ: Mapping[str, str]) -> str:
    """Return a name that no other agent has; in a pod it begins with the pod's uid."""
    pod = environ.get(POD_VARIABLE, "")
    return f"{pod}.{secrets.token_hex(8)}" if pod else secrets.token_hex(8)


def fingerprint(options: Options, rendezvous: RendezvousConfig, nodes: tuple[int, int]) -> str:
    """Return ten hexadecimal digits computed from what all nodes of a job have in common."""
    kind = [name for name in ("module", "no_python", "run_path") if options.flag(name)]
    parts = [
        rendezvous.host,
        str(rendezvous.port),
        *map(str, nodes),
        *kind,
        options.script,
        *options.script_args,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def check_name(option: str, name: str) -> None:
    """Refuse a name that cannot be part of a path or of a log line."""
    if _is_plain(name):
        return
    raise ConfigurationError(
        f"{option} = {name!r}",
        slug="bad-name",
        expected=f"1 to {NAME_CHARS_MAX} printable characters without slashes; it becomes part "
        "of file names",
    )


def _is_plain(name: str) -> bool:
    plain = name.isprintable() and not set(name) & {"/", "\\"} and name not in (".", "..")
    return plain and 0 < len(name) <= NAME_CHARS_MAX


def _stem(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", PurePath(script).name.removesuffix(".py"))
    return stem[-_STEM_CHARS_MAX:].lstrip(".-") or "job"
