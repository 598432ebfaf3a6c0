"""A copy by several threads is complete, and divided into equal shares."""

import pytest
import torch

from elastane.checkpoint.copying import StateCopier, _shares_of

MB = 1 << 20


@pytest.mark.parametrize(
    ("sizes_mb", "count", "shares"),
    [
        ([], 2, [0]),
        ([0, 0], 4, [2]),
        ([1] * 64, 2, [32, 32]),
        ([1] * 64, 4, [16, 16, 16, 16]),
        ([1] * 64, 64, [8] * 8),
        ([64, 1, 1], 2, [1, 2]),
        ([1, 1, 64, 0], 2, [3, 1]),
        ([4, 4], 2, [2]),
        ([32, 32, 0], 1, [3]),
    ],
)
def test_shares_are_neighbours_of_some_equal_size(sizes_mb, count, shares):
    tensors = [torch.empty(size * MB, dtype=torch.uint8) for size in sizes_mb]
    found = _shares_of(tensors, count)
    assert [share.stop - share.start for share in found] == shares
    assert [number for share in found for number in range(share.start, share.stop)] == list(
        range(len(tensors))
    )


def test_everything_is_copied_with_any_number_of_threads(monkeypatch):
    sources = [torch.randn(size * MB // 4) for size in (1, 9, 3, 20, 5)]
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for late in ([False] * 5, [True] * 5, [True, False, False, False, True]):
            places, done = [torch.zeros_like(source) for source in sources], []
            copier = StateCopier()
            copier.copy(places, sources, late, done.append, lambda: True)
            at_once = [place for place, is_late in zip(places, late, strict=True) if not is_late]
            wanted = [each for each, is_late in zip(sources, late, strict=True) if not is_late]
            assert all(map(torch.equal, at_once, wanted))
            copier.close()
            assert all(map(torch.equal, places, sources)) and done == [any(late)]


def test_a_failure_in_a_copying_thread_is_raised_in_the_caller(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sources = [torch.randn(4 * MB), torch.randn(4 * MB)]
    places = [torch.zeros(4 * MB), torch.zeros(3)]
    copier, done = StateCopier(), []
    with pytest.raises(RuntimeError, match="size"):
        copier.copy(places, sources, [False, False], done.append, lambda: True)
    copier.close()
    assert done == []


def test_changed_tensors_drop_the_save_and_are_checked_before_later_ones(
    caplog,
):
    source, place, done = torch.ones(3), torch.zeros(1), []
    copier = StateCopier()
    assert copier.may_look_late
    copier.copy([place], [source], [True], done.append, lambda: False)
    copier.close()
    assert place.tolist() == [0.0] and done == [] and not copier.may_look_late
    assert "changed in place: that save is dropped" in caplog.text


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_change_that_no_version_counter_shows_drops_the_save(caplog, is_torn):
    """Before the copy of a tensor or in the middle of it, by `.data` as by a sharded tensor."""
    sources = [torch.ones(3), torch.ones(4, 2).t()]
    places, done = [torch.zeros(3), torch.zeros(2, 4)], []
    copier = StateCopier()
    copier.copy(places, sources, [True, True], done.append, lambda: True)
    copier.finish()
    assert done == [True] and copier.may_overlap

    def change() -> bool:
        for each in sources[1:] if is_torn else sources:
            each.data.mul_(2)
        return True

    copier.copy(places, sources, [True, True], done.append, change)
    copier.close()
    assert done == [True] and not copier.may_overlap
    assert "outside of an optimizer's step" in caplog.text
