"""The values that a client logs."""

from typing import NamedTuple


class Metric(NamedTuple):
    """One value, as in MLflow."""

    key: str
    value: float
    timestamp: int
    step: int
