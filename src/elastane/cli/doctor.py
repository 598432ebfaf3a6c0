"""`elastane doctor`: finds what would keep a job from running on this node, end it or slow it.

Each finding has its reason and a remedy. The command changes nothing, and starts and needs no job.
With `--nodes` it runs on several nodes at once, and also checks the network between them.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from elastane.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from elastane.doctor.rules import Finding
    from elastane.process.endpoint import Endpoint

_WIDTH = 100
_WAIT_S = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--nproc-per-node",
        metavar="N",
        type=int,
        default=0,
        help="workers of this node (default: one per GPU, or one)",
    )
    add(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        default="",
        help="the endpoint of a job: does its host resolve, and can this node reach it",
    )
    add(
        "--nodes",
        metavar="N",
        type=int,
        default=None,
        help="run on N nodes at once, which meet at --rdzv-endpoint: also check the network"
        " between them",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=_WAIT_S,
        help=f"how long --nodes waits for the other nodes (default: {_WAIT_S:g})",
    )
    add(
        "--local-addr",
        metavar="HOST",
        default="",
        help="the address of this node for the others, as for elastane run",
    )
    add(
        "--dir",
        metavar="DIR",
        action="append",
        default=[],
        help="a folder that the job writes to: checkpoints, data; may be repeated",
    )
    add("--log-dir", metavar="DIR", default="", help="the --log-dir of elastane run")
    add("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the findings; return 69 if one of them is a fault."""
    from elastane.doctor.facts import read_facts
    from elastane.doctor.rules import Level, judge
    from elastane.observe.box import printable
    from elastane.process import environment
    from elastane.process.endpoint import parse_endpoint

    endpoint = parse_endpoint(args.rdzv_endpoint) if args.rdzv_endpoint else None
    environ = environment.snapshot()
    findings = []
    if args.nodes is not None:
        # First, since the others wait. It tries the endpoint itself.
        findings = _between(args, _meeting_place(args, endpoint), environ)
        endpoint = None
    _show_wait("importing torch in a fresh interpreter ...")
    folders = _folders(args, environ)
    findings = judge(read_facts(folders, args.nproc_per_node, endpoint, environ)) + findings
    _show_wait("")
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(printable(line) for finding in findings for line in _lines(finding)))
        print(f"\n{_summary(findings, are_several=bool(args.nodes))}")
    is_fit = all(finding.level is not Level.FAULT for finding in findings)
    return int(ExitCode.DONE if is_fit else ExitCode.NODE_UNFIT)


def _meeting_place(args: argparse.Namespace, endpoint: Endpoint | None) -> Endpoint:
    """Return where the nodes meet; raises UsageError."""
    from elastane.doctor.meeting import NODES_MAX

    if not 2 <= args.nodes <= NODES_MAX:
        raise UsageError(
            f"--nodes {args.nodes}",
            slug="bad-option-value",
            expected=f"a number from 2 to {NODES_MAX}: of more nodes, some at a time",
            next_step="leave out --nodes to check this node alone",
        )
    if endpoint is None or endpoint.port == 0:
        given = f" --rdzv-endpoint {endpoint}" if endpoint else " without --rdzv-endpoint"
        raise UsageError(
            f"--nodes {args.nodes}{given}",
            slug="endpoint-missing",
            expected="the address of one of the nodes, and a free port there, the same on all",
            next_step=f"elastane doctor --nodes {args.nodes} --rdzv-endpoint node0:29400",
        )
    if not 0 < args.timeout <= 3600:
        raise UsageError(
            f"--timeout {args.timeout:g}",
            slug="bad-option-value",
            expected="more than 0 and at most 3600 seconds",
            next_step=f"--timeout {_WAIT_S:g}",
        )
    return endpoint


def _between(
    args: argparse.Namespace, endpoint: Endpoint, environ: Mapping[str, str]
) -> list[Finding]:
    """Meet the other nodes, and return the findings about all."""
    from elastane.doctor.facts import read_page
    from elastane.doctor.meeting import MeetingRequest, meet
    from elastane.doctor.network_rules import judge_nodes

    request = MeetingRequest(
        endpoint=endpoint,
        wanted=args.nodes,
        wait_s=args.timeout,
        local_addr=args.local_addr,
        page=read_page(endpoint, environ),
    )
    return judge_nodes(meet(request, lambda text: _show_wait(f"{endpoint}: {text} ...")))


def _show_wait(text: str) -> None:
    """Say on a terminal what is waited for."""
    if sys.stderr.isatty():
        print(f"{text}\x1b[K", end="\r", file=sys.stderr, flush=True)


def _folders(args: argparse.Namespace, environ: dict[str, str]) -> dict[str, str]:
    """Return the purpose and the path of each folder."""
    found = {"temporary files": environ.get("TMPDIR") or "/tmp"}
    if args.log_dir:
        found["logs"] = args.log_dir
    for number, folder in enumerate(args.dir, start=1):
        found[f"folder {number}" if len(args.dir) > 1 else "folder"] = folder
    return found


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.level:<8} {finding.subject:<16} {finding.found}"
    for label, text in (("why", finding.why), ("next", finding.next_step)):
        if text:
            yield from textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"{label:>24}: ",
                subsequent_indent=" " * 26,
                break_long_words=False,
                break_on_hyphens=False,
            )


def _summary(findings: list[Finding], *, are_several: bool) -> str:
    from elastane.doctor.rules import Level
    from elastane.protocol.words import counted

    faults, warnings = (
        sum(finding.level is level for finding in findings)
        for level in (Level.FAULT, Level.WARNING)
    )
    if not faults and not warnings:
        return "This node is fit." if not are_several else "These nodes are fit."
    text = f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}."
    where = "between these nodes" if are_several else "here"
    return f"{text} A job would not run {where}." if faults else f"{text} A job runs {where}."
