"""A Python that is too old is named, where elastane was not installed by pip."""

import importlib.util
import sys

import pytest

import elastane


def test_an_older_python_is_refused_by_its_path_and_version(monkeypatch):
    spec = importlib.util.spec_from_file_location("elastane_elsewhere", elastane.__file__)
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    monkeypatch.setattr(sys, "version", "3.10.13 (main)")
    with pytest.raises(ImportError, match=r"needs Python 3\.11 or later; .* is 3\.10\.13$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
