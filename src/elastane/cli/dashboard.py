"""`elastane dashboard`: the web page of the jobs on this machine, or of the folder of one job.

It serves until interrupted, and changes nothing. Without a token it only listens on the loopback,
which another machine reaches through `ssh -L`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli._serving import check_port, listener_on, shown_host
from elastane.cli.parser import add_job_options
from elastane.cli.status import add_tls_options
from elastane.errors import UsageError, missing_extra

if TYPE_CHECKING:
    from elastane.dashboard.following import Jobs

PORT = 8470


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    about = "name of the job to show first, or its log folder (default: the newest)"
    add_job_options(parser, about, nargs="?", default="")
    add = parser.add_argument
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (%(default)s)")
    add(
        "--port", metavar="N", type=int, default=PORT, help="port; 0 takes a free one (%(default)s)"
    )
    add(
        "--token-file",
        metavar="FILE",
        default="",
        help="secret of the job, which browsers must prove on other addresses than the loopback"
        " (or set ELASTANE_TOKEN)",
    )
    add(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another name of this server, such as that of a proxy; may be repeated",
    )
    add_tls_options(parser)


def main(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    check_packages()
    from elastane.dashboard.connections import BoundedServer
    from elastane.dashboard.guard import Guard
    from elastane.dashboard.server import DashboardServer

    token = _token(args)
    free = "elastane dashboard --port 0"
    check_port(args.port, slug="dashboard-listen", free=free)
    listener = listener_on(args.host, args.port, slug="dashboard-listen", free=free)
    host, port = listener.getsockname()[:2]
    guard = Guard(args.host, token, tuple(args.allow_host))
    server = BoundedServer(DashboardServer(_jobs(args), guard).app())
    where = f"{shown_host(host)}:{port}"
    print(f"elastane dashboard: http://{where}/  (Ctrl-C ends it)", flush=True)
    server.run(sockets=[listener])
    return 0


def check_packages() -> None:
    """Raise ConfigurationError if the packages of the extra are missing."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise missing_extra(f"the page of a job needs {' and '.join(missing)}", "dashboard")


def _jobs(args: argparse.Namespace) -> Jobs:
    from elastane.cli.logs import find_named_job
    from elastane.cli.status import tls_of
    from elastane.dashboard.following import Jobs
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder
    from elastane.process.streams.files import default_base_dir

    registry = JobRegistry(runtime_folder(environment.snapshot()))
    base = Path(args.log_dir or environment.get("PET_LOG_DIR") or default_base_dir())
    return Jobs(base, registry, find_named_job(args, registry, "dashboard"), tls_of(args))


def _token(args: argparse.Namespace) -> str:
    """Return the secret that requests must prove; "" on the loopback without --token-file."""
    from elastane.dashboard.guard import is_loopback
    from elastane.options.secret import read_token
    from elastane.process import environment

    if args.token_file:
        return read_token(args.token_file)
    if is_loopback(args.host):
        return ""
    token = environment.get("ELASTANE_TOKEN").strip()
    if not token:
        raise UsageError(
            f"--host {args.host} would show logs to everyone who can reach this machine",
            slug="dashboard-token",
            expected="--token-file or ELASTANE_TOKEN with the secret of the job",
            next_step=f"ssh -L {args.port}:127.0.0.1:{args.port} THIS_HOST, and leave out --host",
        )
    return token
