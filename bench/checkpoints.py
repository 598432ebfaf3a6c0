"""The cost of saving to the training, and the time of a restore, compared with torch's own ways.

    python -m bench.checkpoints [--gb SIZE ...] [--large SIZE ...] [--folder PATH]

The state is a model with AdamW of SIZE GB (10^9 bytes). Elastane and its peers take turns in one
process; the table has medians. "Blocked": the time that the loop is blocked. "Written": the time
until the checkpoint is durable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import Sample
from bench.report import BenchResult, machine, measured_by, spell, write_json
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "checkpoint_work.py"
LIMIT_S = 900.0


def measured(mode: str, gb: float, folder: str, *options: str) -> dict[str, BenchResult]:
    """Run one measurement under `elastane run`; return its samples by name."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="elastane-bench-") as name:
        words = ["run", "--standalone", "--log-dir", f"{name}/logs", *options]
        command = [sys.executable, "-m", "elastane", *words, str(SCRIPT), mode, str(gb), name]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=LIMIT_S)
        found = json.loads((Path(name) / "found.json").read_text())
    return {key: BenchResult([Sample(s) for s in seconds]) for key, seconds in found.items()}


def on_two_nodes(gb: float, folder: str, replicas: int) -> dict[str, BenchResult]:
    """Save a state that is sharded over two nodes, with and without copies on the other node."""
    options = {"nnodes": "2", "nproc_per_node": 1, "snapshot_replicas": replicas}
    with tempfile.TemporaryDirectory(dir=folder, prefix="elastane-bench-") as name:
        script = [str(SCRIPT), "sharded", str(gb), name]
        with LocalCluster(script, folder=Path(name) / "cluster", **options) as cluster:
            nodes = [cluster.start(node) for node in "ab"]
            cluster.wait(lambda: not any(n.is_alive for n in nodes), "the end", LIMIT_S)
        found = json.loads((Path(name) / "found.json").read_text())
    return {
        key: BenchResult([Sample(s) for s in seconds]) for key, seconds in found.items() if seconds
    }


def copies(gb: float, folder: str, rows: dict[str, dict[str, BenchResult]]) -> str:
    """Return the line of one size."""
    off, on = (on_two_nodes(gb, folder, replicas) for replicas in (0, 1))
    rows[f"copies {gb:g} GB, off"], rows[f"copies {gb:g} GB, on"] = off, on
    what = f"{gb:g} GB on each of two nodes, sharded: the loop stands for a save"
    peer = f"without copies: {cell(off, 'blocked')}"
    own = f"with: {cell(on, 'blocked')}, on the other node after {cell(on, 'copied')}"
    if "steps" in on:
        what += "; steps of 50 ms with one after each"
        peer += f"; {1000 * median_s(off, 'steps'):.1f} ms a step"
        own += f"; {1000 * median_s(on, 'steps'):.1f} ms"
    return line(what, [peer], own)


def after_each(workers: int, folder: str, rows: dict[str, dict[str, BenchResult]]) -> str:
    """Return the line for a save after each step, by this number of workers on this machine."""
    every = measured("steps", 0.1, folder, "--nproc-per-node", str(workers))
    rows[f"steps of {workers}"] = every
    more = 100 * (median_s(every, "with") / median_s(every, "without") - 1)
    return line(
        f"0.1 GB, steps of 50 ms, workers: {workers}; a save after each step",
        [f"no saves: {1000 * median_s(every, 'without'):.2f} ms a step"],
        f"{1000 * median_s(every, 'with'):.2f} ms, {more:+.1f}%",
    )


def median_s(results: dict[str, BenchResult], name: str) -> float:
    return statistics.median(results[name].seconds)


def cell(results: dict[str, BenchResult], name: str, against: str = "") -> str:
    own = median_s(results, name)
    ratio = f", {own / median_s(results, against):.2f} of {against}" if against else ""
    return f"{spell(own)}{ratio}"


