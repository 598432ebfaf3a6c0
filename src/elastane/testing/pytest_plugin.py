"""A pytest fixture for tests of training scripts: `local_cluster` makes clusters and ends them.

pytest loads it by its entry point. A failed test shows the story of each of its clusters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from elastane.testing.cluster import LocalCluster

_NONE: list[LocalCluster] = []
_CLUSTERS = pytest.StashKey[list["LocalCluster"]]()


class MakeCluster(Protocol):
    """Makes a cluster for a script; the options are those of LocalCluster."""

    def __call__(self, *script: str, **options: Any) -> LocalCluster:
        """Return a cluster that has been entered."""
        ...


@pytest.fixture
def local_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeCluster]:
    """Make local clusters below tmp_path; their processes end with the test."""
    # Imported only if a test asks for it, because pytest loads this file in every project.
    from elastane.testing.cluster import LocalCluster

    made = request.node.stash.setdefault(_CLUSTERS, [])
    with ExitStack() as stack:

        def make(*script: str, **options: Any) -> LocalCluster:
            folder = options.pop("folder", tmp_path / f"cluster{len(made)}")
            cluster = stack.enter_context(LocalCluster(script, folder=folder, **options))
            made.append(cluster)
            return cluster

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the story of each cluster to the report of a failed test."""
    report = yield
    if report.when == "call" and report.failed:
        made = item.stash.get(_CLUSTERS, _NONE)
        for number, cluster in enumerate(made):
            report.sections.append((f"local cluster {number}: {cluster.job}", cluster.story()))
    return report
