"""Lightning and torchmetrics, imported by the zygote: each worker has its own rank."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from process_harness import (
    DEADLINE_S,
    Told,
    command,
    eventually,
    run_plain,
    run_spawned,
    worker_environment,
)

from elastane.process.kernel import become_subreaper
from elastane.process.zygote import client
from elastane.process.zygote.client import ZygoteSpawner

pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

# The preload in place of the default: without torch's compiler, which takes as long again.
PRELOAD = ("torch", "torch.distributed")
LEARNED = ("torchmetrics", "lightning", "lightning.pytorch")
SCRIPT = """\
import json, os, sys
import packaging
early = "lightning" in sys.modules
import lightning.pytorch
import fsspec.config
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as shared
from torchmetrics.utilities.prints import rank_zero_only as metrics
import torch

class Noting:
    said = []

@rank_zero_only
def note():
    Noting.said.append("rank 0")

note()
print(json.dumps({
    "early": early,
    "ranks": [rank_zero_only.rank, shared.rank, metrics.rank],
    "said": Noting.said,
    "conf": fsspec.config.conf.get("elastane"),
    "cuda check": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
}))
"""


def workers() -> list[dict[str, str]]:
    """Return the environments of three workers on two nodes."""
    places = (("0", "0"), ("1", "1"), ("5", "2"))
    more = {"FSSPEC_ELASTANE": '{"key": "worker"}'}
    return [worker_environment(RANK=rank, LOCAL_RANK=local, **more) for rank, local in places]


def alike(
    folder: Path,
    preload: tuple[str, ...],
    swap: Callable[[ZygoteSpawner], None],
    *,
    plainly: bool = False,
) -> Told:
    """Check three workers of a zygote, once `swap` has been called.

    `plainly`: expect the same of a fresh interpreter, whose import takes four seconds.
    """
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    become_subreaper()
    told = Told()

    async def scenario() -> None:
        spawner = ZygoteSpawner(preload, worker_environment(), sys.executable, told)
        await spawner.start()
        try:
            await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)
            pid = spawner.pid
            swap(spawner)
            if preload == PRELOAD:
                await eventually(lambda: spawner.pid not in (pid, None), "another zygote", 60.0)
            for env in workers():
                wanted = command("script", script, env=env)
                forked = await run_spawned(spawner, wanted, folder)
                assert forked.code == 0, forked.err
                rank = int(env["RANK"])
                expected = {
                    "early": True,
                    "ranks": [rank, rank, int(env["LOCAL_RANK"])],
                    "said": [] if rank else ["rank 0"],
                    "conf": {"key": "worker"},
                    "cuda check": "1",
                }
                assert json.loads(forked.out) == expected
                assert "no effect" not in forked.err
                if plainly and rank == 5:
                    plain = json.loads(run_plain(wanted, folder).out)
                    assert plain == {**expected, "early": False}
        finally:
            await spawner.close()

    asyncio.run(scenario())
    assert told.of("fallback") == told.of("died") == []
    return told


def test_a_worker_has_its_own_rank_in_lightning_that_the_zygote_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DEFAULT_PRELOAD", PRELOAD)
    alike(tmp_path, PRELOAD, lambda spawner: spawner.learn(LEARNED))


@pytest.mark.soak
def test_a_worker_has_its_own_rank_in_lightning_that_the_user_preloads(tmp_path: Path) -> None:
    preload = ("torch", "torch.distributed", "lightning")
    told = alike(tmp_path, preload, lambda spawner: None, plainly=True)
    assert told.of("problem") == []
