"""A hard limit of open files that no worker could be started with is refused at once."""

from __future__ import annotations

import resource

import pytest

from elastane.agent import main
from elastane.errors import ConfigurationError


def test_a_hard_limit_below_the_numbers_of_a_workers_descriptors_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with pytest.raises(ConfigurationError, match="may open 256 files") as refused:
        main.launch(None)
    assert refused.value.slug == "descriptor-limit"
    assert refused.value.next_step == "ulimit -n 1024"
