"""Functions for workers of agents, in a module that is quick to import."""

from __future__ import annotations

import os
import time
from typing import Any


def value(word: str, number: int) -> tuple[str, int, int, int]:
    """Return the arguments, the rank and the size of the world."""
    return word, number, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def break_down(rank: str) -> None:
    """Raise in the worker of one local rank; the others wait until they are stopped."""
    if os.environ["LOCAL_RANK"] == rank:
        raise ArithmeticError("no such sum")
    time.sleep(600)


def put(queue: Any, rank: str) -> str:
    """Put something into a queue that the launching process made."""
    queue.put(rank)
    return "put"