def line(what: str, peers: list[str], own: str) -> str:
    return f"| {what} | {'<br>'.join(peers)} | {own} |"


def of_size(gb: float, folder: str, rows: dict[str, dict[str, BenchResult]]) -> list[str]:
    """Return the lines of one size."""
    one = rows[f"single {gb:g} GB"] = measured("single", gb, folder, "--nproc-per-node", "1")
    back = measured("memory", gb, folder, "--nproc-per-node", "1", "--max-restarts", "11")
    rows[f"memory {gb:g} GB"] = back
    brought = measured("bring", gb, folder, "--nproc-per-node", "2")
    rows[f"bring {gb:g} GB"] = brought
    names = ["torch.save, durable", "dcp.save", "dcp.async_save, blocked"]
    size = f"{gb:g} GB"
    return [
        line(
            f"{size}: the loop stands for a save",
            [f"{name}: {cell(one, name)}" for name in names],
            f"{cell(one, 'ours, during the next step')}; copied at once:"
            f" {cell(one, 'ours, at once', 'memcpy')}",
        ),
        line(
            f"{size}: until it is durable",
            [f"dcp.async_save: {cell(one, 'dcp.async_save, written')}"],
            f"{cell(one, 'ours, written')}, {gb / median_s(one, 'ours, written'):.1f} GB/s",
        ),
        line(
            f"{size}: restored from storage, verified",
            [
                f"torch.load: {cell(one, 'torch.load')}",
                f"and into the objects: {cell(one, 'torch.load, into the objects')}",
            ],
            cell(one, "ours, from storage", "torch.load"),
        ),
        line(
            f"{size}: restored from memory after a worker's death",
            [f"torch.load, into the objects: {cell(back, 'torch.load, into the objects')}"],
            cell(back, "ours, from memory", "torch.load, into the objects"),
        ),
        line(
            f"{size}: the same, and the first step right after it",
            [f"torch.load, into the objects: {cell(back, 'torch.load, and a step')}"],
            cell(back, "ours, and a step", "torch.load, and a step"),
        ),
        line(
            f"{size}: brought to a folder that lacks it, durable",
            [f"raw socket: {cell(brought, 'raw socket')}"],
            cell(brought, "ours", "raw socket"),
        ),
    ]


def of_large(gb: float, folder: str, rows: dict[str, dict[str, BenchResult]]) -> list[str]:
    """Return the lines of a size that leaves no room for the peers."""
    found = rows[f"large {gb:g} GB"] = measured("large", gb, folder, "--nproc-per-node", "1")
    size = f"{gb:g} GB"
    return [
        line(
            f"{size}: the loop stands for a save",
            [f"memcpy: {cell(found, 'memcpy')}"],
            f"{cell(found, 'ours, during the next step')}; copied at once:"
            f" {cell(found, 'ours, at once', 'memcpy')}",
        ),
        line(
            f"{size}: until it is durable, from when it was copied",
            [f"the disk past the page cache, one file: {cell(found, 'raw disk')}"],
            cell(found, "ours, written", "raw disk"),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.checkpoints", description=__doc__)
    parser.add_argument(
        "--gb", type=float, nargs="*", default=[1.0], help="4 did not fit into 24 GiB"
    )
    parser.add_argument(
        "--large", type=float, nargs="*", default=[4.0], help="ours alone: takes 4.5 times as much"
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    args = parser.parse_args()
    about, rows = machine(), dict[str, dict[str, BenchResult]]()
    lines = [line for gb in args.gb for line in of_size(gb, args.folder, rows)]
    lines += [line for gb in args.large for line in of_large(gb, args.folder, rows)]
    lines += [after_each(workers, args.folder, rows) for workers in (1, 2)]
    lines += [copies(gb, args.folder, rows) for gb in (0.1, *args.gb)]
    print(f"{measured_by('checkpoints', about)} Medians.\n")
    print("| what | others here | elastane |\n|---|---|---|")
    print("\n".join(lines))
    write_json("checkpoints", about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
