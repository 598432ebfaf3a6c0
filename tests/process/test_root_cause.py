"""The earliest of two faults is blamed, 1 ms apart on one node and 20 ms apart on two.

torchrun 2.13 compares whole seconds of its own node and takes the lowest rank at a tie: it blamed
the wrong worker in 2 of 5 runs on a machine like this.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from ports import free_port
from process_harness import until
from supervise import Agent, words_agent, write_script

# All workers meet and agree on a moment. The culprit fails then, the second one a little later; the
# others lose a peer after that, as gloo says it. How long an exit takes is up to chance. A worker
# notes the moment before its fault, its error file says when it was seen: a busy machine may put
# one fault after another that was to come later.
BODY = """
    import atexit, json, os, random, sys, time
    runs, gap_s = int(sys.argv[1]), float(sys.argv[2])
    if RESTARTS == runs:
        sys.exit(0)
    plan = json.loads((FOLDER / "plan.json").read_text())[RESTARTS]
    atexit.register(time.sleep, random.choice((0.0, 0.03)))
    trap()  # else the first fault's stop comes before the second fault
    tell("here")
    size = int(os.environ["WORLD_SIZE"])
    if RANK == 0:
        for rank in range(size):
            wait_for(f"here.{rank}.{RESTARTS}")
        (FOLDER / f"at.{RESTARTS}.part").write_text(str(time.monotonic() + 0.1))
        (FOLDER / f"at.{RESTARTS}.part").rename(FOLDER / f"at.{RESTARTS}")
    wait_for(f"at.{RESTARTS}")
    at_s = float((FOLDER / f"at.{RESTARTS}").read_text())
    place = plan.index(RANK) if RANK in plan else len(plan)
    time.sleep(max(0.0, at_s + place * gap_s - time.monotonic()))
    tell("before", time.monotonic_ns())
    if gap_s > 0.01 and place < len(plan) and RESTARTS % 3 == 0:
        tell("left")
        os._exit(9)
    if place == len(plan):
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1431")
    raise ValueError(f"culprit {place}")
"""


TURNS_MAX = 6


def plans(runs: int, workers: int) -> list[list[int]]:
    """Return the ranks that fail first and second, at each restart."""
    rng = random.Random(f"{runs} runs of {workers}")
    return [rng.sample(range(workers), 2) for _ in range(runs)]


def blamed(one: Agent) -> list[int]:
    """Return the rank that each restart blamed."""
    return [event["data"]["cause_rank"] for event in one.events("restart")]


def _interval(folder: Path, rank: int, restart: int) -> tuple[int, int]:
    """Return the interval in which a worker failed: from its report to its error file or exit."""
    before = int((folder / f"before.{rank}.{restart}").read_text())
    if (folder / f"left.{rank}.{restart}").exists():
        return before, before + 200_000
    (file,) = folder.glob(f"*/logs/*/round_1/attempt_{restart}/rank_{rank}/error.json")
    on_file = int(json.loads(file.read_text())["message"]["extraInfo"]["monotonic_ns"])
    assert before < on_file, "the time on file is none of this fault's"
    return before, on_file


def _seen(one: Agent) -> dict[int, list[float]]:
    """Return when the agent noticed the end of each rank's worker, at each restart."""
    times: dict[int, list[float]] = {}
    for event in one.events("worker-exited"):
        if "rank" in event["data"]:  # those of the last attempt end well, and say no rank
            times.setdefault(event["data"]["rank"], []).append(event["time_s"])
    return times


def run(folder: Path, nodes: int, runs: int, gap_s: float) -> None:
    """Run until enough pairs of failures had a known order: a busy machine delays processes."""
    judged = 0
    for turn in range(TURNS_MAX):
        (folder / str(turn)).mkdir()
        judged += one_run(folder / str(turn), nodes, runs, gap_s)
        if judged > runs * 0.1:
            print(f"{judged} of {judged} right")
            return
    pytest.fail(f"only {judged} of {TURNS_MAX * runs} had an order")


def one_run(folder: Path, nodes: int, runs: int, gap_s: float) -> int:
    """Return how many pairs had a known order; assert that the first was blamed in each."""
    per_node = 4 // nodes
    wanted = plans(runs, 4)
    (folder / "plan.json").write_text(json.dumps(wanted))
    script = write_script(folder, BODY)
    words = [
        *("--nnodes", str(nodes), "--nproc-per-node", str(per_node), "--log-dir", "logs"),
        *(
            "--max-restarts",
            str(runs),
            "--preload",
            "json",
            "--rdzv-conf",
            "crash_loop=0,same_crash=0",
        ),
        *("--rdzv-id", "blame", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    ]
    with contextlib.ExitStack() as stack:
        agents = []
        for node in range(nodes):
            (folder / str(node)).mkdir()
            more = ("--node-id", f"n{node}", f"{folder}/{script}", str(runs), str(gap_s))
            agents.append(
                stack.enter_context(
                    words_agent(
                        folder / str(node),
                        *words,
                        *more,
                        SUPERVISE_FOLDER=str(folder),
                        PYTHONPATH=str(folder),
                    )
                )
            )
        assert [agent.wait(120) for agent in agents] == [0] * nodes, agents[0].err
        until(lambda: sum(len(blamed(a)) for a in agents) == runs, "all restarts are on file")
        found = [rank for agent in agents for rank in blamed(agent)]
        seen = {rank: times for agent in agents for rank, times in _seen(agent).items()}
    judged, wrong = 0, []
    for restart, (pair, rank) in enumerate(zip(wanted, found, strict=True)):
        first, second = sorted((_interval(folder, one, restart), one) for one in pair)
        if second[0][0] - first[0][1] < gap_s * 0.5e9:
            continue  # They were not that far apart: a process stood still in between.
        is_left = (folder / f"left.{first[1]}.{restart}").exists()
        seen_apart_s = seen[second[1]][restart] - seen[first[1]][restart]
        if is_left and seen_apart_s < gap_s * 0.5:
            continue  # Only its agent knows of an exit, and one agent stood still.
        judged += 1
        if rank != first[1]:
            wrong.append((restart, first, second, rank))
    assert not wrong, f"{len(wrong)} of {judged} (restart, first, second, blamed): {wrong}"
    return judged


@pytest.mark.parametrize(
    ("nodes", "gap_s"),
    [
        pytest.param(1, 0.001, id="1 ms on one node"),
        pytest.param(2, 0.020, id="20 ms on two", marks=pytest.mark.soak),
    ],
)
def test_the_first_of_two_faults_is_the_cause(tmp_path: Path, nodes: int, gap_s: float) -> None:
    run(tmp_path, nodes, 10, gap_s)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("nodes", "gap_s"), [(1, 0.001), (2, 0.020)], ids=["1 ms on one node", "20 ms on two"]
)
def test_the_first_of_two_faults_is_the_cause_50_times_of_50(
    tmp_path: Path, nodes: int, gap_s: float
) -> None:
    run(tmp_path, nodes, 50, gap_s)
