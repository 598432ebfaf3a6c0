"""The Redis server of a command line, and settings that are refused before any connection."""

from __future__ import annotations

import pytest

from elastane.errors import ConfigurationError
from elastane.stores.redis import read_settings


@pytest.mark.parametrize(
    ("endpoint", "conf", "url", "database"),
    [
        ("h", {}, "redis://h:6379", 0),
        ("h:7000", {"db": "3"}, "redis://h:7000", 3),
        ("redis://h:7000/2", {}, "redis://h:7000", 2),
        ("rediss://h", {}, "rediss://h:6379", 0),
        ("h", {"cacert": "ca.pem"}, "rediss://h:6379", 0),
        ("[::1]:7", {}, "redis://[::1]:7", 0),
    ],
)
def test_an_endpoint_is_a_host_or_a_url(endpoint, conf, url, database) -> None:
    settings = read_settings(endpoint, conf)
    assert (settings.url, settings.database) == (url, database)


@pytest.mark.parametrize(
    ("endpoint", "conf", "slug"),
    [
        ("http://h", {}, "endpoint-syntax"),
        ("h:1,i:1", {}, "endpoint-syntax"),
        ("redis://me:secret@h", {}, "endpoint-syntax"),
        ("h", {"db": "one"}, "bad-rdzv-conf"),
        ("h", {"cacert": "c", "cert": "c"}, "bad-rdzv-conf"),
        ("h", {"user": "me"}, "bad-rdzv-conf"),
        ("redis://h", {"cacert": "c"}, "bad-rdzv-conf"),
        ("h", {"redis_prefix": "a b"}, "store-key"),
    ],
)
def test_impossible_settings_are_refused(endpoint, conf, slug) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings(endpoint, conf)
    assert caught.value.slug == slug
    assert "secret" not in str(caught.value)


def test_a_password_is_in_no_representation() -> None:
    assert "hush" not in repr(read_settings("h", {"password": "hush"}))
