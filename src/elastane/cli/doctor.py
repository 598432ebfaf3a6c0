"""`elastane doctor`: what on this node would keep a job from running, end it later, or slow it.

Each finding has its reason and a remedy. It changes nothing, starts no job, and needs none.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from elastane.errors import ExitCode

if TYPE_CHECKING:
    from elastane.doctor.rules import Finding

_WIDTH = 100


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
    from elastane.process import environment
    from elastane.process.endpoint import parse_endpoint

    endpoint = parse_endpoint(args.rdzv_endpoint) if args.rdzv_endpoint else None
    environ = environment.snapshot()
    if sys.stderr.isatty():
        print("importing torch in a fresh interpreter ...", end="\r", file=sys.stderr, flush=True)
    findings = judge(read_facts(_folders(args, environ), args.nproc_per_node, endpoint, environ))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(line for finding in findings for line in _lines(finding)))
        print(f"\n{_summary(findings)}")
    is_fit = all(finding.level is not Level.FAULT for finding in findings)
    return int(ExitCode.DONE if is_fit else ExitCode.NODE_UNFIT)


def _folders(args: argparse.Namespace, environ: dict[str, str]) -> dict[str, str]:
    """Return what each folder is for, and its path."""
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


def _summary(findings: list[Finding]) -> str:
    from elastane.doctor.rules import Level, counted

    faults, warnings = (
        sum(finding.level is level for finding in findings)
        for level in (Level.FAULT, Level.WARNING)
    )
    if not faults and not warnings:
        return "This node is fit."
    text = f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}."
    return f"{text} A job would not run here." if faults else f"{text} A job runs here."
