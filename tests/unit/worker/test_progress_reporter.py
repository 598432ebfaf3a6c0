"""The reported place of a worker's main thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastane.process import frames
from elastane.protocol.limits import WHERE_CHARS_MAX

USER = "__main__"
DDP, C10D = "torch.nn.parallel.distributed", "torch.distributed.distributed_c10d"
IN_DDP = [(DDP, "forward"), (DDP, "_pre_forward"), (DDP, "_sync_buffers")]


def frames_of(*calls, folder="/x"):
    """Return frames of functions that call one another, given by module and function name."""
    found = []

    def end():
        found.extend([sys._getframe(1)])

    inner = end
    for module, name in reversed(calls):
        space = {"__name__": module, "inner": inner}
        code = compile(
            f"def {name}():\n    inner()\n", f"{folder}/{module.rpartition('.')[2]}.py", "exec"
        )
        exec(code, space)
        inner = space[name]
    inner()
    frames, frame = [], found[0]
    for _ in calls:
        frames.append(frame)
        frame = frame.f_back
    return frames


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(USER, "main"), (USER, "validate"), *IN_DDP, ("torch._C", "x")], "_sync_buffers (__main"),
        ([(USER, "main"), ("torch.nn.modules.module", "_call_impl"), *IN_DDP[:2]],
         "_pre_forward (__main__.py:2, main)"),
        ([(USER, "main"), ("torch.distributed.c10d_logger", "wrapper"), (C10D, "all_reduce")],
         "all_reduce (__main__.py:2, main)"),
        ([(USER, "main"), ("elastane.worker.step", "backward"), ("torch.autograd.graph", "_run")],
         "all_reduce of a backward (__main__.py:2, main)"),
        # A module within DDP calls a collective of its own, as SyncBatchNorm does.
        ([(USER, "main"), (DDP, "forward"), ("net", "forward"), (C10D, "all_gather")],
         "all_gather (net.py:2, forward)"),
        ([(USER, "main"), ("elastane.worker.job", "check")], "check (__main__.py:2, main)"),
        ([(USER, "sleep")], "sleep (__main__.py:2, sleep)"),
    ],
)  # fmt: skip
def test_a_worker_names_the_collective_and_the_users_line(calls, said):
    told = frames.described(frames_of(*calls))
    assert told.startswith(said), told


def test_a_long_place_is_cut_and_no_frame_is_no_error():
    told = frames.described(frames_of((USER, "f" * 300)))
    assert len(told) == WHERE_CHARS_MAX
    assert frames.described([]) == "an unknown place"


def test_a_script_that_has_returned_to_elastane_is_at_no_place_of_the_user():
    """In place, a script runs below a frame of elastane whose module has the name of the script."""
    ours = frames_of((USER, "main"), (USER, "_show"), folder=frames.__file__.rpartition("/")[0])
    assert frames.described(ours) == "an unknown place"
    call = frames_of(("train", "main"))
    assert frames.described([*call, *ours]) == "main (train.py:2, main)"


def test_an_example_of_the_package_is_a_script_of_the_user():
    folder = Path(frames.__file__).parents[1] / "examples"
    told = frames.described(frames_of((USER, "main"), ("elastane.worker.step", "x"), folder=folder))
    assert told == "x (__main__.py:2, main)"


def test_a_debugger_is_seen():
    assert frames.is_debugged(frames_of((USER, "main"), ("bdb", "trace")))
    assert not frames.is_debugged(frames.main_frames())
