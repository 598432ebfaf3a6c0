"""Spot interruptions and rebalance recommendations, as EC2's metadata server reports them.

Pure. The formats are those of the EC2 User Guide: "Spot Instance interruption notices"
(spot/instance-action, about two minutes before), "EC2 instance rebalance recommendations", and "Use
the Instance Metadata Service": tokens of IMDSv2 alone, 401 for one that is not valid any more.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import msgspec

from elastane.notices.dialogue import Ask, Dialogue, MetadataAnswer
from elastane.protocol.events import Notice
from elastane.protocol.unreadable import UNREADABLE

TOKEN_TTL_S = 21_600
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")
_SPOT = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class _InstanceAction(msgspec.Struct):
    action: str
    time: str = ""


class _Rebalance(msgspec.Struct):
    notice_time: str = msgspec.field(name="noticeTime", default="")


class AwsMetadata:
    """The metadata server of an instance; it keeps the token between two dialogues."""

    # As the User Guide recommends.
    pause_s = 5.0

    def __init__(self) -> None:
        self._token = ""

    def ask(self) -> Dialogue:
        """Ask for an interruption, and without one for a recommendation."""
        answer = yield from self._get(_SPOT)
        if answer.status == 200:
            return [_interruption(answer)]
        answer = yield from self._get(_REBALANCE)
        return [_recommendation(answer)] if answer.status == 200 else []

    def _get(self, path: str) -> Generator[Ask, MetadataAnswer, MetadataAnswer]:
        """Ask with a token that is valid; 404 is the answer while there is nothing."""
        if not self._token:
            yield from self._renew()
        answer = yield self._ask(path)
        if answer.status == 401:
            yield from self._renew()
            answer = yield self._ask(path)
        if answer.status not in (200, 404):
            self._token = ""
            raise answer.unreadable(path)
        return answer

    def _ask(self, path: str) -> Ask:
        return Ask(path, {"X-aws-ec2-metadata-token": self._token})

    def _renew(self) -> Generator[Ask, MetadataAnswer, None]:
        self._token = ""
        path, ttl = "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds"
        answer = yield Ask(path, {ttl: str(TOKEN_TTL_S)}, method="PUT")
        # A malformed token could add lines to the next request.
        if answer.status != 200 or not _TOKEN.fullmatch(answer.text):
            raise answer.unreadable(path)
        self._token = answer.text


def _interruption(answer: MetadataAnswer) -> Notice:
    """Return the notice: whatever the action is, the instance goes."""
    try:
        found = msgspec.json.decode(answer.body, type=_InstanceAction)
    except UNREADABLE:
        raise answer.unreadable(_SPOT) from None
    reason = f"spot interruption: {found.action[:40]} at {found.time[:40]}"
    return Notice("aws", reason, within_s=answer.until_s(found.time))


def _recommendation(answer: MetadataAnswer) -> Notice:
    """Return the notice, which is no reason to leave: the instance may stay for hours."""
    try:
        found = msgspec.json.decode(answer.body, type=_Rebalance)
    except UNREADABLE:
        raise answer.unreadable(_REBALANCE) from None
    reason = f"rebalance recommendation of {found.notice_time[:40]}"
    return Notice("aws", reason, drains=False)
