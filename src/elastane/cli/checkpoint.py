"""`elastane checkpoint ACT WHERE`: lists, checks, shows, exports and prunes checkpoints.

Each act is a function of the parsed options that returns the exit code; `ACTS` is the table of
them. `storage` finds the checkpoints, `_checkpoint_view` prints them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastane.cli import _checkpoint_view as view
from elastane.cli.parser import Act, add_acts
from elastane.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from elastane.storage import FoundCheckpoint, Repository

SOUND, UNSOUND = 0, 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the acts."""
    add_acts(parser, "checkpoint", ACTS, _configure_act)


def _configure_act(parser: argparse.ArgumentParser, act: Act) -> None:
    parser.add_argument("where", metavar="WHERE", help="folder, or a URL that fsspec supports")
    act.configure(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(args: argparse.Namespace) -> int:
    """Run an act; raises the errors of the storage."""
    return ACTS[args.act].run(args)


def _repository(args: argparse.Namespace) -> Repository:
    from elastane.storage import Repository, open_storage

    return Repository(open_storage(args.where))


def _ls(args: argparse.Namespace) -> int:
    from elastane.storage.places import storage_errors

    repository = _repository(args)
    where = repository.storage.where
    with storage_errors(where):
        published, unfinished = repository.published(), repository.unfinished()
    if args.json:
        entries = [view.entry(found) for found in published]
        _print_json({"where": where, "checkpoints": entries, "unfinished": unfinished})
    else:
        _print(view.listing(where, published, unfinished))
    return SOUND


def _configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which", metavar="WHICH", nargs="*", help="step or folder name (default: all)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="treat checkpoints of a newer elastane as invalid"
    )
    parser.epilog = "exit status: 0 all that were read are valid; 1 one is not, or there are none"


def _verify(args: argparse.Namespace) -> int:
    from elastane.storage.places import storage_errors

    repository = _repository(args)
    where = repository.storage.where
    entries = []
    with storage_errors(where):
        chosen = _chosen(repository, args.which)
    for found in chosen:
        begun_s = time.monotonic()
        with storage_errors(where):
            reason = _verified(repository, found, fresh=True)
        entries.append(view.judged(found, reason, time.monotonic() - begun_s))
        if not args.json:
            _print([view.verdict(entries[-1])])
    if args.json:
        _print_json({"where": where, "checkpoints": entries})
    bad = [one for one in entries if one["reason"] and (args.strict or not one["newer"])]
    return UNSOUND if bad else SOUND


def _verified(repository: Repository, found: FoundCheckpoint, *, fresh: bool = False) -> str:
    """Return why a checkpoint is not valid, or an empty string."""
    from elastane.observe.progress import shown_progress

    total_bytes = found.manifest.size_bytes if found.manifest is not None else 0
    with shown_progress(f"verifying step {found.key.step}", total_bytes) as shown:
        return repository.verify(found, lambda done, _: shown.reach(done), fresh=fresh)


def _configure_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which", metavar="WHICH", nargs="?", help="step or folder name (default: the newest)"
    )


def _show(args: argparse.Namespace) -> int:
    from elastane.storage.places import storage_errors

    repository = _repository(args)
    with storage_errors(repository.storage.where):
        found = _chosen(repository, [args.which] if args.which else [])[0]
    if args.json:
        _print_json(view.entry(found) | {"files": view.files(found)})
    else:
        _print(view.details(found))
    return UNSOUND if found.reason else SOUND


def _configure_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep",
        type=int,
        required=True,
        metavar="N",
        help="number of valid checkpoints to keep, at least 1",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be removed, and remove nothing"
    )


def _prune(args: argparse.Namespace) -> int:
    from elastane.storage.places import storage_errors

    if args.keep < 1:
        raise UsageError(
            f"--keep {args.keep}: the last valid checkpoint is never removed",
            expected="a number of at least 1",
            next_step="elastane checkpoint prune WHERE --keep 1",
            slug="bad-option-value",
        )
    repository = _repository(args)
    where = repository.storage.where
    with storage_errors(where):
        removed = repository.prune(args.keep, dry_run=args.dry_run)
    if args.json:
        gone = [{"folder": one.folder, "why": one.why} for one in removed]
        _print_json({"where": where, "removed": gone, "dry_run": args.dry_run})
    else:
        _print(view.pruned(where, removed, dry_run=args.dry_run))
    return SOUND


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "to", metavar="FILE", help="output file; its suffix sets the format: .pt or .safetensors"
    )
    parser.add_argument(
        "--step", default="", metavar="N", help="step to export (default: the newest)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="export only the object of this name, such as model",
    )
    parser.epilog = "it is read whole into memory, and needs torch"


def _export(args: argparse.Namespace) -> int:
    from elastane.checkpoint.simple import export, require_writable
    from elastane.storage.places import storage_errors

    require_writable(Path(args.to))
    repository = _repository(args)
    where = repository.storage.where
    with storage_errors(where):
        found = _chosen(repository, [args.step] if args.step else [])[0]
        reason = _verified(repository, found)
    if reason:
        raise CheckpointError(
            f"{found.folder} is not valid: {reason}",
            where=where,
            expected="a checkpoint whose files are unchanged since their save",
            next_step=f"elastane checkpoint ls {where}, and --step with an older one",
            slug="checkpoint-invalid",
        )
    done = export(repository, found, Path(args.to), args.only)
    if args.json:
        _print_json(
            {"folder": found.folder, "path": done.path, "size_bytes": done.size_bytes}
            | {"left_out": list(done.left_out)}
        )
    else:
        _print(view.exported(found, done.path, done.size_bytes, done.left_out))
    return SOUND


def _chosen(repository: Repository, which: list[str]) -> list[FoundCheckpoint]:
    """Return the chosen checkpoints, newest first; CheckpointError for an unknown one."""
    published = repository.published()
    where = repository.storage.where
    for word in which or [""]:
        if not any(_is_meant(found, word) for found in published):
            raise CheckpointError(
                f"no checkpoint {word} at {where}" if word else view.none_at(where),
                slug="checkpoint-unknown",
                expected="a step, or a folder's name, that `ls` lists",
                next_step=f"elastane checkpoint ls {where}",
            )
    return [one for one in published if not which or any(_is_meant(one, word) for word in which)]


def _is_meant(found: FoundCheckpoint, word: str) -> bool:
    return not word or word == found.folder or word == str(found.key.step)


def _print(lines: list[str]) -> None:
    from elastane.observe.box import printable

    print("\n".join(printable(line) for line in lines), flush=True)


def _print_json(found: dict[str, Any]) -> None:
    json.dump(found, sys.stdout, indent=2)
    print()


ACTS = {
    "ls": Act("list the checkpoints in a folder or URL, and incomplete saves", _ls),
    "verify": Act(
        "read every byte of checkpoints and report invalid ones", _verify, _configure_verify
    ),
    "show": Act("show one checkpoint: what it contains, and its files", _show, _configure_show),
    "export": Act(
        "write a checkpoint as one file that other programs can read", _export, _configure_export
    ),
    "prune": Act(
        "remove all but the newest valid checkpoints, and abandoned saves", _prune, _configure_prune
    ),
}
