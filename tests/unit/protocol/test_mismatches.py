"""The workers that called another collective than the others, from records of their own calls."""

from __future__ import annotations

import random

import msgspec
import pytest

from elastane.protocol.culprits import ProcessFacts, StandstillEvidence, judge
from elastane.protocol.diagnosis import Sighting, failure_text, find_mismatch, root_cause
from elastane.protocol.mismatches import judge_calls
from elastane.protocol.model import Failure, Fence
from elastane.protocol.ring import (
    CALLS_SENT_MAX,
    WORLD_SHIFT,
    GroupBoard,
    Position,
    RecordedCall,
    WorkerCalls,
)
from elastane.protocol.verdicts import Kind

TOO_MUCH = (
    "Fatal Python error: Aborted: op.preamble.length <= op.nbytes. 500 vs 4. Received data size"
    " doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
LOST = "RuntimeError: Connection closed by peer [10.0.0.2]:1234"


def call(count, operation="all_reduce", nbytes=28, line=8, *, group=0, is_open=False):
    """Return the collective with this number in its group, called at this line."""
    return RecordedCall(
        number=count,
        operation=operation,
        site=f"train.py:{line}",
        nbytes=nbytes,
        group=group,
        count=count,
        entered_ns=count,
        returned_ns=0 if is_open else count + 1,
    )


def workers(size, odd, **changes):
    """Return the last calls of some workers, of which `odd` called another one as the last."""
    found = []
    for rank in range(size):
        own = changes if rank in odd else {}
        calls = *(call(count) for count in range(34, 41)), call(41, is_open=True, **own)
        found.append(WorkerCalls(rank=rank, local_rank=rank % 2, pid=50 + rank, calls=calls))
    return found


def nodes(size, per_node=2):
    return {rank: f"n{rank // per_node}" for rank in range(size)}


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_that_differ_from_most_are_named_with_sizes_and_places(seed):
    choose = random.Random(seed)
    size = choose.randint(3, 8)
    odd = sorted(choose.sample(range(size), choose.randint(1, (size - 1) // 2)))
    found = judge_calls(workers(size, odd, nbytes=4000, line=9), nodes(size))
    assert (found.kind, list(found.ranks)) == (Kind.OTHER_SHAPE, odd)
    assert f"on node n{odd[0] // 2}: collective #41 of group '0'" in found.sentence
    assert "called all_reduce of 4,000 bytes (train.py:9)" in found.sentence
    assert "called all_reduce of 28 bytes (train.py:8)" in found.sentence


def test_of_two_both_are_named_and_none_is_blamed():
    found = judge_calls(workers(2, [1], nbytes=4000, line=9), nodes(2))
    assert found.ranks == ()
    assert "rank 1 called all_reduce of 4,000 bytes (train.py:9)" in found.sentence
    assert "rank 0 called all_reduce of 28 bytes (train.py:8)" in found.sentence


def test_another_operation_is_named_before_its_size():
    found = judge_calls(workers(3, [2], operation="broadcast", nbytes=4000), nodes(3))
    assert (found.kind, found.ranks) == (Kind.OTHER_COLLECTIVE, (2,))
    assert "rank 2 called broadcast (train.py:8)" in found.sentence


@pytest.mark.parametrize(
    ("operation", "nbytes"), [("all_to_all_single", 99), ("all_reduce", 0), ("barrier", 0)]
)
def test_sizes_that_may_differ_or_are_not_known_blame_no_rank(operation, nbytes):
    """What a script gives by keyword has no recorded size."""
    calls = [
        WorkerCalls(rank=r, calls=(call(1), call(2, operation, nbytes * (r + 1)))) for r in (0, 1)
    ]
    assert judge_calls(calls, nodes(2)) is None
    some = [calls[0], WorkerCalls(rank=1, calls=(call(1), call(2, operation, 0)))]
    assert judge_calls(some, nodes(2)) is None


def test_groups_with_messages_between_two_members_are_not_compared():
    of = workers(3, [2], nbytes=4000)
    sends = msgspec.structs.replace(of[0], calls=(*of[0].calls, call(42, "send")))
    assert judge_calls([sends, *of[1:]], nodes(3)) is None


def test_groups_are_compared_apart():
    of = [
        WorkerCalls(rank=r, calls=(call(1, group=7 + r), call(2, nbytes=4 + r, group=7 + r)))
        for r in (0, 1)
    ]
    assert judge_calls(of, nodes(2)) is None


def test_workers_whose_counts_are_not_those_of_the_others_are_not_compared():
    """A worker that joined later has counted fewer collectives of the same loop."""
    loop = [("all_reduce", 28), ("broadcast", 4), ("all_reduce", 4000)]
    for behind in (1, 2, 4, 5):
        of = [
            WorkerCalls(
                rank=rank,
                calls=tuple(
                    call(count, *loop[(count + behind * (rank == 2)) % 3])
                    for count in range(50, 50 + CALLS_SENT_MAX)
                ),
            )
            for rank in range(3)
        ]
        assert judge_calls(of, nodes(3)) is None


def test_a_standstill_compares_only_what_a_worker_has_not_returned_from():
    """In place torch's flight recorder shows nothing, so only the script's calls can tell."""
    at = GroupBoard(position=Position(41, 40))
    evidence = [
        StandstillEvidence(
            rank=each.rank,
            node_id="a",
            facts=ProcessFacts(),
            groups={"0": at},
            where="all_reduce (train.py:8, main)",
            calls=each.calls,
        )
        for each in workers(4, [2], nbytes=12)
    ]
    found = judge(evidence, 4)
    assert (found.kind, found.ranks) == (Kind.OTHER_SHAPE, (2,))
    # All have returned from it: whatever they wait for now, it is not that.
    over = [
        msgspec.structs.replace(
            each, calls=(*each.calls[1:-1], call(41, nbytes=12 + each.rank), call(42, is_open=True))
        )
        for each in evidence
    ]
    assert judge(over, 4).kind is Kind.NETWORK
    nccl = {"0": msgspec.structs.replace(at, backend="nccl")}
    untried = [msgspec.structs.replace(each, groups=nccl) for each in evidence]
    assert judge(untried, 4).kind is Kind.NETWORK


def test_calls_of_groups_that_torch_does_not_count_are_compared_once_all_wait():
    """Those of `elastane.init()`: only the ring shows them. Their counts begin with the world."""
    first = 7 << WORLD_SHIFT
    made = [
        (call(first + 1), call(first + 2, operation=operation, is_open=True))
        for operation in ("broadcast", "all_reduce", "all_reduce")
    ]
    evidence = [
        StandstillEvidence(rank=rank, node_id="n", facts=ProcessFacts(), pid=50 + rank, calls=calls)
        for rank, calls in enumerate(made)
    ]
    found = judge(evidence, 3)
    assert (found.kind, found.ranks, found.worker.pid) == (Kind.OTHER_COLLECTIVE, (0,), 50)
    assert found.sentence.startswith("rank 0 on node n: collective #2 of group '0' differs: ")
    returned = msgspec.structs.replace(evidence[2], calls=(call(first + 1),))
    assert judge([*evidence[:2], returned], 3) is None, "one of them computes"


def failure(rank, message, calls, code=-6):
    return Failure(
        local_rank=rank % 2, rank=rank, pid=50 + rank, exit_code=code, message=message, calls=calls
    )


def sightings(*failures):
    return [
        Sighting(node_id=f"n{one.rank // 2}", at_s=10.0 + place, failure=one)
        for place, one in enumerate(failures)
    ]


def test_the_root_cause_of_a_worker_that_gloo_ended_is_the_rank_that_sent_too_much():
    """The receiver's node shows its own workers, the sender on another node its own calls."""
    of = workers(4, [2], nbytes=4000, line=9)
    seen = sightings(failure(1, TOO_MUCH, (of[0], of[1])), failure(2, LOST, (of[2],), 1))
    cause = root_cause(seen, Fence(1, 0))
    assert cause.what.startswith("rank 2 on node n1: collective #41 of group '0' differs: ")
    assert "so worker of rank 1 (local rank 1, pid 51) on node n0 ended with SIGABRT" in cause.what
    assert cause.is_mismatch and (cause.consequences, cause.alike) == (1, 0)
    assert (cause.node_id, cause.failure.rank, cause.failure.pid) == ("n1", 2, 52)
    assert cause.failure.message == LOST, "what the others lost is not put under its name"
    assert not cause.failure.calls, "each agent receives the outcome"


def test_a_rank_that_has_not_failed_is_the_root_cause_of_those_that_it_ended():
    of = workers(4, [1], nbytes=4000)
    cause = root_cause(sightings(failure(0, TOO_MUCH, (*of[:3],))), Fence(1, 0))
    assert (cause.node_id, cause.failure.rank, cause.failure.local_rank) == ("n0", 1, 1)
    assert (cause.failure.pid, cause.failure.lives, cause.consequences) == (51, True, 1)
    assert failure_text(cause.failure) == "it had not failed when the others did"


def test_no_rank_is_blamed_without_gloos_words_or_without_a_difference():
    of = workers(3, [2], nbytes=4000)
    assert find_mismatch(sightings(failure(1, LOST, (*of,), 1))) is None
    assert find_mismatch(sightings(failure(1, TOO_MUCH, (of[0], of[1])))) is None
    cause = root_cause(sightings(failure(1, TOO_MUCH, (of[0], of[1]))), Fence(1, 0))
    assert cause.what.startswith("worker of rank 1 ") and not cause.is_mismatch


def test_a_worker_is_compared_by_all_that_was_read_of_it():
    """The first node that fails reads its workers while one of them has not called that far."""
    of = workers(4, [3], nbytes=4000)
    late = msgspec.structs.replace(of[1], calls=of[1].calls[:-1])
    seen = sightings(failure(0, TOO_MUCH, (of[0], late)), failure(3, LOST, (of[3],), 1))
    assert not find_mismatch(seen).ranks, "one against one"
    again = failure(1, LOST, (of[1],), 1)
    found = find_mismatch(sightings(*(one.failure for one in seen), again))
    assert (found.ranks, found.worker.pid) == ((3,), 53)


def test_workers_that_were_stopped_show_who_differs():
    """On the node that failed, one has called this and one that: the other node decides."""
    of = workers(4, [3], nbytes=4000)
    seen = sightings(failure(2, TOO_MUCH, (of[2], of[3])))
    assert not root_cause(seen, Fence(1, 0)).failure.lives
    cause = root_cause(seen, Fence(1, 0), (), {"n0": of[:2]})
    assert cause.what.startswith("rank 3 on node n1: collective #41 of group '0' differs: ")
    assert (cause.node_id, cause.failure.pid, cause.failure.lives) == ("n1", 53, True)
