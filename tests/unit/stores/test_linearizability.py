"""The checks of store histories accept right histories and find planted faults."""

from __future__ import annotations

import math

import pytest
from linearizability import (
    NotLinearizableError,
    Operation,
    SearchTooLongError,
    Versioned,
    check,
)
from store_promises import (
    Belief,
    BrokenPromiseError,
    SeenHolder,
    check_leases,
    check_watch,
)


def get(at, found, client="r"):
    return Operation(client, "get", *at, "ok", answer=found)


def put(at, value, version, expected=0, client="w"):
    answer = Versioned(version, value)
    return Operation(
        client, "compare_and_set", *at, "ok", expected=expected, value=value, answer=answer
    )


def lost(begin_s, value, expected=0, client="w"):
    return Operation(
        client, "compare_and_set", begin_s, math.inf, "unsure", expected=expected, value=value
    )


def refused(at, value, expected=0, client="w"):
    return Operation(client, "compare_and_set", *at, "unreachable", expected=expected, value=value)


def conflict(at, value, found, expected=0, kind="compare_and_set", client="w"):
    return Operation(client, kind, *at, "conflict", expected=expected, value=value, answer=found)


def delete(at, expected, outcome="ok", client="d"):
    return Operation(client, "delete", *at, outcome, expected=expected)


A, B, C = Versioned(1, "a"), Versioned(2, "b"), Versioned(5, "c")

RIGHT = {
    "nothing": [],
    "one after the other": [
        get((0, 1), None),
        put((2, 3), "a", 1),
        get((4, 5), A),
        put((6, 7), "b", 2, expected=1),
        get((8, 9), B),
        delete((10, 11), 2),
        get((12, 13), None),
        put((14, 15), "c", 5),
        get((16, 17), C),
    ],
    "a read beside a write sees either": [
        put((0, 10), "a", 1),
        get((1, 2), None),
        get((3, 4), A),
    ],
    "an unsure write that happened late": [
        put((0, 1), "a", 1),
        lost(2, "b", expected=1),
        get((5, 6), A),
        get((7, 8), B),
    ],
    "an unsure write that never happened": [
        put((0, 1), "a", 1),
        lost(2, "x", expected=1),
        put((5, 6), "b", 2, expected=1, client="v"),
        get((7, 8), B),
    ],
    "an unsure write of which only a conflict tells": [
        put((0, 1), "a", 1),
        lost(2, "b", expected=1),
        conflict((5, 6), "x", B, expected=1),
    ],
    "an unsure write that was seen and then overwritten": [
        put((0, 1), "a", 1),
        lost(2, "b", expected=1),
        get((3, 4), B),
        put((5, 6), "c", 5, expected=2, client="v"),
        get((7, 8), C),
    ],
    "an unsure deletion": [
        put((0, 1), "a", 1),
        delete((2, math.inf), 1, "unsure"),
        get((3, 4), A),
        get((5, 6), None),
    ],
    "a write that did not happen": [
        put((0, 1), "a", 1),
        refused((2, 3), "b", expected=1),
        get((4, 5), A),
    ],
    "of two at once one wins": [
        put((0, 10), "a", 1),
        conflict((0, 10), "x", A, client="v"),
    ],
    "a stale writer, and one of a key that is gone": [
        put((0, 1), "a", 1),
        put((2, 3), "b", 2, expected=1),
        conflict((4, 5), "x", B, expected=1),
        delete((6, 7), 2),
        conflict((8, 9), "y", None, expected=2),
        conflict((10, 11), "", None, kind="delete"),
    ],
}


@pytest.mark.parametrize("history", RIGHT.values(), ids=RIGHT)
def test_a_right_history_passes(history):
    check(history)
    check(reversed(history))


