"""The output of `elastane checkpoint`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastane.observe.progress import size_text

if TYPE_CHECKING:
    from elastane.storage import FoundCheckpoint
    from elastane.storage.retention import Removal

_COLUMNS = ("step", "written", "size", "world", "era.round.attempt", "why", "folder")


def entry(found: FoundCheckpoint) -> dict[str, Any]:
    """Return the JSON fields of a checkpoint."""
    key, manifest = found.key, found.manifest
    fields = {
        "folder": found.folder,
        "step": key.step,
        "era": key.era,
        "round": key.round,
        "attempt": key.attempt,
        "nonce": found.nonce,
        "reason": found.reason,
        "newer": found.newer,
    }
    if manifest is not None:
        about = manifest.about
        fields |= {
            "bytes": manifest.size_bytes,
            "job": about.job,
            "world": about.world,
            "created_s": about.created_s,
            "why": about.reason,
            "versions": about.versions,
        }
    return fields


def judged(found: FoundCheckpoint, reason: str, took_s: float) -> dict[str, Any]:
    """Return the JSON fields of a checkpoint that was read."""
    return entry(found) | {"reason": reason, "valid": not reason, "seconds": round(took_s, 3)}


def files(found: FoundCheckpoint) -> list[dict[str, Any]]:
    """Return the files of a checkpoint, with their digests."""
    manifest = found.manifest
    return [
        {"name": file.name, "bytes": file.size_bytes, "digests": list(file.digests)}
        for file in (manifest.files if manifest is not None else ())
    ]


def none_at(where: str) -> str:
    """Return the text for a place without checkpoints; the user may have misspelt the folder."""
    if "://" in where or Path(where).is_dir():
        return f"no checkpoints at {where}"
    near = next(folder for folder in Path(where).absolute().parents if folder.is_dir())
    return f"no checkpoints at {where}: there is no such folder; next: ls {near}"


def listing(
    where: str, published: Sequence[FoundCheckpoint], unfinished: Sequence[str]
) -> list[str]:
    """Return the table of the checkpoints at a place."""
    if not published and not unfinished:
        return [none_at(where)]
    lines = _table([_COLUMNS, *map(_row, published)]) if published else []
    lines += [f"{found.folder}: not valid: {found.reason}" for found in published if found.reason]
    return lines + [f"{name}: a save that is running, or did not complete" for name in unfinished]


def verdict(fields: dict[str, Any]) -> str:
    """Return the line for a checkpoint that was read."""
    if fields["reason"]:
        word = "not for this elastane" if fields["newer"] else "NOT VALID"
        return f"{fields['folder']}: {word}: {fields['reason']}"
    took_s = max(fields["seconds"], 0.001)
    pace = size_text(fields["bytes"] / took_s)
    return f"{fields['folder']}: valid, {size_text(fields['bytes'])} in {took_s:.2f} s ({pace}/s)"


def details(found: FoundCheckpoint) -> list[str]:
    """Return everything in a manifest except the digests."""
    lines = [found.folder]
    if found.reason:
        lines.append(f"  not valid  {found.reason}")
    if found.manifest is None:
        return lines
    about, key = found.manifest.about, found.key
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about.versions.items()))
    lines += [
        f"  step       {key.step}",
        f"  job        {about.job}",
        f"  written    {_moment(about.created_s)}, because of: {about.reason}",
        f"  fence      era {key.era}, round {key.round}, attempt {key.attempt}",
        f"  world      {about.world}",
        f"  versions   {versions}",
        f"  size       {size_text(found.manifest.size_bytes)} in {len(found.manifest.files)} files",
    ]
    rows = [(f"    {file.name}", size_text(file.size_bytes)) for file in found.manifest.files]
    return lines + _table(rows)


def pruned(where: str, removed: Sequence[Removal], *, dry_run: bool) -> list[str]:
    """Return one line for each removed folder."""
    word = "would be removed" if dry_run else "removed"
    lines = [f"{one.folder}: {word}: {one.why}" for one in removed]
    return lines or [f"nothing to remove at {where}"]


def exported(
    found: FoundCheckpoint, path: str, size_bytes: int, left_out: Sequence[str]
) -> list[str]:
    """Return the lines about the exported file, and about parts that the format cannot store."""
    lines = [f"{path}: step {found.key.step}, {size_text(size_bytes)}"]
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        lines.append(f"no tensors, and left out: {', '.join(left_out[:3])}{more}")
    return lines


def _row(found: FoundCheckpoint) -> tuple[str, ...]:
    key = found.key
    fence = f"{key.era}.{key.round}.{key.attempt}"
    if found.manifest is None:
        return (str(key.step), "", "", "", fence, "", found.folder)
    about = found.manifest.about
    held = size_text(found.manifest.size_bytes)
    written = _moment(about.created_s)
    return (str(key.step), written, held, str(about.world), fence, about.reason, found.folder)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(text.ljust(width) for text, width in row).rstrip() for row in cells]


def _moment(wall_s: float) -> str:
    try:
        return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{wall_s:g} s"
