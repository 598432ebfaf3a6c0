"""Makes the clock of this process's host wrong by the seconds in the file JUMPING_CLOCK.

For Python alone, and the time of day alone: a clock that is set leaves the monotonic one as it is.
The interpreter imports this module at its start where its folder is in PYTHONPATH.
"""

import os
import time

_LOOK_S = 0.05


class Shift:
    """The seconds in a file, which is read again from time to time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_s = float("-inf")
        self._value_s = 0.0

    def seconds(self) -> float:
        now_s = time.monotonic()
        if now_s - self._read_s > _LOOK_S:
            self._read_s, self._value_s = now_s, self._read()
        return self._value_s

    def _read(self) -> float:
        try:
            with open(self._path, encoding="ascii") as file:
                return float(file.read())
        except (OSError, ValueError):
            return 0.0


if path := os.environ.get("JUMPING_CLOCK"):
    shift, real, real_ns = Shift(path), time.time, time.time_ns
    time.time = lambda: real() + shift.seconds()
    time.time_ns = lambda: real_ns() + int(shift.seconds() * 1e9)
