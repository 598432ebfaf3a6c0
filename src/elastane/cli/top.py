"""`elastane top`: one screen about a job, drawn again and again, with the data of the web page.

The command reads the job's event log and queries its coordinator; it changes nothing. It ends with
the job, and the last frame stays in the terminal. Without a terminal it prints one frame.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli.parser import add_job_options
from elastane.cli.status import add_tls_options, tls_of
from elastane.errors import UsageError

if TYPE_CHECKING:
    from elastane.process.files import JobRegistry


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    about = "name of the job, or its log folder (default: the one that runs on this machine)"
    add_job_options(parser, about, nargs="?", default="")
    add = parser.add_argument
    add("--once", action="store_true", help="print one frame, as without a terminal")
    add_tls_options(parser)


def main(args: argparse.Namespace) -> int:
    """Show the job until it ends or the user leaves; returns 0, or 128 + the ending signal."""
    import asyncio

    from elastane.cli._terminal import is_capable
    from elastane.cli._top_view import LiveView, print_once
    from elastane.dashboard.following import JobFollower
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    registry = JobRegistry(runtime_folder(environment.snapshot()))
    folder = _folder(args, registry)
    tls = tls_of(args)
    is_live = not args.once and is_capable(environment.get("TERM"))

    async def run() -> int:
        follower = JobFollower(folder.name, folder, registry.running, tls)
        follower.watchers = 1
        try:
            return await (LiveView(follower).run() if is_live else print_once(follower))
        finally:
            await follower.close()

    return asyncio.run(run())


def _folder(args: argparse.Namespace, registry: JobRegistry) -> Path:
    """Return the log folder of the named job."""
    from elastane.cli.logs import find_job

    running = registry.running(args.job)
    names = sorted({entry.job for entry in running})
    if not args.job and not names:
        raise UsageError(
            "no job of this user runs on this machine",
            slug="no-such-job",
            expected="a job that runs here, or the name or log folder of another one",
            next_step="elastane top --log-dir DIR JOB, with the DIR of elastane run",
        )
    if not args.job and len(names) > 1:
        raise UsageError(
            f"{len(names)} jobs run on this machine",
            slug="several-jobs",
            expected=f"one of {', '.join(names[:10])}",
            next_step=f"elastane top {names[-1]}",
        )
    log_dir = args.log_dir or (running[-1].log_dir if running else "")
    if running and not log_dir and not Path(args.job).is_dir():
        raise UsageError(
            f"job {names[-1]} keeps no event log",
            slug="no-event-log",
            expected="a job that elastane run started without --log-dir /dev/null",
            next_step=f"elastane status {names[-1]}",
        )
    return find_job(args.job or names[-1], log_dir, "top").resolve()
