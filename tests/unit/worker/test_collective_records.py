"""The collectives of a script are recorded, and their results do not change."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from elastane.process import collectives, step_meter
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.protocol.ring import Position

DEADLINE_S = 30.0
REDUCE = dist.all_reduce
collectives.watch_torch()


@pytest.fixture
def page():
    """A page on which this process records, with a group of one."""
    page = StatusPage.create()
    collectives.begin(WorkerPage.open(os.dup(page.fd)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield page
    dist.destroy_process_group()
    collectives._state.forget()
    page.close()


def wait_for(look):
    ends_s = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_collective_is_recorded_with_its_site_and_bytes(page):
    dist.all_reduce(torch.ones(7))
    dist.barrier()
    dist.all_reduce(torch.ones(3), group=dist.group.WORLD)
    first, second, third = page.ring().calls
    assert (first.operation, first.nbytes, first.group, first.count) == ("all_reduce", 28, 0, 1)
    assert first.site.startswith("test_collective_records.py:")
    assert 0 < first.entered_ns <= first.returned_ns <= second.entered_ns
    assert (second.operation, second.count) == ("barrier", 2)
    assert (third.nbytes, third.group, third.count) == (12, 0, 3)


def test_collectives_inside_a_collective_are_one_call(page):
    found = [None]
    dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}]
    [call] = page.ring().calls
    assert call.operation == "all_gather_object"


def test_a_call_of_another_thread_does_not_end_a_wait_of_the_main_thread(page):
    begun, ends = threading.Event(), threading.Event()

    def slow():
        begun.set()
        ends.wait(DEADLINE_S)

    thread = threading.Thread(target=collectives._recording(slow, "barrier", 1))
    thread.start()
    assert begun.wait(DEADLINE_S)
    with step_meter.Waiting():
        dist.barrier()
    waited_ns = step_meter._process.meter.waits_ns
    ends.set()
    thread.join()
    assert step_meter._process.meter.waits_ns == waited_ns > 0


def test_another_group_counts_by_itself(page):
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=group)
    dist.broadcast(torch.ones(1), 0, group)
    calls = [(call.group, call.count) for call in page.ring().calls]
    digest = calls[1][0]
    assert digest and calls == [(0, 1), (digest, 1), (digest, 2)]


def test_an_error_reaches_the_script_and_ends_the_call(page):
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")
    with pytest.raises(TypeError):
        dist.all_reduce()
    calls = page.ring().calls
    assert all(call.returned_ns for call in calls) and len(calls) == 2
    dist.all_reduce(torch.ones(1))
    assert len(page.ring().calls) == 3


def test_torchs_functions_stay_the_same_objects(page):
    assert dist.all_reduce is REDUCE is dist.distributed_c10d.all_reduce
    cells = [collectives._cell(REDUCE).cell_contents]
    collectives.watch_torch()
    assert cells == [collectives._cell(REDUCE).cell_contents], "a second call changes nothing"


def test_a_forked_child_records_nothing(page):
    pid = os.fork()
    if pid == 0:
        os._exit(collectives._state.recorder is not None)
    assert os.waitpid(pid, 0)[1] == 0
    assert not page.ring().calls


def test_without_records_the_page_stays_empty():
    page = StatusPage.create(records=False)
    collectives.begin(WorkerPage.open(os.dup(page.fd)))
    assert collectives._state.recorder is None
    page.close()


def test_a_wait_for_the_loader_is_shown(page):
    seen = []

    def collate(samples):
        seen.append(page.is_loading)
        return samples

    assert len([*DataLoader(range(3), collate_fn=collate)]) == 3
    assert seen == [True] * 3 and not page.is_loading
    assert page.moves[2] == 4  # with the one that ended the loop


def test_the_board_shows_the_groups_and_where_a_still_worker_is(page):
    for _ in range(5):
        dist.all_reduce(torch.ones(7))
    wait_for(lambda: groups_at(page, 5))
    assert ("all_reduce", 7, "Float") in [
        (group.calls[-1].operation, group.calls[-1].elements, group.calls[-1].dtype)
        for group in groups_at(page, 5)
    ]
    # It is where the main thread was at the last beat, which may have been within `ring`.
    wait_for(lambda: "test_collective_records.py:" in page.ring().board.where)
    beats = page.beats
    wait_for(lambda: page.beats > beats)
    dist.all_reduce(torch.ones(7))
    wait_for(lambda: any(group.position.begun == 6 for group in groups_of(page)))


def groups_of(page):
    """Return the groups that the board shows; torch also counts those of earlier tests."""
    return page.ring().board.groups.values()


def groups_at(page, count):
    """Return the groups that have begun and completed `count` calls, and show the newest."""
    found = [group for group in groups_of(page) if group.position == Position(count, count)]
    return [group for group in found if any(call.sequence == count for call in group.calls)]


def entry(number, *, retired, pg="default"):
    """Return one record of torch's flight recorder."""
    what = {"pg_id": 7, "process_group": [pg, ""], "profiling_name": "gloo:all_reduce"}
    return {**what, "collective_seq_id": number, "is_p2p": False, "retired": retired}


@pytest.mark.parametrize(
    ("counted", "retired", "completed"),
    [
        pytest.param(4, {4: True, 5: True}, 5, id="counted in the wrong order"),
        pytest.param(5, {4: False, 5: True}, 3, id="a later one is complete"),
        pytest.param(3, {4: False, 5: False}, 3, id="two are open"),
        pytest.param(4, {}, 4, id="no record of this group is left"),
        pytest.param(4, {3: True, 4: True}, 4, id="the last one was a message"),
        pytest.param(4, {4: True, 5: False, 6: False}, 4, id="one has begun since"),
    ],
)
def test_at_a_standstill_the_records_say_what_is_complete(page, counted, retired, completed):
    watch = collectives._Watch(collectives._state.recorder, None)
    watch._positions = {"default": Position(5, counted)}
    entries = [entry(number, retired=is_over) for number, is_over in retired.items()]
    others = [entry(9, retired=False, pg="another")]
    watch._dump = lambda *_: json.dumps({"entries": entries + others}).encode()
    assert watch._read_records()["default"].position == Position(5, completed)


def test_a_collective_that_completes_without_a_count_is_seen_once_the_worker_moves_on(page):
    watch = collectives._Watch(collectives._state.recorder, None)
    watch._positions = {"default": Position(5, 4)}
    is_over, reads = False, 0

    def dump(*_):
        nonlocal reads
        reads += 1
        return json.dumps({"entries": [entry(5, retired=is_over)]}).encode()

    def shown():
        return watch._shown.groups["default"].position.completed

    watch._dump = dump
    for _ in range(3):
        watch._show_standstill()
    assert (shown(), reads) == (4, 1), "the worker stayed at one line"
    is_over = True
    watch._show_standstill()
    assert (shown(), reads) == (5, 2)
    watch._show_standstill()
    assert (shown(), reads) == (5, 2), "nothing is open any more"


def test_threads_record_beside_each_other(page):
    groups = [dist.new_group([0]) for _ in range(4)]

    def work(group):
        for _ in range(40):
            dist.all_reduce(torch.ones(1), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = page.ring().calls
    assert len(calls) == 160
    assert {call.number for call in calls} == {*range(1, 161)}
    digests = {call.group for call in calls}
    assert len(digests) == 4
    for digest in digests:
        counts = [call.count for call in calls if call.group == digest]
        assert sorted(counts) == [*range(1, 41)]
