"""Leaves out test files that import torch, for an environment without it: `make matrix`.

    pytest -p without_torch --left-out FILE

A plugin that a run asks for, so that a missing torch is an error everywhere else.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

_MISSING = "No module named 'torch'"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--left-out", default="", help="append the names of the files to this one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason=_MISSING))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "failed" and _MISSING in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {_MISSING}")
        if name := collector.config.getoption("--left-out"):
            with Path(name).open("a") as file:
                file.write(f"{collector.nodeid}\n")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that imports torch itself is skipped, not failed."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {_MISSING}")
    return report
