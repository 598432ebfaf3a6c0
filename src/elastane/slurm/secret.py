"""The secret of a Slurm job, derived from a key of the user.

The key is one file in the user's folder, which the nodes of a cluster share as they share ~/.ssh.
The first agent that needs it makes it. Each run of a job gets a token of its own, so that an agent
of the run before a requeue cannot join the next one. Without a usable file there is no token; one
that others may read is refused with ConfigurationError.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.slurm.step import SlurmStep

_KEY_BYTES = 32
_NAME = "slurm-key"


def token_of(step: SlurmStep, environ: Mapping[str, str]) -> str:
    """Return the token of this run of the step; empty if there is no place for a key."""
    try:
        key = _key(_folder(environ))
    except OSError:
        return ""
    run = f"{step.cluster}/{step.job}/{step.number}/{step.restarts}"
    return hmac.new(key, run.encode(), hashlib.sha256).hexdigest()


def _folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "elastane"
    home = environ.get("HOME", "")
    if not Path(home).is_absolute():
        raise FileNotFoundError("HOME")
    return Path(home) / ".config" / "elastane"


def _key(folder: Path) -> bytes:
    """Return the key; the agents of all nodes may come here at the same moment."""
    path = folder / _NAME
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f".{_NAME}.{secrets.token_hex(8)}"
        draft.touch(mode=0o600, exist_ok=False)
        try:
            draft.write_text(secrets.token_hex(_KEY_BYTES) + "\n", encoding="ascii")
            # A link is made once, on NFS too: the first agent wins, and all others read its key.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ConfigurationError(
                f"{path} can be read by others, or belongs to another user",
                slug="slurm-key",
                expected="a file of this user with mode 600",
                next_step=f"rm {path}, which makes a new key at the next job",
            )
        key = file.read(4 * _KEY_BYTES).strip()
    if len(key) != 2 * _KEY_BYTES:
        raise ConfigurationError(
            f"{path} holds no key",
            slug="slurm-key",
            expected=f"{2 * _KEY_BYTES} hexadecimal digits",
            next_step=f"rm {path}, which makes a new key at the next job",
        )
    return key
