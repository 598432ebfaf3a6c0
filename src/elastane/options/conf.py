"""`--rdzv-conf`: torchrun's keys and elastane's, read into a checked `Timing`.

A duration that the user sets moves the defaults around it: a join_timeout of 10 s shortens the
longest last call. It never moves another duration that the user set; two that contradict are
refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastane.errors import ConfigurationError, UsageError
from elastane.protocol.limits import PAIRS, Timing, check
from elastane.stores import registry

# torchrun's spelling, and what it sets here.
_TORCHRUN = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_max_s",
    "keep_alive_interval": "heartbeat_s",
}
_IDLE = {
    "close_timeout": "closing a job needs no store operation",
    "heartbeat_timeout": "heartbeats are frames of a session; see silence",
    "read_timeout": "no store is read; see silence",
    "store_type": "the coordinator keeps the state itself",
}
_TLS = ("tls_cert", "tls_key", "tls_ca")
_OTHER = ("token", "is_host", "rank", "keep_alive_max_attempt", *_TLS)
_FIELDS = Timing.__struct_fields__


@dataclass(frozen=True)
class Conf:
    """The content of `--rdzv-conf`."""

    durations: dict[str, float] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    is_host: bool | None = None
    rank: int | None = None
    tls: dict[str, str] = field(default_factory=dict)
    store: dict[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()


def read_conf(text: str) -> Conf:
    """Read `k=v,k=v`; UsageError for an unknown key, a missing `=` or a bad number."""
    pairs = _pairs(text)
    durations: dict[str, float] = {}
    store: dict[str, str] = {}
    for key, value in pairs.items():
        name = _duration_name(key)
        if name:
            durations[name] = _number(key, value)
        elif key not in (*_IDLE, *_OTHER):
            if not registry.backends_of_key(key):
                raise _unknown(key)
            store[key] = value
    if "keep_alive_max_attempt" in pairs:
        beat = durations.get("heartbeat_s", Timing().heartbeat_s)
        attempts = _number("keep_alive_max_attempt", pairs["keep_alive_max_attempt"])
        durations.setdefault("silence_s", beat * attempts)
    elif "keep_alive_interval" in pairs:
        durations.setdefault("silence_s", durations["heartbeat_s"] * 3)
    return Conf(
        durations=durations,
        token=pairs.get("token", ""),
        is_host=_yes(pairs["is_host"]) if "is_host" in pairs else None,
        rank=_whole("rank", pairs["rank"]) if "rank" in pairs else None,
        tls={key: pairs[key] for key in _TLS if key in pairs},
        store=store,
        notes=tuple(
            f"--rdzv-conf {key} has no effect here: {_IDLE[key]}" for key in pairs if key in _IDLE
        ),
    )


def timing_of(requested: dict[str, float], defaults: Timing | None = None) -> Timing:
    """Return the defaults with `requested` applied; ConfigurationError if durations contradict."""
    defaults = defaults or Timing()
    values = {name: getattr(defaults, name) for name in _FIELDS} | requested
    # From the wide bounds to the narrow ones: a default yields to a duration that the user set.
    for _ in PAIRS:
        for small, large, factor, _why in PAIRS:
            if values[small] * factor > values[large]:
                if small not in requested:
                    values[small] = values[large] / factor
                elif large not in requested:
                    values[large] = values[small] * factor
    timing = msgspec.structs.replace(Timing(), **values)
    faults = check(timing)
    if faults:
        raise ConfigurationError(
            "durations that cannot hold together: " + "; ".join(faults),
            slug="bad-timing",
            where="--rdzv-conf, --shutdown-timeout or --drain-timeout",
            next_step="leave one of the two out: its default adapts to the other",
        )
    return timing


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UsageError(
                f"--rdzv-conf: {part!r} is no KEY=VALUE",
                slug="bad-rdzv-conf",
                expected="KEY=VALUE,KEY=VALUE,...",
                next_step="--rdzv-conf join_timeout=600,last_call_timeout=10",
            )
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def _duration_name(key: str) -> str:
    if key in _TORCHRUN:
        return _TORCHRUN[key]
    return next((name for name in (key, f"{key}_s") if name in _FIELDS), "")


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(
            f"--rdzv-conf {key} = {value!r}",
            slug="bad-rdzv-conf",
            expected="a number, not negative; durations are seconds",
        )
    return number


def _whole(key: str, value: str) -> int:
    number = _number(key, value)
    if number != int(number):
        raise UsageError(
            f"--rdzv-conf {key} = {value!r}",
            slug="bad-rdzv-conf",
            expected="a whole number, not negative",
        )
    return int(number)


def _yes(value: str) -> bool:
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise UsageError(
        f"--rdzv-conf is_host = {value!r}", slug="bad-rdzv-conf", expected="true or false"
    )


def _unknown(key: str) -> UsageError:
    import difflib

    ours = [name.removesuffix("_s") for name in _FIELDS]
    known = list(dict.fromkeys([*_TORCHRUN, *_OTHER, *registry.known_keys(), *_IDLE, *ours]))
    near = difflib.get_close_matches(key, known, n=1)
    return UsageError(
        f"--rdzv-conf: no such key: {key}",
        slug="bad-rdzv-conf",
        expected=f"did you mean {near[0]}?" if near else "one of " + ", ".join(sorted(known)),
    )
