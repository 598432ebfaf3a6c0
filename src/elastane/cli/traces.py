"""`elastane traces`: what a job did as spans, for a collector of OpenTelemetry.

It reads the event log, so it works on a running job and on one that is over. It changes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from elastane.cli.parser import add_job_options
from elastane.errors import ElastaneError, UsageError, missing_extra

if TYPE_CHECKING:
    from elastane.dashboard.traces import JobTrace

POLL_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_job_options(parser)
    add = parser.add_argument
    add(
        "--endpoint",
        metavar="URL",
        default="",
        help="the collector (default: OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318)",
    )
    add("--follow", action="store_true", help="send each span once it is over, until the job ends")
    add("--json", action="store_true", help="print the spans, those that are open too; send none")


def main(args: argparse.Namespace) -> int:
    """Send or print the spans."""
    from elastane.cli.logs import find_named_job
    from elastane.dashboard.traces import JobTrace
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    if args.json and (args.follow or args.endpoint):
        raise UsageError(
            "--json with --follow or --endpoint",
            slug="usage",
            expected="one of them: --json prints all spans and sends none",
            next_step=f"elastane traces --json {args.job}",
        )
    if args.endpoint and not args.endpoint.startswith(("http://", "https://")):
        raise UsageError(
            f"--endpoint {args.endpoint}",
            slug="usage",
            expected="the URL of a collector that takes OTLP over HTTP",
            next_step=f"--endpoint http://{args.endpoint}",
        )
    if not args.json:
        _check_package()
    folder = find_named_job(args, JobRegistry(runtime_folder(environment.snapshot())), "traces")
    assert folder is not None, "the job is a required argument"
    trace = JobTrace(folder)
    trace.read()
    if args.json:
        _print_json(trace)
        return 0
    return _send(trace, args.endpoint, follows=args.follow)


def _check_package() -> None:
    """Raise ConfigurationError if a package of the extra is missing."""
    from importlib.util import find_spec

    try:
        spec = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise missing_extra(
            "elastane traces needs opentelemetry-sdk and its exporter for OTLP over HTTP",
            "otel",
            "both importable there; --json needs neither",
        )


def _send(trace: JobTrace, endpoint: str, *, follows: bool) -> int:
    from elastane.dashboard.traces import SpanSender

    sender, sent = SpanSender(endpoint), 0
    waiting = trace.take(all_=not follows)
    try:
        while True:
            try:
                while waiting:
                    sender.send(*waiting[0])
                    sent += len(waiting.pop(0)[1])
            except ElastaneError:
                if not follows:
                    raise  # with --follow it is tried again: the exporter has said why
            if not follows or (trace.view.end is not None and not waiting):
                break
            time.sleep(POLL_S)
            trace.read()
            waiting = waiting or trace.take()
    except KeyboardInterrupt:
        pass  # the usual way to end --follow
    finally:
        sender.close()
    print(f"{sent} spans of job {trace.view.job} were sent to {sender.endpoint}")
    if trace.view.end is None and not follows:
        print("the job has not ended: open spans end with its last event; --follow waits for them")
    return 0


def _print_json(trace: JobTrace) -> None:
    import msgspec

    found = [{"trace": key, "spans": spans} for key, spans in trace.take(all_=True)]
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
