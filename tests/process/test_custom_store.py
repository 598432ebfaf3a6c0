"""docs/custom-rendezvous.md, "A store": its package is installed as written, and runs a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from elected_jobs import elected_job, the_coordinator_dies_and_another_takes_over

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "custom-rendezvous.md").read_text()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the page's package, for this process and its children."""
    section = PAGE.split("\n## A store\n")[1].split("\n### ")[0]
    code, toml = (
        re.search(rf"```{kind}\n(.*?)```", section, re.S)[1] for kind in ("python", "toml")
    )
    site = tmp_path / "site"
    info = site / "my_store-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_store.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
    [(group, entries)] = tomllib.loads(toml)["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{known}" if known else str(site))
    return site


def test_the_store_of_the_page_runs_a_job_whose_coordinator_is_killed(
    tmp_path: Path, package: Path
) -> None:
    endpoint = str(tmp_path / "store.db")
    with elected_job(tmp_path / "job", "sqlite", endpoint, conf="sqlite_timeout=5") as job:
        the_coordinator_dies_and_another_takes_over(job)


def test_the_conformance_tests_run_a_given_store(tmp_path: Path, package: Path) -> None:
    environ = {**os.environ, "ELASTANE_TEST_STORES": f"sqlite={tmp_path / 'store.db'}"}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance", "-k"]
    chosen = "sqlite and (several_processes or conflict or goes_on_over or released)"
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, *words, chosen], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 4
