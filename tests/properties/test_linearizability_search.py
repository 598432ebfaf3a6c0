"""On small histories, the linearizability search agrees with an enumeration of all orders."""

from __future__ import annotations

import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from linearizability import NotLinearizableError, Operation, Versioned, check

VERSIONS = range(1, 8)


def some_order_explains(history):
    """Try each order of each outcome of unsure operations, and each version of unsure writes."""
    certain = [one for one in history if one.outcome in ("ok", "conflict")]
    unsure = [one for one in history if one.outcome == "unsure"]
    for count in range(len(unsure) + 1):
        for happened in itertools.combinations(unsure, count):
            for order in itertools.permutations([*certain, *happened]):
                if in_time(order) and explains(order, None, 0):
                    return True
    return False


def in_time(order):
    return all(
        not (later.outcome != "unsure" and later.end_s < earlier.begin_s)
        for earlier, later in itertools.combinations(order, 2)
    )


def explains(order, found, top):
    """Return whether an order explains all answers, by the rules of the protocol."""
    if not order:
        return True
    one, rest = order[0], order[1:]
    version = found.version if found else 0
    if one.kind == "get":
        return one.answer == found and explains(rest, found, top)
    if one.outcome == "conflict":
        was_refused = version != one.expected or (one.kind == "delete" and not version)
        return was_refused and one.answer == found and explains(rest, found, top)
    if version != one.expected:
        return False
    if one.kind == "delete":
        return version > 0 and explains(rest, None, top)
    given_versions = [one.answer.version] if one.answer else VERSIONS
    return any(
        explains(rest, Versioned(number, one.value), number)
        for number in given_versions
        if number > top
    )


@st.composite
def histories(draw):
    count = draw(st.integers(1, 5))
    values = [f"v{n}" for n in range(count)]
    entries = st.builds(Versioned, st.sampled_from(VERSIONS), st.sampled_from(values))
    history = []
    for number in range(count):
        begin_s = draw(st.integers(0, 6))
        kind = draw(st.sampled_from(["get", "compare_and_set", "compare_and_set", "delete"]))
        outcomes = ["ok"] if kind == "get" else ["ok", "ok", "conflict", "unsure", "unreachable"]
        outcome = draw(st.sampled_from(outcomes))
        answer = None
        if kind == "get" or outcome == "conflict":
            answer = draw(st.none() | entries)
        elif kind == "compare_and_set" and outcome == "ok":
            answer = Versioned(draw(st.sampled_from(VERSIONS)), values[number])
        expected = 0 if kind == "get" else draw(st.sampled_from([0, 0, *VERSIONS]))
        end_s = math.inf if outcome == "unsure" else begin_s + draw(st.integers(0, 6)) + 0.5
        history.append(
            Operation("c", kind, begin_s, end_s, outcome, expected, values[number], answer)
        )
    return history


@st.composite
def plausible_histories(draw):
    """Draw a sequential history, then disturb its times and answers."""
    found, top, history = None, 0, []
    for number in range(draw(st.integers(2, 6))):
        begin_s, length_s = 2 * number - draw(st.integers(0, 3)), draw(st.integers(0, 4)) + 0.5
        version = found.version if found else 0
        kind = draw(st.sampled_from(["get", "compare_and_set", "compare_and_set", "delete"]))
        expected = draw(st.sampled_from([version, version, version, max(0, version - 1)]))
        value, outcome, answer = f"v{number}", "ok", found
        if kind != "get" and (expected != version or (kind == "delete" and not version)):
            outcome = "conflict"
        elif kind == "delete":
            found = answer = None
        elif kind == "compare_and_set":
            top += 1
            found = answer = Versioned(top, value)
        if kind != "get" and outcome == "ok":
            outcome = draw(st.sampled_from(["ok", "ok", "unsure", "unreachable"]))
        end_s = math.inf if outcome == "unsure" else begin_s + length_s
        answer = answer if outcome in ("ok", "conflict") else None
        expected = 0 if kind == "get" else expected
        history.append(Operation("c", kind, begin_s, end_s, outcome, expected, value, answer))
    return history


def agrees(history):
    told = {one.answer.version for one in history if one.answer}
    assume(all(one.expected in {0, *told} for one in history))
    expected = some_order_explains(history)
    try:
        check(history)
    except NotLinearizableError as error:
        assert not expected, error
        assert set(error.piece) or not history
    else:
        assert expected, [str(one) for one in history]


@given(histories())
def test_the_search_agrees_with_a_full_enumeration_on_any_history(history):
    agrees(history)


@settings(max_examples=300)
@given(plausible_histories())
def test_the_search_agrees_with_a_full_enumeration_on_disturbed_histories(history):
    agrees(history)
