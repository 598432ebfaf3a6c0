"""The whole table, elastane and torchrun alternating in one run.

Prints Markdown, and writes the measurements to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench import agent_cost, network, nodes, recovery, startup, steptime
from bench.harness import (
    CAP_S,
    ELASTANE,
    NO_LAUNCHER,
    TORCHRUN,
    TORCHRUN_UNSHARED,
    Launcher,
    Sample,
)
from bench.report import BenchResult, machine, run_alternating, summary, write_json

BOTH = (TORCHRUN, ELASTANE)
# If torchrun's default shares one store between attempts and loses the job, both its settings.
ALL = (TORCHRUN, TORCHRUN_UNSHARED, ELASTANE)


@dataclass(frozen=True)
class Row:
    """One line of the table. `unit` is the unit of the measured number."""

    key: str
    title: str
    target: str
    measure: Callable[[Launcher], Sample]
    launchers: Sequence[Launcher] = BOTH
    unit: str = "s"
    needs_network: bool = False


ROWS = (
    Row(
        "worker-1-node",
        "SIGKILL of one worker of 2, one node: to the first step of the new attempt",
        "a quarter of torchrun's",
        partial(recovery.worker_kill, workers=2, nodes=1),
        ALL,
    ),
    Row(
        "worker-2-nodes",
        "the same on two nodes",
        "a quarter of torchrun's",
        partial(recovery.worker_kill, workers=2, nodes=2),
        ALL,
    ),
    Row(
        "node-killed",
        "SIGKILL of a node, agent and workers (1:2): to the survivor's first step",
        "0.5 s",
        nodes.node_killed,
    ),
    Row(
        "network-cut",
        "a node's network is cut (1:2): to the survivor's first step",
        "4 s",
        nodes.network_cut,
        needs_network=True,
    ),
    Row(
        "drain",
        "SIGTERM to an agent, script with a SIGTERM handler: to the others' first step",
        "1 s, no step redone",
        nodes.node_drained,
    ),
    Row(
        "drain-should-checkpoint",
        "the same, script that calls should_checkpoint()",
        "1 s, no step redone",
        partial(nodes.node_drained, mode="should-checkpoint"),
        (ELASTANE,),
    ),
    Row(
        "arrival",
        "a node arrives: interruption of the others, script with a SIGTERM handler",
        "1 s, no step redone",
        nodes.node_arrives,
        ALL,
    ),
    Row(
        "arrival-first",
        "the same, if the arriving node's address sorts first",
        "1 s, no step redone",
        partial(nodes.node_arrives, newcomer="127.0.0.1"),
        ALL,
    ),
    Row(
        "elastic-start",
        "start of an elastic job 1:2 with one node present: to the first step",
        "4 s",
        startup.elastic_start,
    ),
    Row(
        "host-killed",
        "death of the node that hosts the rendezvous, default store",
        "the others live until the address answers again",
        nodes.host_killed,
        needs_network=True,
    ),
    Row(
        "host-killed-file",
        "the same, `file` store: to the others' first step",
        "5 s",
        nodes.host_killed_file_store,
        (ELASTANE,),
    ),
    Row(
        "agent-killed",
        "SIGKILL of an agent alone: time until its workers have ended",
        "no orphan",
        nodes.agent_killed,
    ),
    Row(
        "first-step",
        "command to the first step, one node, two workers",
        "2.3 s",
        startup.first_step,
        (NO_LAUNCHER, *BOTH),
    ),
    Row(
        "agent-cost",
        "agent while two workers train: CPU of one core",
        "0.5%, 40 MB",
        agent_cost.cpu_sample,
        BOTH,
        unit="%",
    ),
    Row(
        "step-time",
        "time of a step with nothing to wait for",
        "equal within noise",
        steptime.step_time,
        (NO_LAUNCHER, *BOTH),
        unit="ms",
    ),
)


def spell(result: BenchResult, unit: str) -> str:
    """Return one cell of the table."""
    if unit == "s" or result.median_s is None:
        return summary(result)
    factor = 1000.0 if unit == "ms" else 1.0
    low, high = (f"{seconds * factor:.2f}" for seconds in (result.seconds[0], result.seconds[-1]))
    text = f"{result.median_s * factor:.2f} {unit}" + (f" ({low} to {high})" if low != high else "")
    return ", ".join([text, *result.notes()])


def lines_of(row: Row, results: dict[str, BenchResult]) -> list[str]:
    """Return a row of the table; torchrun's settings share one cell with no launcher."""
    elastane = results.pop(ELASTANE.name, BenchResult())
    others = "<br>".join(
        spell(result, row.unit) if name == TORCHRUN.name else f"{name}: {spell(result, row.unit)}"
        for name, result in results.items()
    )
    return [f"| {row.title} | {others or 'not possible'} | {spell(elastane, row.unit)} |"]


def table(measured: dict[str, dict[str, BenchResult]], about: dict[str, str]) -> str:
    """Return the table in Markdown."""
    head = [
        f"Measured {about['date']} on {about['cores']} cores of {about['cpu']}, {about['memory']}, "
        f"Linux {about['kernel']}, Python {about['python']}, torch {about['torch']} (gloo), "
        f"elastane {about['elastane']}; load at the start {about['load']}. "
        f"Medians (range); never: not within {CAP_S:g} s.",
        "",
        "| what | torchrun | elastane |",
        "|---|---|---|",
    ]
    rows = {row.key: row for row in ROWS}
    return "\n".join(
        head
        + [line for key, results in measured.items() for line in lines_of(rows[key], dict(results))]
    )


def measure(options: argparse.Namespace) -> dict[str, dict[str, BenchResult]]:
    """Measure the chosen rows; report progress and skipped rows on stderr."""
    measured = {}
    for row in ROWS:
        if options.rows and row.key not in options.rows:
            continue
        if row.needs_network and (why := network.unavailable()):
            print(f"bench: SKIPPED {row.key}: no network namespaces here ({why})", file=sys.stderr)
            continue
        chosen = [one for one in row.launchers if not options.only or one.name == options.only]
        if not chosen:
            continue
        measured[row.key] = run_alternating(row.measure, chosen, options.reps)
        for name, result in measured[row.key].items():
            print(f"bench: {row.key}: {name}: {spell(result, row.unit)}", file=sys.stderr)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=3, help="repetitions of each row (3)")
    keys = [row.key for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=keys, metavar="ROW", help=", ".join(keys))
    parser.add_argument("--only", help="only this launcher, by its name in the table")
    options = parser.parse_args()
    about = machine()
    measured = measure(options)
    print(table(measured, about))
    write_json("table", about, measured)
    return 1 if any(r.errors for results in measured.values() for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
