"""The meaning of notices, as pure code: sources of `--notices`, texts with a deadline, what is new.

A source shows all its notices each time it is read. `NewNotices` reports each of them once, and
again when its node has to leave for it, or when its deadline has come closer.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from msgspec.structs import replace

from elastane.errors import UsageError
from elastane.notices.dialogue import time_s
from elastane.process.streams.plan import parse_needles
from elastane.protocol.events import Notice

# A node leaves this long before its deadline, or earlier if its drain may take longer. AWS gives
# 120 s, which are for the drain; Azure announces some maintenance days before, and may cancel it.
DRAIN_BEFORE_S = 180.0
# A deadline farther away than this was not meant.
WITHIN_MAX_S = 1e8
# Notices of one source at a time; a machine has one or two.
NOTICES_MAX = 32
# Characters of a notice's reason, which goes into each log and message about the node's end.
REASON_CHARS_MAX = 200
# The same notice with a deadline that is sooner by this is reported again. Clocks that are read in
# whole seconds differ by less.
SOONER_S = 2.0
_SECONDS = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)s?")
CLOUDS = ("aws", "gcp", "azure")
# Of all three clouds, on the link of each machine.
METADATA_HOST, METADATA_PORT = "169.254.169.254", 80
# Each server's own paths are asked for, so an address has none; 12 digits are too many for a port.
_URL = re.compile(
    r"http://(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^/:@?#\[\]]+))(?::(?P<port>[0-9]{1,12}))?/?"
)
# The form of a command in an option.
SHELL_WORDS = "words as in a shell: each quote is closed, and no backslash stands at the end"
_FORMS = "file:PATH, command:WORDS, aws, gcp, azure, auto"
# How Azure marks its machines, whatever they run on.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a metadata server: an IP address, so that no name has to be resolved."""

    host: str = METADATA_HOST
    port: int = METADATA_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == METADATA_PORT else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """One source: its kind, and where it is: a path, the words of a command, or an address.

    A cloud without an address is asked at its usual one.
    """

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}" if self.where else self.kind

    @property
    def words(self) -> list[str]:
        """The program and the arguments of a command."""
        return shlex.split(self.where)

    @property
    def address(self) -> Address:
        """The address of a cloud's metadata server; ValueError with the fault of the text."""
        return _address(self.where) if self.where else Address()


def _address(where: str) -> Address:
    """Return the address in `where`; raises ValueError, in words of ours."""
    found = _URL.fullmatch(where)
    if found is None:
        raise ValueError("it has another form")
    host, port = found["v6"] or found["host"], int(found["port"] or METADATA_PORT)
    try:
        ip = ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no IP address, and no name is resolved") from None
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port} is no port: it is not from 1 to 65535")
    return Address(str(ip), port)


def read_sources(text: str) -> tuple[NoticeSource, ...]:
    """Return the sources of `--notices`, each once; UsageError names the item that is none."""
    return tuple(dict.fromkeys(_read_source(item.strip()) for item in parse_needles(text)))


def _read_source(item: str) -> NoticeSource:
    kind, _, where = item.partition(":")
    source = NoticeSource(kind, where)
    try:
        if kind in CLOUDS and source.address:
            return source
        if (kind == "command" and source.words) or (kind == "file" and where) or item == "auto":
            return source
    except ValueError as error:
        what = SHELL_WORDS if kind == "command" else f"{kind}:http://IP[:PORT]; {error}"
        raise _bad(item, what) from None
    raise _bad(item, f"one of {_FORMS}")


def _bad(item: str, expected: str) -> UsageError:
    return UsageError(
        f"--notices: {item[:200]!r}",
        slug="bad-option-value",
        expected=expected,
        next_step="see docs/notices.md; a comma in a path or a command is written ,,",
    )


def cloud_of(dmi: Mapping[str, str]) -> str:
    """Return the cloud that a machine's firmware names, or an empty string.

    `dmi` has files of /sys/class/dmi/id. The marks are those that cloud-init's ds-identify takes.
    """
    vendor = dmi.get("sys_vendor", "")
    if vendor == "Amazon EC2" or dmi.get("bios_version", "").endswith(".amazon"):
        return "aws"
    if dmi.get("product_name", "") == "Google Compute Engine":
        return "gcp"
    return "azure" if dmi.get("chassis_asset_tag", "") == _AZURE_TAG else ""


def read_text(source: NoticeSource, text: str, age_s: float, clock_s: float) -> Notice:
    """Return the notice that a file holds, or that a command wrote in a line.

    The first word of its first line may be the deadline: seconds from when the text was first seen,
    `age_s` ago, or a time by ISO 8601 (UTC without an offset), of which `clock_s` is now, in
    seconds since 1970. The rest is the reason.
    """
    line = next((line for line in map(printable, text.splitlines()) if line), "")
    first, _, rest = line.partition(" ")
    within_s = None
    if counted := _SECONDS.fullmatch(first):
        within_s = float(counted[1]) - age_s
    elif (at_s := time_s(first)) is not None:
        within_s = at_s - clock_s
    if within_s is not None:
        within_s = min(max(0.0, within_s), WITHIN_MAX_S)
    reason = (line if within_s is None else rest.strip()) or f"{source.where} says so"
    return Notice(source.kind, printable(reason)[:REASON_CHARS_MAX], within_s=within_s)


def printable(text: str) -> str:
    """Return `text` with a space for each character that a terminal does not print."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


class NewNotices:
    """Selects the notices of one source that are to be reported now.

    `lead_s`: a node leaves this long before its deadline. A notice of a later one is reported as
    one that does not drain yet.
    """

    def __init__(self, lead_s: float) -> None:
        self._lead_s = max(lead_s, DRAIN_BEFORE_S)
        self._deadlines: dict[tuple[str, bool], float] = {}

    def news(self, found: Sequence[Notice], now_s: float) -> list[Notice]:
        """Return the new ones of `found`, all that the source shows at `now_s` (monotonic)."""
        before, self._deadlines = self._deadlines, {}
        news = []
        for notice in map(self._as_of_now, found[:NOTICES_MAX]):
            key = notice.reason, notice.drains
            deadline_s = math.inf if notice.within_s is None else now_s + notice.within_s
            known_s = min(before.get(key, math.inf), self._deadlines.get(key, math.inf))
            is_known = key in before or key in self._deadlines
            if not is_known or deadline_s < known_s - SOONER_S:
                news.append(notice)
            self._deadlines[key] = min(known_s, deadline_s)
        return news

    def _as_of_now(self, notice: Notice) -> Notice:
        is_early = notice.within_s is not None and notice.within_s > self._lead_s
        return replace(notice, drains=False) if is_early else notice
