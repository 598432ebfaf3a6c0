"""Notices: their sources and texts, also hostile ones, and which are new and due."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.errors import UsageError
from elastane.notices.rules import (
    DRAIN_BEFORE_S,
    NOTICES_MAX,
    REASON_CHARS_MAX,
    WITHIN_MAX_S,
    NewNotices,
    NoticeSource,
    read_sources,
    read_text,
)
from elastane.protocol.events import Notice

FILE = NoticeSource("file", "/run/going")
# 2026-01-01T00:00:00Z in seconds since 1970.
NEW_YEAR_S = 1767225600.0


def test_sources_are_read_in_order_and_once():
    text = "file:/run/going,command:sh -c 'echo a,,b',file:/run/going"
    assert [str(each) for each in read_sources(text)] == [
        "file:/run/going",
        "command:sh -c 'echo a,b'",
    ]
    assert read_sources(text)[1].words == ["sh", "-c", "echo a,b"]
    assert read_sources("") == ()


@pytest.mark.parametrize(
    "text", ["file:", "file", "command:", "command:'", "fiel:/x", "/x", "none"]
)
def test_an_item_that_is_no_source_is_refused_by_name(text):
    with pytest.raises(UsageError) as caught:
        read_sources(text)
    assert repr(text) in caught.value.what and caught.value.slug == "bad-option-value"


@pytest.mark.parametrize(
    ("text", "within_s", "reason"),
    [
        ("", None, "/run/going says so"),
        ("\n \n", None, "/run/going says so"),
        ("120", 110.0, "/run/going says so"),
        ("120s rack power\nmore", 110.0, "rack power"),
        ("12.5 now", 2.5, "now"),
        ("5 too late", 0.0, "too late"),
        ("2026-01-01T00:01:00Z firmware", 60.0, "firmware"),
        ("2026-01-01T00:01:00", 60.0, "/run/going says so"),
        ("2026-01-01T01:01:00+01:00", 60.0, "/run/going says so"),
        ("2025-12-31", 0.0, "/run/going says so"),
        ("the rack is drained", None, "the rack is drained"),
        ("-5 minutes", None, "-5 minutes"),
        ("1e9 years", None, "1e9 years"),
        ("nan", None, "nan"),
        ("999999999999", WITHIN_MAX_S, "/run/going says so"),
        ("9999-12-31T23:59:59-23:59 far", WITHIN_MAX_S, "far"),
        ("a\x00b\x1b[31m", None, "a b [31m"),
    ],
)
def test_a_text_may_begin_with_a_deadline(text, within_s, reason):
    notice = read_text(FILE, text, age_s=10.0, clock_s=NEW_YEAR_S)
    assert notice == Notice("file", reason, within_s=within_s)


@given(st.text(max_size=300), st.floats(0, 1e9), st.floats(0, 4e9))
def test_any_text_is_a_notice_with_a_bounded_deadline_and_a_printable_reason(text, age_s, clock_s):
    notice = read_text(FILE, text, age_s, clock_s)
    assert notice.drains and notice.reason.isprintable()
    assert 0 < len(notice.reason) <= REASON_CHARS_MAX
    assert notice.within_s is None or 0.0 <= notice.within_s <= WITHIN_MAX_S


def test_a_notice_is_reported_once_while_its_deadline_comes_closer_by_itself():
    new = NewNotices(0.0)
    assert len(new.news([Notice("file", "going", within_s=60.0)], 0.0)) == 1
    assert new.news([Notice("file", "going", within_s=50.0)], 10.0) == []
    # A clock that is read in whole seconds.
    assert new.news([Notice("file", "going", within_s=39.0)], 20.0) == []


def test_a_deadline_that_is_brought_forward_is_reported_again():
    new = NewNotices(0.0)
    new.news([Notice("file", "going")], 0.0)
    sooner = Notice("file", "going", within_s=30.0)
    assert new.news([sooner], 1.0) == [sooner]
    assert new.news([Notice("file", "going", within_s=20.0)], 2.0) == [
        Notice("file", "going", within_s=20.0)
    ]


def test_a_node_leaves_for_a_far_deadline_only_when_it_is_near():
    new = NewNotices(0.0)
    (early,) = new.news([Notice("azure", "Redeploy", within_s=DRAIN_BEFORE_S + 100.0)], 0.0)
    assert not early.drains and early.within_s == DRAIN_BEFORE_S + 100.0
    assert new.news([Notice("azure", "Redeploy", within_s=DRAIN_BEFORE_S + 50.0)], 50.0) == []
    (due,) = new.news([Notice("azure", "Redeploy", within_s=DRAIN_BEFORE_S)], 100.0)
    assert due.drains


def test_a_drain_that_may_take_longer_begins_earlier():
    far = Notice("azure", "Redeploy", within_s=500.0)
    assert NewNotices(600.0).news([far], 0.0) == [far]


def test_a_notice_that_was_taken_back_is_reported_if_it_comes_again():
    new = NewNotices(0.0)
    notice = Notice("azure", "Freeze", drains=False)
    assert new.news([notice], 0.0) == [notice]
    assert new.news([], 1.0) == []
    assert new.news([notice], 2.0) == [notice]


def test_a_source_of_endless_notices_is_bounded():
    many = [Notice("azure", f"event {number}") for number in range(10 * NOTICES_MAX)]
    assert len(NewNotices(0.0).news(many, 0.0)) == NOTICES_MAX
    assert len(NewNotices(math.inf).news([many[0]] * 5, 0.0)) == 1
