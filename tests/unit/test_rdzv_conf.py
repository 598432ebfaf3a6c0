"""`--rdzv-conf`: keys, units, and durations that adapt to one another or are refused."""

import pytest

from elastane.errors import ConfigurationError, UsageError
from elastane.options.rendezvous import read_conf, timing_of
from elastane.protocol.limits import Timing, check


def timing(text):
    return timing_of(read_conf(text).durations)


def test_an_empty_configuration_has_the_defaults():
    assert timing("") == Timing()


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("join_timeout", "join_timeout_s"),
        ("timeout", "join_timeout_s"),
        ("last_call_timeout", "last_call_max_s"),
        ("keep_alive_interval", "heartbeat_s"),
    ],
)
def test_torchruns_keys_set_our_durations(key, field):
    assert getattr(timing(f"{key}=45.5"), field) == 45.5


@pytest.mark.parametrize("field", Timing.__struct_fields__)
def test_every_duration_can_be_set_with_and_without_its_unit(field):
    value = 45.0 if field == "isolation_limit_s" else 0.75
    for key in (field, field.removesuffix("_s"), field.replace("_", "-")):
        assert getattr(timing(f"{key}={value}"), field) == value


def test_a_short_isolation_limit_is_refused_and_a_long_silence_lengthens_it():
    with pytest.raises(ConfigurationError, match="must be at least 15 s"):
        timing("isolation_limit=14")
    assert timing("silence=100").isolation_limit_s == 200
    assert timing("silence=60").isolation_limit_s == 120
    with pytest.raises(ConfigurationError, match="needs isolation_limit_s >= 40 s"):
        timing("silence=20,isolation_limit=30")


def test_keep_alive_attempts_are_how_long_silence_may_last():
    assert timing("keep_alive_interval=5,keep_alive_max_attempt=4").silence_s == 20
    assert timing("keep_alive_interval=5").silence_s == 15
    assert timing("keep_alive_interval=5,silence=30").silence_s == 30


def test_defaults_adapt_to_a_duration_that_was_set():
    short = timing("join_timeout=2")
    assert short.last_call_max_s <= 2
    assert short.last_call_s <= 2
    assert timing("heartbeat=10").silence_s == 20
    for text in ("last_call=100", "last_call_max=1000", "silence=0.1", "lease_ttl=0.2"):
        assert not check(timing(text))


def test_two_contradicting_durations_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"heartbeat_s = 5 s needs silence_s >= 10 s"):
        timing("heartbeat=5,silence=6")


@pytest.mark.parametrize("text", ["join_timeout", "=3", "join_timeout=", "join_timeout=soon"])
def test_a_text_without_a_pair_or_number_is_refused(text):
    with pytest.raises(UsageError) as caught:
        read_conf(text)
    assert caught.value.slug == "bad-rdzv-conf"


@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_a_duration_is_finite_and_not_negative(value):
    with pytest.raises(UsageError):
        read_conf(f"silence={value}")


def test_an_unknown_key_gets_the_nearest_name():
    with pytest.raises(UsageError, match="join_timout") as caught:
        read_conf("join_timout=3")
    assert "join_timeout" in caught.value.expected


def test_keys_without_effect_are_said_to_have_none():
    conf = read_conf("read_timeout=60,close_timeout=3")
    assert not conf.durations
    assert len(conf.notes) == 2
    assert "read_timeout" in conf.notes[0]


def test_the_token_is_read_and_never_shown():
    conf = read_conf("token=hush,is_host=true,rank=2")
    assert (conf.token, conf.is_host, conf.rank) == ("hush", True, 2)
    assert "hush" not in repr(conf)
