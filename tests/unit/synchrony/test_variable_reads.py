"""Reads of RANK and WORLD_SIZE from the environment are questions of the script."""

import os

import pytest

from elastane.synchrony import rank_reads


@pytest.fixture
def environ(monkeypatch):
    """Return an environment of its own, whose reads of RANK are collected in `questions`."""
    monkeypatch.setattr(rank_reads, "_asked", {})
    codec = os.environ
    own = os._Environ(
        {b"RANK": b"2", b"PLACE_OF_TEST": b"/"},
        codec.encodekey,
        codec.decodekey,
        codec.encodevalue,
        codec.decodevalue,
    )
    own.questions = []
    rank_reads.watch_variables({"RANK": lambda: own.questions.append(1)}, own)
    monkeypatch.setattr(os, "environ", own)
    return own


@pytest.mark.parametrize(
    "read",
    [
        lambda environ: environ["RANK"],
        lambda environ: environ.get("RANK"),
        lambda _: os.getenv("RANK", "0"),
    ],
    ids=["item", "get", "getenv"],
)
def test_each_read_of_a_script_is_a_question(environ, read):
    for _ in range(2):
        assert read(environ) == "2"
    assert len(environ.questions) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda environ: environ["PLACE_OF_TEST"],
        lambda environ: "RANK" in environ,
        dict,
        lambda environ: environ.copy(),
        lambda environ: [*environ.items()],
        lambda environ: exec("environ['RANK']", {"__name__": "torch.hub", "environ": environ}),
    ],
    ids=["another variable", "in", "dict", "copy", "items", "torch"],
)
def test_what_asks_for_no_rank_is_no_question(environ, read):
    read(environ)
    assert environ.questions == []
    assert environ["RANK"] == "2"
    assert environ.questions == [1]


def test_the_watched_environment_is_changed_as_before(environ):
    environ.update(NEW_IN_TEST="x")
    del environ["PLACE_OF_TEST"]
    assert {"RANK", "NEW_IN_TEST"} <= {*environ}
    assert environ.pop("NEW_IN_TEST") == "x" and "NEW_IN_TEST" not in environ
    with pytest.raises(KeyError, match="PLACE_OF_TEST"):
        environ["PLACE_OF_TEST"]
