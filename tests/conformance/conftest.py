from __future__ import annotations

from pathlib import Path

import pytest
from store_harness import HARNESSES, Harness

from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.stores.etcd import gateway


@pytest.fixture(params=sorted(HARNESSES))
def harness(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Harness:
    # A job asks again after this time. A test does not, and its host may be busy.
    monkeypatch.setattr(gateway, "ATTEMPT_TIMEOUT_S", STORE_TIMEOUT_S)
    return HARNESSES[request.param](tmp_path)
