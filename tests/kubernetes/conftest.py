"""Fixtures of tests against a real control plane; without one they skip and say so.

`control_plane` is one for all tests of the process, `namespace` one of a test's own in it, and
`cluster` its nodes, of which there are as many as the test adds. If a test fails, its report shows
their logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import binaries, nodes
from bed.controlplane import ControlPlane
from bed.nodes import Cluster
from elastic_jobs import ElasticJob, Operator, prepare
from kube_bed import shared_control_plane


@pytest.fixture(scope="session")
def control_plane() -> ControlPlane:
    return shared_control_plane()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    name = control_plane.namespace()
    yield name
    with contextlib.suppress(AssertionError, OSError):
        control_plane.ask("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def cluster(control_plane: ControlPlane) -> Iterator[Cluster]:
    """Without nodes yet; each pod has namespaces and an address of its own."""
    binaries.need(nodes.unavailable())
    with Cluster(control_plane, apart=True) as made:
        yield made


@pytest.fixture
def operator(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Operator]:
    """An operator over all namespaces, as admin."""
    with Operator(control_plane, tmp_path / "operator") as made:
        yield made


@pytest.fixture
def make_job(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., ElasticJob]]:
    """Jobs of the test's own namespace, each with a folder; nothing is applied yet."""
    with contextlib.ExitStack() as jobs:

        def make(name: str = "train", **more: Any) -> ElasticJob:
            folder = prepare(tmp_path / name)
            job = ElasticJob(folder, name=name, plane=control_plane, space=namespace, **more)
            request.node.jobs = [*getattr(request.node, "jobs", []), job]
            return jobs.enter_context(job)

        yield make


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for job in getattr(item, "jobs", []):
            report.sections.append((job.name, job.story()))
        for name in ("cluster", "operator", "control_plane"):
            told = getattr(item, "funcargs", {}).get(name)
            if told is not None:
                report.sections.append((name, told.report()))