TWO = [put((0, 1), "a", 1), put((2, 3), "b", 2, expected=1)]
WRONG = {
    "a stale read": ([*TWO, get((4, 5), A)], "can only be at version 2", 2),
    "a read of the future": ([get((0, 1), A), put((2, 3), "a", 1)], "before it was written", 2),
    "a lost update": (
        [put((0, 1), "a", 1), get((2, 3), None)],
        "can only be at version 1",
        2,
    ),
    "a write that vanished later": (
        [*TWO, get((4, 5), B), put((6, 7), "c", 5, expected=1)],
        "can only be at version 2",
        2,
    ),
    "two winners of one version": (
        [
            put((0, 1), "a", 1),
            *(put((2, 9), f"v{n}", 2 + n, expected=1, client=f"w{n}") for n in (0, 1)),
        ],
        "does not explain",
        3,
    ),
    "a version that went back": (
        [put((0, 1), "c", 5), delete((2, 3), 5), put((4, 5), "b", 2)],
        "can only be absent",
        3,
    ),
    "a conflict that names a version that never was": (
        [*TWO, conflict((4, 5), "x", Versioned(9, "b"), expected=1)],
        "cannot both be",
        2,
    ),
    "a conflict that names what was expected": (
        [*TWO, conflict((4, 5), "x", B, expected=2)],
        "no state of the key explains",
        1,
    ),
    "a value that no client wrote": ([get((0, 1), Versioned(1, "z"))], "no client wrote z", 1),
    "one version of two values": (
        [*TWO, get((4, 5), Versioned(2, "a"))],
        "cannot both be",
        2,
    ),
    "an unsure write that appears twice": (
        [*TWO, lost(4, "c", expected=2), get((5, 6), C), get((7, 8), Versioned(7, "c"))],
        "cannot both be",
        2,
    ),
    "an unsure write that appears after it was overwritten": (
        [
            put((0, 1), "a", 1),
            lost(2, "b", expected=1),
            put((3, 4), "c", 5, expected=1, client="v"),
            get((5, 6), B),
        ],
        "can only be at version 5",
        3,
    ),
    "an unsure write that is gone again": (
        [put((0, 1), "a", 1), lost(2, "b", expected=1), get((3, 4), B), get((5, 6), A)],
        "can only be at version 2",
        3,
    ),
    "a write that was reported as not done and is there": (
        [put((0, 1), "a", 1), refused((2, 3), "b", expected=1), get((4, 5), B)],
        "reported as not done",
        2,
    ),
    "a write that conflicted and is there": (
        [put((0, 1), "a", 1), conflict((2, 3), "b", B, expected=1)],
        "reported as not done",
        2,
    ),
    "a deletion that was reported as not done": (
        [put((0, 1), "a", 1), delete((2, 3), 1, "unreachable"), get((4, 5), None)],
        "can only be at version 1",
        2,
    ),
    "a deletion of a version that had gone": (
        [*TWO, delete((4, 5), 1)],
        "can only be at version 2",
        2,
    ),
}


@pytest.mark.parametrize(("history", "why", "longest"), WRONG.values(), ids=WRONG)
def test_a_wrong_history_is_found_and_shown_in_few_operations(history, why, longest):
    with pytest.raises(NotLinearizableError, match=why) as found:
        check(history)
    assert len(found.value.piece) <= longest, found.value


def test_the_piece_of_a_long_history_is_short():
    history = [put((0, 1), "v0", 1)]
    for n in range(1, 300):
        history.append(put((10 * n, 10 * n + 1), f"v{n}", n + 1, expected=n))
        history.append(get((10 * n + 2, 10 * n + 3), Versioned(n + 1, f"v{n}")))
    check(history)
    stale = get((2005, 2006), Versioned(198, "v197"), client="stale")
    with pytest.raises(NotLinearizableError) as found:
        check([*history, stale])
    assert len(found.value.piece) == 2, found.value
    assert "stale: get: version 198 (v197)" in str(found.value)


def test_many_operations_at_once_need_no_more_states_than_the_bound():
    at_once = [lost(0.0, f"v{n}") for n in range(40)]
    seen = [put((1, 50), "w", 1), get((60, 61), Versioned(1, "w"))]
    check([*at_once, *seen], states_max=100)


def test_a_search_that_is_too_long_says_so():
    deletions = [delete((0.0, math.inf), n, "unsure") for n in range(1, 20)]
    writes = [put((n, 100), f"v{n}", n, client=f"w{n}") for n in range(1, 20)]
    with pytest.raises(SearchTooLongError):
        check([*deletions, *writes, get((101, 102), Versioned(3, "v3"))], states_max=5)


def belief(client, term, asked_s, until_s):
    return Belief(client, term, asked_s, asked_s + 0.1, until_s)


def test_one_holder_after_another_passes():
    check_leases(
        [belief("a", 1, 0, 2), belief("a", 1, 1, 3), belief("b", 4, 2.95, 5), belief("a", 7, 6, 9)],
        [SeenHolder("c", 1, 2.0), SeenHolder("c", 4, 4.0)],
    )


def test_a_lease_whose_answer_came_after_its_end_was_never_held():
    late = Belief("b", 2, 2.5, 6.0, 3.5)
    check_leases([belief("a", 1, 0, 2), late, belief("c", 3, 4, 7)])


@pytest.mark.parametrize(
    ("beliefs", "seen", "why"),
    [
        ([belief("a", 1, 0, 2), belief("b", 2, 1, 3)], [], "two hold the lease at once"),
        ([belief("a", 1, 0, 9), belief("a", 1, 1, 3), belief("b", 2, 4, 5)], [], "at once"),
        ([belief("a", 1, 0, 2), belief("b", 1, 3, 5)], [], "two hold one term"),
        ([belief("a", 4, 0, 2), belief("b", 3, 3, 5)], [], "a term went back"),
        ([belief("a", 4, 0, 2), belief("b", 5, 3, 5), belief("a", 4, 6, 7)], [], "a term went"),
        ([belief("a", 4, 0, 2)], [SeenHolder("b", 3, 1.0)], "a term went back"),
    ],
)
def test_two_holders_or_a_term_that_went_back_are_found(beliefs, seen, why):
    with pytest.raises(BrokenPromiseError, match=why):
        check_leases(beliefs, seen)


def test_a_watch_may_leave_versions_out():
    check_watch("w", [3, 9, None, 12, None, 14])


@pytest.mark.parametrize("versions", [[3, 3], [5, 4], [5, None, 5], [5, None, None], [None]])
def test_a_watch_that_goes_back_or_repeats_is_found(versions):
    with pytest.raises(BrokenPromiseError):
        check_watch("w", versions)
