"""A job on hosts keeps its promises in every history of faults: histories from seeds.

A history that breaks a promise is kept in build/agent-histories, and the failure names the command
that plays its seed again. ELASTANE_AGENT_SEEDS=FIRST:COUNT says which seeds are played in each
mode, ELASTANE_AGENT_RUN_S for how long each of them has faults.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from agent_histories import history_on
from agent_plans import SCRIPTS, AgentHistory

RUN_S = float(os.environ.get("ELASTANE_AGENT_RUN_S", "30"))
FIRST, COUNT = map(int, os.environ.get("ELASTANE_AGENT_SEEDS", "0:2").split(":"))
KEPT = Path(__file__).parents[2] / "build" / "agent-histories"


def play(history: AgentHistory, folder: Path) -> dict[str, int]:
    """Play a history; keep the notes, logs and plan of one that fails."""
    run = None
    try:
        with history_on(history, folder) as run:
            return run.play()
    except (AssertionError, OSError) as error:
        why = "\n".join([str(error), *getattr(error, "__notes__", ())])
    kept = KEPT / f"{history.recovery}-{history.backend}-{history.seed}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("etcd", "redis", "disk"))
    told = "\n".join(run.told if run is not None else ())
    (kept / "why").write_text(f"{why}\n{history}\n--- played\n{told}\n")
    again = f"ELASTANE_AGENT_SEEDS={history.seed}:1 ELASTANE_AGENT_RUN_S={RUN_S:g}"
    soak = _SCRIPTS if history.recovery in SCRIPTS else _SOAK
    test = f"{Path(__file__).name}::{soak.__name__}[{history.backend}-{history.recovery}]"
    pytest.fail(
        f"{why[:3000]}\n\n{history}\nall of it is in {kept}\n"
        f"again: {again} python -m pytest -m soak 'tests/hosts/{test}'",
        pytrace=False,
    )


def play_seeds(recovery: str, backend: str, folder: Path) -> None:
    """Play the seeds that the environment names."""
    for seed in range(FIRST, FIRST + COUNT):
        history = AgentHistory.drawn(seed, recovery, backend, RUN_S)
        counts = play(history, folder / str(seed))
        print(f"{recovery} {backend} seed {seed}: {counts}", flush=True)
        shutil.rmtree(folder / str(seed))


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("recovery", ["in-place", "restarts"])
@pytest.mark.parametrize("backend", ["elastane", "etcd"])
def test_no_history_of_faults_breaks_what_a_job_promises(
    recovery: str, backend: str, tmp_path: Path
) -> None:
    play_seeds(recovery, backend, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("recovery", SCRIPTS)
@pytest.mark.parametrize("backend", ["elastane", "file", "etcd", "redis"])
def test_no_history_of_faults_breaks_what_a_job_of_an_unmodified_script_promises(
    recovery: str, backend: str, tmp_path: Path
) -> None:
    play_seeds(recovery, backend, tmp_path)


_SOAK = test_no_history_of_faults_breaks_what_a_job_promises
_SCRIPTS = test_no_history_of_faults_breaks_what_a_job_of_an_unmodified_script_promises
