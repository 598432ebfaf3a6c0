"""The bounds of an elastic rendezvous, under torch 2.13's names."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


class RendezvousTimeout:
    """The timeouts of a rendezvous.

    `join`: too few nodes for this long ends the job. `last_call`: the longest wait for more than
    the minimum; it ends earlier, 3 s after the latest arrival. `close`: how long other nodes may
    run after a node closed the job. `heartbeat` has no effect here, since heartbeats are part of a
    session.
    """

    _DEFAULTS = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}  # noqa: RUF012

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        self._bounds: dict[str, timedelta] = {}
        # The timeouts that the caller gave; the others are defaults, which these override.
        self.given = frozenset(name for name, bound in given.items() if bound is not None)
        for name, bound in given.items():
            if bound is not None and bound <= timedelta(0):
                raise ValueError(f"{name} timeout = {bound}: expected more than nothing")
            self._bounds[name] = bound or timedelta(seconds=self._DEFAULTS[name])

    @property
    def join(self) -> timedelta:
        """See the class."""
        return self._bounds["join"]

    @property
    def last_call(self) -> timedelta:
        """See the class."""
        return self._bounds["last_call"]

    @property
    def close(self) -> timedelta:
        """See the class."""
        return self._bounds["close"]

    @property
    def heartbeat(self) -> timedelta:
        """See the class."""
        return self._bounds["heartbeat"]


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings that a handler was made with.

    A node that was silent for `keep_alive_max_attempt` times `keep_alive_interval` is dead. A node
    whose connection ends is dead at once.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    def check(self) -> None:
        """Raise ValueError for invalid settings."""
        if not self.run_id:
            raise ValueError("run_id = '': expected the job's id")
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes = {self.min_nodes}: expected 1 or more")
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"max_nodes = {self.max_nodes}: expected min_nodes ({self.min_nodes}) or more"
            )
