"""All ranks restore the newest available state, from any holder."""

import random

import pytest

from elastane.checkpoint.restoring import (
    Inventory,
    SaveId,
    StatePart,
    choose,
    first_of_each_place,
    without,
)
from elastane.protocol.checkpoints import Key


def save(step, era=0, number=1, attempt=0, nonce="00000000"):
    return SaveId(Key(era, number, attempt, step), nonce)


def test_a_later_round_is_newer_than_a_later_step():
    old, new = save(900, number=3), save(7, number=4)
    choice = choose([Inventory("k", "p", stored=(new, old))])
    assert choice.save == new
    assert not choice.memory


def test_memory_is_preferred_to_storage_and_both_to_an_older_state():
    a, b = save(5), save(6)
    assert choose([Inventory("k", "p", held=(b,), stored=(b, a))]).memory
    assert not choose([Inventory("k", "p", held=(a,), stored=(b, a))]).memory


def test_memory_is_preferred_to_its_own_final_flush():
    kept, final_flush = save(5, nonce="00000001"), save(5, nonce="ffffffff")
    choice = choose([Inventory("k", "p", held=(kept,), stored=(final_flush,))])
    assert (choice.save, choice.memory) == (kept, True)
    part = StatePart(kept, 4, ((0, 4),))
    assert choose([Inventory("k", "p", parts=(part,), stored=(final_flush,))]).memory


def test_holders_give_the_state_to_ranks_that_lack_it():
    a = save(5)
    heard = [Inventory("k1", "p"), Inventory("k2", "p", held=(a,)), Inventory("k1", "p")]
    choice = choose(heard)
    assert (choice.givers, choice.lacking) == ((1,), (0, 2))
    heard = [Inventory("k1", "p1", stored=(a,)), Inventory("k1", "p1"), Inventory("k2", "p2")]
    choice = choose(heard)
    assert (choice.givers, choice.lacking) == ((0, 1), (2,))


def test_parts_of_sharded_state_count_if_the_servers_together_have_the_whole():
    a, b = save(5), save(6)
    one = Inventory("k1", "p", parts=(StatePart(b, 10, ((0, 6),)),), stored=(a,))
    rest = Inventory("k2", "p", parts=(StatePart(b, 10, ((6, 10),)),))
    choice = choose([one, rest])
    assert (choice.save, choice.memory, choice.lacking) == (b, True, ())
    assert choice.spans == (((0, 6),), ((6, 10),))
    for others in ([], [Inventory("k2", "p", parts=(StatePart(b, 10, ((7, 10),)),))]):
        assert choose([one, *others, Inventory("k3", "p")]).save == a, "bytes 6 to 7 are lost"


def test_a_replica_of_a_lost_nodes_part_makes_the_state_whole():
    a, b = save(5), save(6)
    first = Inventory("k1", "p", parts=(StatePart(b, 9, ((0, 3),)), StatePart(a, 9, ((0, 3),))))
    second = Inventory(
        "k2", "p", parts=(StatePart(b, 9, ((6, 9),)), StatePart(a, 9, ((3, 6), (6, 9))))
    )
    choice = choose([first, Inventory("new", "p"), second])
    assert (choice.save, choice.givers, choice.lacking) == (a, (0, 2), (1,))
    assert choice.spans == (((0, 3),), (), ((3, 6), (6, 9)))
    assert choose([first, Inventory("new", "p"), second], {(a, True)}) is None


def test_a_failed_choice_is_not_repeated_and_without_state_there_is_no_choice():
    a, b = save(5), save(6)
    heard = [Inventory("k", "p", held=(b,), stored=(b, a))]
    assert choose(heard, {(b, True)}) == choose(heard, {(b, True)})
    assert not choose(heard, {(b, True)}).memory
    assert choose(heard, {(b, True), (b, False)}).save == a
    assert choose(heard, {(b, True), (b, False), (a, False)}) is None
    assert choose([Inventory("k", "p")]) is None


def test_a_checkpoint_damaged_in_one_place_is_copied_from_another():
    a = save(5)
    heard = [Inventory("k1", "p1", stored=(a,)), Inventory("k2", "p2", stored=(a,))]
    choice = choose(without(heard, a, {0: "damaged"}))
    assert (choice.givers, choice.lacking) == ((1,), (0,))


def test_one_rank_reports_each_place():
    assert first_of_each_place(["p", "q", "p", "q", "r"]) == [0, 1, 4]


@pytest.mark.parametrize("seed", range(50))
def test_every_choice_is_the_greatest_that_exists_and_reaches_all_ranks(seed):
    rng = random.Random(seed)
    saves = [save(rng.randint(1, 5), number=rng.randint(1, 2), nonce=f"{n:08x}") for n in range(6)]
    heard = [
        Inventory(
            f"k{rng.randint(0, 2)}",
            f"p{rng.randint(0, 1)}",
            held=tuple(rng.sample(saves, rng.randint(0, 2))),
            stored=tuple(rng.sample(saves, rng.randint(0, 2))),
        )
        for _ in range(rng.randint(1, 5))
    ]
    there = {s for each in heard for s in (*each.held, *each.stored)}
    choice = choose(heard)
    assert (choice is None) == (not there)
    if choice is not None:
        assert choice.save.key == max(there).key
        assert sorted((*choice.givers, *choice.lacking)) == list(range(len(heard)))
        giver = heard[choice.givers[0]]
        same = [
            e
            for e in heard
            if (e.server == giver.server if choice.memory else e.place == giver.place)
        ]
        assert any(choice.save in (e.held if choice.memory else e.stored) for e in same)
