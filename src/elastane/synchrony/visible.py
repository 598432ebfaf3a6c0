"""The rank and world size as the program sees them, for frameworks that keep or need them.

They change when a collective returns, at the same place of the program on all members. So a
framework that is told in `show` changes with the program, and all members decide alike whether a
function was interrupted by a change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class VisibleWorld:
    """What the program sees of the world; one for each process.

    `first_rank` and `first_size`: those with which the process began; None before the first world.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.first_rank: int | None = None
        self.first_size: int | None = None
        self._changes = 0
        self._told: list[Callable[[], None]] = []

    def show(self, rank: int, size: int) -> None:
        """Change rank and size, and tell those who asked for it."""
        self.rank, self.size = rank, size
        if self.first_rank is None:
            self.first_rank, self.first_size = rank, size
        self._changes += 1
        for tell in self._told:
            tell()

    def tell(self, told: Callable[[], None]) -> None:
        """Call `told` at each change, also at the first."""
        self._told.append(told)

    def whole(
        self,
        call: Callable[[], T],
        restore: Callable[[], None] = lambda: None,
        *,
        waits: bool = False,
    ) -> T:
        """Return `call()`, with all its collectives over the same members.

        `call` runs again, after `restore`, if the world has changed in it. A barrier comes first,
        so that the loss of a member for which the others wait falls into none of its collectives:
        an all-gather could not be repeated in a smaller world. `waits`: also wait until all members
        have made it, for what only one of them does, such as a save.
        """
        while True:
            dist.barrier()
            before = self._changes
            result = call()
            if waits:
                dist.barrier()
            if self._changes == before:
                return result
            restore()

    def make_whole(self, owner: Any, name: str, *, waits: bool = False) -> None:
        """Let the function `name` of a class or module always run as `whole` does."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return self.whole(lambda: function(*args, **kwargs), waits=waits)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(called) if is_static else called)
