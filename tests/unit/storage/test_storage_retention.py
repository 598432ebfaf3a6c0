"""Retention removes what it may, and never the last valid checkpoint."""

from hypothesis import given
from hypothesis import strategies as st

from elastane.protocol.checkpoints import Key, folder_name
from elastane.storage.retention import SeenCheckpoint, kept, litter, surplus, to_remove

HOUR = 3600.0


def seen(step, state="sound", *, verified=False, silent_s=0.0, fence=(0, 1, 0)):
    return SeenCheckpoint(folder_name(Key(*fence, step), "00000000"), state, verified, silent_s)


def steps(removals):
    return [int(one.folder[5:17]) for one in removals]


places = st.lists(
    st.builds(
        seen,
        st.integers(1, 9),
        st.sampled_from(["sound", "sound", "unsound", "newer", "pending"]),
        verified=st.booleans(),
        silent_s=st.sampled_from([0.0, HOUR]),
        fence=st.tuples(st.integers(0, 1), st.integers(0, 1), st.just(0)),
    ),
    unique_by=lambda one: one.folder,
    max_size=12,
)


@given(places, st.integers(1, 4))
def test_the_newest_sound_checkpoint_always_stays(place, keep):
    gone = {one.folder for one in to_remove(place, keep, litter_s=HOUR)}
    sound = sorted((one for one in place if one.state == "sound"), key=lambda one: one.order)
    assert not gone & {one.folder for one in sound[-keep:]}


@given(places, st.integers(1, 4))
def test_nothing_published_goes_before_one_that_stays_was_verified(place, keep):
    gone = {one.folder for one in to_remove(place, keep, litter_s=HOUR)}
    stays = [one for one in place if one.state == "sound" and one.folder not in gone]
    if not any(one.verified for one in stays):
        assert all(one.state == "pending" for one in place if one.folder in gone)


@given(places, st.integers(1, 4))
def test_a_checkpoint_of_a_newer_elastane_is_never_removed(place, keep):
    gone = {one.folder for one in to_remove(place, keep, litter_s=HOUR)}
    assert not gone & {one.folder for one in place if one.state == "newer"}


@given(places, st.integers(1, 4), st.data())
def test_protected_checkpoints_stay(place, keep, data):
    names = [one.folder for one in place]
    protected = data.draw(st.sets(st.sampled_from(names))) if names else set()
    gone = {one.folder for one in to_remove(place, keep, protected, litter_s=HOUR)}
    assert not gone & protected


def test_the_newest_stay_and_the_oldest_go_first():
    place = [seen(step, verified=step == 5) for step in (1, 5, 3, 2, 4)]
    assert steps(to_remove(place, 2, litter_s=HOUR)) == [1, 2, 3]
    assert [one.order[0].step for one in kept(place, 2)] == [5, 4]
    assert to_remove(place, 5, litter_s=HOUR) == []


def test_a_damaged_one_counts_for_nothing_and_goes_when_enough_sound_ones_are_newer():
    place = [seen(1, verified=True), seen(2), seen(3, "unsound"), seen(4, "unsound")]
    assert steps(surplus(place, 1)) == [1]
    assert surplus(place, 2) == []
    assert steps(surplus([*place, seen(5)], 1)) == [1, 2, 3, 4]
    assert steps(surplus([*place, seen(5)], 2)) == [1]
    assert steps(surplus([*place, seen(5), seen(6)], 2)) == [1, 2, 3, 4]


def test_a_save_that_did_not_end_goes_when_its_round_is_over():
    place = [seen(9, "pending", fence=(0, 1, 0)), seen(1, fence=(0, 1, 1))]
    assert steps(litter(place, HOUR)) == [9]
    assert litter([seen(9, "pending"), seen(1)], HOUR) == []


def test_a_save_that_did_not_end_goes_when_it_was_silent_for_long():
    place = [seen(9, "pending", silent_s=HOUR), seen(8, "pending", silent_s=HOUR - 1)]
    assert steps(litter(place, HOUR)) == [9]
    assert steps(litter(place, HOUR, {place[0].folder})) == []
