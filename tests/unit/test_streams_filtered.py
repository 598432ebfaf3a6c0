"""Lines with certain texts are copied to one file of all ranks."""

import asyncio
import os

from elastane.process.streams import group, tailer
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan, StreamChoice, parse_needles
from elastane.protocol.model import Fence


def test_texts_are_cut_at_single_commas_as_torch_cuts_them():
    assert parse_needles("apple,orange") == ("apple", "orange")
    assert parse_needles("a,,b,c") == ("a,b", "c")
    assert parse_needles("a,,,b") == ("a,", "b")
    assert parse_needles("") == parse_needles(",") == ()


def run(plan, words, ranks=2, first=0):
    async def scenario():
        streams = GroupStreams(plan, "job", "host-a", Fence(1, 0))
        opened = [await streams.open_soon(rank, first + rank, "r") for rank in range(ranks)]
        for one in opened:
            os.write(one.stdout, words)
        await streams.finish()

    asyncio.run(scenario())


def test_matching_lines_of_all_teed_ranks_are_copied_whole_and_under_their_prefix(tmp_path):
    plan = LogPlan(
        str(tmp_path),
        redirects={2: StreamChoice.OUT},
        tee={0: StreamChoice.OUT, 1: StreamChoice.OUT, 3: StreamChoice.OUT},
        console_ranks=frozenset({0, 1, 2}),
        prefix="[${rank}]: ",
        needles={StreamChoice.OUT: ("loss", "acc")},
    )
    run(plan, b"loss 1\nnothing\nat\xff acc\n[0]: no\nlast loss", ranks=4)
    folder = plan.attempt_dir("job", Fence(1, 0))
    lines = (folder / "filtered_stdout.log").read_bytes().splitlines(keepends=True)
    assert sorted(lines) == sorted(
        b"[%d]: %s\n" % (rank, words)
        for rank in (0, 1)
        for words in (b"loss 1", b"at\xff acc", b"last loss")
    ), "a rank that is redirected only, or not shown, is not copied, as in torch"
    assert not (folder / "filtered_stderr.log").exists()


def test_each_node_has_its_own_file(tmp_path):
    plan = LogPlan(
        str(tmp_path), tee={0: StreamChoice.OUT}, prefix="", needles={StreamChoice.OUT: ("x",)}
    )
    for first in (0, 8):
        run(plan, b"x %d\n" % first, ranks=1, first=first)
    folder = plan.attempt_dir("job", Fence(1, 0))
    assert (folder / "filtered_stdout.log").read_bytes() == b"x 0\n"
    assert (folder / "filtered_stdout.rank_8.log").read_bytes() == b"x 8\n"


def test_a_flood_that_the_console_skips_is_copied_in_full(tmp_path, monkeypatch):
    # The time for the last lines is not the subject; a loaded machine takes longer.
    for part in (group, tailer):
        monkeypatch.setattr(part, "FINISH_S", 60.0)
    plan = LogPlan(
        str(tmp_path), tee={0: StreamChoice.OUT}, prefix="", needles={StreamChoice.OUT: ("7",)}
    )
    words = b"".join(b"%07d\n" % n for n in range(1_500_000))
    run(plan, words, ranks=1)
    copied = plan.attempt_dir("job", Fence(1, 0)) / "filtered_stdout.log"
    wanted = sum(b"7" in line for line in words.splitlines())
    assert len(copied.read_bytes().splitlines()) == wanted


def test_an_unwritable_file_loses_only_the_copies(tmp_path, caplog):
    plan = LogPlan(str(tmp_path), tee={0: StreamChoice.OUT}, needles={StreamChoice.OUT: ("x",)})
    (plan.attempt_dir("job", Fence(1, 0)) / "filtered_stdout.log").mkdir(parents=True)
    run(plan, b"x\n", ranks=1)
    assert "no lines are copied" in caplog.text
    assert (plan.rank_dir("job", Fence(1, 0), 0) / "stdout.log").read_bytes() == b"x\n"
