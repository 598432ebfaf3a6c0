"""What torch's flight recorder left of a worker that failed: its collectives that did not complete.

torch's watchdog of NCCL writes the file before it ends a worker. Its name is a prefix and the rank.
The format (2.10 of torch 2.13) is a pickle of plain containers, or JSON. Only plain containers,
numbers and texts are unpickled, of a file of this user that is younger than the worker.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

# The first of these that is set is the prefix; torch's default is in the cache folder.
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT = "torch/comm_lib_trace_rank_"
# 2,000 records with their stacks are some 3 MB.
_FILE_BYTES_MAX = 64 << 20
_GROUPS_SHOWN_MAX = 2
_WORD_CHARS_MAX = 100
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/elastane/process/")


def dump_path(environ: Mapping[str, str], rank: int) -> Path:
    """Return where torch writes the flight recorder of this rank."""
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"
    prefix = next(filter(None, map(environ.get, _PREFIXES)), f"{cache}/{_DEFAULT}")
    return Path(f"{prefix}{rank}")


def read_open_collectives(path: Path, since_s: float) -> str:
    """Return in words the first open collective of each group in a file; "" if it shows none.

    A file that was written before `since_s`, in seconds since 1970, is of another worker.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mtime < since_s:
                return ""
            data = file.read(_FILE_BYTES_MAX)
    except OSError:
        return ""
    found = open_collectives(data)
    return f"torch's flight recorder ({path}): {found}" if found else ""


def open_collectives(data: bytes) -> str:
    """Return in words the first open collective of each group; "" if `data` shows none."""
    try:
        dump = json.loads(data) if data.startswith(b"{") else _Plain(io.BytesIO(data)).load()
        entries = [each for each in dump["entries"] if _is_open(each)]
        first: dict[str, Any] = {}
        for each in sorted(entries, key=lambda each: int(each["collective_seq_id"])):
            first.setdefault(str(each["process_group"][1] or each["process_group"][0]), each)
        return "; ".join(_words(name, each) for name, each in [*first.items()][:_GROUPS_SHOWN_MAX])
    except Exception:  # Any damage to it, in a format that may change.
        return ""


class _Plain(pickle.Unpickler):
    """An unpickler that makes no object of any class."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain value")


def _is_open(entry: Mapping[str, Any]) -> bool:
    is_over = entry.get("retired") or entry.get("state") == "completed"
    return not is_over and not entry.get("is_p2p")


def _words(group: str, entry: Mapping[str, Any]) -> str:
    operation = str(entry["profiling_name"]).rpartition(":")[2][:_WORD_CHARS_MAX]
    number = int(entry["collective_seq_id"])
    site = _site(entry.get("frames") or ())
    return f"{operation} #{number} of {group[:_WORD_CHARS_MAX]}{site} did not complete"


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:
        file = str(frame["filename"])
        if not any(part in file for part in _LIBRARIES):
            return f" ({PurePath(file).name}:{int(frame['line'])})"
    return ""
