"""The log of a job that a page or a terminal shows: it trains, and lost workers and a node before.

The job is made up, so that it has all that can be shown: 4 nodes of 4 workers for 40 minutes.
"""

import json
import math
import random
import time
from pathlib import Path

import msgspec
from view_events import event, settled, started

from elastane.observe.events import LoggedEvent, encode_line

AGE_S = 2400
_FIRST = ("node-a", "node-b", "node-c", "node-d")
_LATER = ("node-a", "node-b", "node-c", "node-f")
_STORAGE = "s3://runs/gpt2-medium"
_ERROR = "RuntimeError: DataLoader worker is killed by signal: Bus error"
_REASONS = {
    "agent-started": "the agent has started",
    "coordinator-started": "this agent holds the store's lease",
    "round-settled": "all members are ready",
    "workers-started": "4 workers were started",
    "workers-regrouped": "4 workers continue in another world",
    "workers-training": "its workers have made their first step",
    "progress": "steps of the world",
    "step-times": "own parts of steps",
    "checkpoint-saved": "a checkpoint was published",
    "checkpoint-failed": "the storage did not answer within 60 s",
}
_CAUSE = "worker of rank 6 (local rank 2, pid 106) on node node-b ended with SIGKILL: its cgroup"


def write_job(folder: Path, name: str = "gpt2-medium", now_s: float | None = None) -> Path:
    """Write the log of a job that is AGE_S old at `now_s`; return its folder."""
    begun_s = (time.time() if now_s is None else now_s) - AGE_S
    events = sorted(_story(begun_s), key=lambda one: one.time_s)
    target = folder / name
    target.mkdir(parents=True)
    with (target / "events.h.jsonl").open("wb") as file:
        file.writelines(encode_line(_renamed(one, name)) for one in events)
    with (target / "scalars.node-a.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in _scalars(begun_s))
    return target


def _scalars(begun_s):
    """The script logs loss and learning rate every 20 steps, and an accuracy sometimes."""
    draw = random.Random(1)
    for step in range(20, 7201, 20):
        line = {"step": step, "time": begun_s + 10 + step / 3.1}
        line["loss"] = round(2.9 + 6.5 * math.exp(-step / 900) + draw.gauss(0, 0.08), 4)
        line["learning_rate"] = 6e-4 * min(1, step / 400)
        if step % 1000 == 0:
            line["accuracy"] = round(0.61 - 0.5 * math.exp(-step / 2000), 4)
        yield line


def _renamed(one: LoggedEvent, name: str) -> LoggedEvent:
    reason = _REASONS.get(one.kind, one.reason) if one.reason == "because" else one.reason
    return msgspec.structs.replace(one, job=name, host=one.node, reason=reason)


def _world(round_, nodes, size, at_s, begun_s, first=True):
    """A world settles; its workers start a second later, and train two seconds later."""
    fence = {"round": round_, "attempt": 0}
    yield settled(round_, " ".join(nodes), size, nodes=len(nodes), time_s=begun_s + at_s)
    wait_s = 4.0 if first else 0.1
    for number, node in enumerate(nodes):
        pids = range(100 + 4 * number, 104 + 4 * number)
        started_s = begun_s + at_s + wait_s / 2
        yield started(node, *pids, time_s=started_s, **fence)
        if not first:
            yield event("workers-regrouped", node, time_s=begun_s + at_s + 0.05, **fence)
        yield event("workers-training", node, time_s=begun_s + at_s + wait_s, built_age_s=0.05,
                    healed_age_s=0.02, **fence)  # fmt: skip


def _steps(begun_s):
    """The step count every ten seconds, with the step after which each checkpoint was saved."""
    noise, step = random.Random(7), 0
    for at_s in range(10, AGE_S + 1, 10):
        round_ = 1 + sum(at_s >= each for each in (400, 404, 690, 1100, 1900))
        rate = 0.0 if 665 <= at_s < 695 else 2.5 if 695 <= at_s < 1100 else 3.3
        step += round(10 * rate * noise.uniform(0.97, 1.03))
        yield event("progress", "node-a", steps=step, round=round_, attempt=0,
                    time_s=begun_s + at_s)  # fmt: skip
        if at_s % 600 == 0 and at_s < AGE_S:
            yield event("checkpoint-saved", "node-a", step=step, bytes=4_260_000_000, seconds=2.3,
                        location=_STORAGE, why="step", time_s=begun_s + at_s + 2)  # fmt: skip
        if at_s == 2100:
            yield event("checkpoint-failed", "node-a", step=step, slug="storage-unreachable",
                        location=_STORAGE, time_s=begun_s + at_s + 2)  # fmt: skip


def _own_parts(begun_s):
    """Own parts of steps every half minute; one of rank 9's is longer from the 20th minute on."""
    noise = random.Random(11)
    for at_s in range(30, AGE_S, 30):
        round_ = 1 + sum(at_s >= each for each in (400, 404, 690, 1100, 1900))
        own_ms = [220 * noise.uniform(0.97, 1.03) for _ in range(12 if round_ == 4 else 16)]
        if at_s >= 1200:
            own_ms[9] *= 1.6 if at_s < 1900 else 1.3
        yield event("step-times", "node-a", own_ms=",".join(f"{each:.0f}" for each in own_ms),
                    median_ms=220.0, workers=len(own_ms), round=round_, attempt=0,
                    time_s=begun_s + at_s)  # fmt: skip


def _story(begun_s):
    def at(seconds):
        return {"time_s": begun_s + seconds}

    for node in _FIRST:
        yield event("agent-started", node, **at(0))
    yield event("coordinator-started", "node-a", **at(0.5))
    yield from _world(1, _FIRST, 16, 2, begun_s)
    yield from _steps(begun_s)
    yield from _own_parts(begun_s)
    fence = {"round": 1, "attempt": 0}
    yield event("worker-exited", "node-b", "SIGKILL (out of memory)", rank=6, local_rank=2, pid=106,
                exit_code=-9, age_s=0.01, **fence, **at(400))  # fmt: skip
    yield event("incident", "node-a", "worker of rank 6 ended", **fence, **at(400.05))
    yield event("replacement", "node-a", "lost workers are replaced, the others continue", used=1,
                allowed=3, cause=f"{_CAUSE} was out of memory (64 GiB)", cause_node="node-b",
                cause_rank=6, **fence, **at(400.05))  # fmt: skip
    yield from _world(2, _FIRST, 15, 400.1, begun_s, first=False)
    yield event(
        "drain-started", "node-a", "adding workers of node-b", round=2, attempt=0, **at(404)
    )
    yield from _world(3, _FIRST, 16, 404.2, begun_s, first=False)
    yield from _lost_node(begun_s)
    fence = {"round": 5, "attempt": 0}
    yield event("worker-exited", "node-c", "exit code 1", rank=9, local_rank=1, pid=109,
                exit_code=1, message=_ERROR, **fence, **at(1900))  # fmt: skip
    yield event("incident", "node-a", "worker of rank 9 ended", **fence, **at(1900.05))
    cause = f"worker of rank 9 (local rank 1, pid 109) on node node-c ended: {_ERROR}"
    yield event("replacement", "node-a", "lost workers are replaced, the others continue", used=2,
                allowed=3, cause=cause, cause_node="node-c", cause_rank=9, **fence,
                **at(1900.05))  # fmt: skip
    yield from _world(6, _LATER, 16, 1900.1, begun_s, first=False)


def _lost_node(begun_s):
    """A node is not heard any more; three train on, until another one comes."""
    fence = {"round": 3, "attempt": 0}
    yield event("node-departed", "node-d", "not heard for 20.0 s: its host does not answer",
                time_s=begun_s + 668, **fence)  # fmt: skip
    yield event("incident", "node-a", "node node-d was lost", time_s=begun_s + 668.1, **fence)
    yield from _world(4, _FIRST[:3], 12, 690, begun_s, first=False)
    yield event("node-joined", "node-f", "it came", time_s=begun_s + 1090)
    yield event("drain-started", "node-a", "adding workers of node-f", time_s=begun_s + 1100,
                round=4, attempt=0)  # fmt: skip
    yield from _world(5, _LATER, 16, 1100.3, begun_s, first=False)
