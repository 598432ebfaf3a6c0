"""All tests here need hosts, and so root. Without root they are skipped, or fail in CI."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import need_hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.root)


@pytest.fixture(autouse=True, scope="session")
def hosts_can_be_had() -> None:
    need_hosts()
