"""Notices: a node that is about to stop leaves between two steps, and by its deadline."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from metadata_servers import CLOUDS
from supervise import Agent, agent
from test_recovery_in_place import InPlace

from elastane.observe.story import story_of

DRAINED = 143
# Far longer than any deadline here: what keeps the deadlines is not this.
LONG = ("--drain-timeout", "300", "--shutdown-timeout", "300")
STEPS = """
    import elastane
    while not elastane.should_checkpoint():
        tell("up")
        time.sleep(0.01)
    tell("asked")
"""
SAVES_FOR_EVER = STEPS + "    trap()\n    hang()\n"


def appears(path: Path, text: str) -> None:
    """Create a file atomically, with all of its text."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


@contextmanager
def noticed(folder: Path, source: str, body: str) -> Iterator[Agent]:
    """An agent that trains alone, and reads notices of `source`."""
    with agent(folder, "--notices", source, *LONG, body=body) as one:
        one.told("up.0.0")
        yield one


def each_body_once(job: InPlace) -> bool:
    """Whether no process began any step twice."""
    begun = Counter((pid, x["step"]) for pid, lines in job.said("body").items() for x in lines)
    return max(begun.values()) == 1


def test_a_node_with_a_notice_leaves_between_two_steps(tmp_path):
    job, going = InPlace(tmp_path), tmp_path / "going"
    with job.cluster as cluster:
        cluster.start("a")
        node = cluster.start("b", notices=f"file:{going}")
        job.wait_steps(3, 2)
        appears(going, "60 spot capacity is needed")
        assert node.wait() == DRAINED
        job.wait_steps(3, 1)
        assert not cluster.events("incident", "workers-interrupted")[2:], "one planned change"
        job.ends_exact()
        assert each_body_once(job)
        (line,) = story_of("job", "", cluster.events()).notices
        assert " b (file): spot capacity is needed: the node leaves, 60 s before its end" in line


def test_a_deadline_is_kept_by_workers_whose_save_takes_longer(tmp_path):
    with noticed(tmp_path, f"file:{tmp_path / 'going'}", SAVES_FOR_EVER) as one:
        appears(tmp_path / "going", "4 the host is lost")
        begun_s = time.monotonic()
        one.told("asked.0.0")
        assert one.wait(20) == DRAINED
        assert time.monotonic() - begun_s < 20
        assert one.events("worker-exited")[-1]["data"]["exit_code"] == -9
        one.gone()


def test_output_of_a_command_is_a_notice_and_the_command_ends_with_the_agent(tmp_path):
    words = "command:sh -c 'until test -e go; do sleep 0.05; done; echo rack 7 goes; exec sleep 99'"
    with noticed(tmp_path, words, STEPS) as one:
        one.family()
        (tmp_path / "go").touch()
        assert one.wait() == DRAINED
        (notice,) = one.events("notice")
        assert (notice["reason"], notice["data"]["source"]) == ("rack 7 goes", "command")
        one.gone()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_step_is_lost_by_many_notices(tmp_path):
    """One job: a node joins, gets a notice by each kind of source in turn, and leaves."""
    count = int(os.environ.get("SOAK_NOTICES", "100"))
    job, took_s = InPlace(tmp_path, nnodes="1:2"), []
    with job.cluster as cluster, ExitStack() as stack:
        fakes = {cloud: stack.enter_context(make()) for cloud, make in CLOUDS.items()}
        cluster.start("a")
        for number in range(count):
            kind = ("file", *fakes)[number % (1 + len(fakes))]
            going = tmp_path / f"going.{number}"
            source = f"{kind}:{fakes[kind].address if kind in fakes else going}"
            node = cluster.start(f"b{number}", notices=source)
            job.wait_steps(3, 2)
            begun_s = time.monotonic()
            if kind in fakes:
                fakes[kind].put()
            else:
                appears(going, "30 spot")
            assert node.wait() == DRAINED
            took_s.append(time.monotonic() - begun_s)
            if kind in fakes:
                fakes[kind].clear()
            job.wait_steps(3, 1)
        job.ends_exact()
        assert each_body_once(job)
        assert len(cluster.events("notice")) == count
    took_s.sort()
    print(f"{count} notices; to the end {took_s[count // 2]:.2f} s, at most {took_s[-1]:.2f} s")
