"""`elastane metrics`: the metrics of the jobs on this machine, for Prometheus.

It reads event logs and asks coordinators that run here; it changes nothing, and serves until
interrupted. The metrics name jobs and nodes, and contain no output of workers.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from elastane.cli._serving import check_port, listener_on, shown_host
from elastane.cli.parser import add_job_options
from elastane.cli.status import add_tls_options, tls_of
from elastane.errors import missing_extra

if TYPE_CHECKING:
    import asyncio

    from elastane.dashboard.exporter import MetricsExporter

PORT = 9470
_FREE = "elastane metrics --port 0"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    about = "a job that is served whether it runs here or not, or its log folder"
    add_job_options(parser, about, nargs="?", default="")
    add = parser.add_argument
    add(
        "--host",
        metavar="ADDRESS",
        default="",
        help="address to listen on (default: all addresses)",
    )
    add(
        "--port", metavar="N", type=int, default=PORT, help="port; 0 takes a free one (%(default)s)"
    )
    add("--once", action="store_true", help="print the metrics once, and end")
    add_tls_options(parser)


def main(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    check_package()
    import asyncio

    from elastane.cli.logs import find_named_job
    from elastane.dashboard.exporter import MetricsExporter
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    check_port(args.port, slug="metrics-listen", free=_FREE)
    registry = JobRegistry(runtime_folder(environment.snapshot()))
    chosen = find_named_job(args, registry, "metrics")
    exporter = MetricsExporter(registry, chosen, tls_of(args))
    return asyncio.run(_print_once(exporter) if args.once else _serve(exporter, args))


def check_package() -> None:
    """Raise ConfigurationError if the package of the extra is missing."""
    from importlib.util import find_spec

    if find_spec("prometheus_client") is None:
        raise missing_extra("elastane metrics needs prometheus_client", "metrics")


async def _print_once(exporter: MetricsExporter) -> int:
    await exporter.look()
    await exporter.ready()
    print(exporter.answer("GET", "/metrics").body.decode(), end="")
    await exporter.close()
    return 0


async def _serve(exporter: MetricsExporter, args: argparse.Namespace) -> int:
    import asyncio
    import signal

    server = exporter.server(args.host, args.port)
    await server.start(listener_on(args.host, args.port, slug="metrics-listen", free=_FREE))
    at = f"{shown_host(args.host)}:{server.port}"
    print(f"elastane metrics: http://{at}/metrics  (Ctrl-C ends it)", flush=True)
    following = asyncio.create_task(exporter.follow())
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, ended)
    try:
        await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        return 0
    finally:
        server.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
