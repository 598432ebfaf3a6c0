"""Reads of RANK and WORLD_SIZE from the environment are questions of the script."""

import os
import sys

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


def test_the_frameworks_own_questions_for_the_size_are_told_from_those_of_the_script():
    def asked_through(*callers):
        """Whether a framework asks, where each of these functions is called by the one before."""
        call = "is_of_framework(sys._getframe())"
        names = {"is_of_framework": rank_reads.is_of_framework, "sys": sys}
        for module, function in reversed(callers):
            space = {**names, "__name__": module}
            exec(f"def {function}(): return {call}", space)
            names, call = {"called": space[function]}, "called()"
        return names["called"]()

    torchs = ("torch.distributed.distributed_c10d", "get_world_size")
    assert asked_through(("lightning.fabric.utilities.distributed", "_sync_ddp"), torchs)
    assert asked_through(("torchmetrics.utilities.distributed", "gather_all_tensors"), torchs)
    asks = ("lightning.fabric.strategies.parallel", "world_size")
    assert not asked_through(("__main__", "main"), ("lightning.fabric.fabric", "world_size"), asks)
    assert asked_through(("lightning.fabric.fabric", "setup_dataloaders"), asks)
    assert not asked_through(("__main__", "main"), torchs)
