"""The worker's side of its ring of collectives: see `protocol.ring`.

Writes to the memory of the status page, without a lock and without a system call: records from the
threads that call collectives, and the board from one thread. It never fails: what has no room is
left out.
"""

from __future__ import annotations

import zlib
from pathlib import PurePath
from types import CodeType, FrameType

import msgspec

from elastane.protocol.ring import (
    BOARD_AT,
    BOARD_BYTES,
    BOARD_HEAD,
    SITE_BYTES,
    SITE_SHIFT,
    SITES,
    SITES_AT,
    Board,
)

# Parts of the paths of code that is not the user's; this package may lie elsewhere.
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/lib/python3"),
    f"{PurePath(__file__).parents[1]}/",
)
_FRAMES_MAX = 64


class CallSites:
    """The lines that call collectives, with their numbers in the ring's table of sites."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        # By the identity of a code object, which is held, since comparing two is slow. The numbers
        # are shifted to their place in a record.
        self.known: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._numbers: dict[str, int] = {}

    def number(self, frame: FrameType | None) -> int:
        """Return the number of the user's line in or above this frame; 0 if it has none.

        The line of a library is looked up at each call, since several of the user's may lead there.
        """
        user = frame
        for _ in range(_FRAMES_MAX):
            if user is None or not _is_library(user.f_code) or _is_main(user):
                break
            user = user.f_back
        user = user or frame
        if user is None:
            return 0
        number = self._add(f"{PurePath(user.f_code.co_filename).name}:{user.f_lineno}")
        if user is frame:
            self._codes[id(user.f_code)] = user.f_code
            self.known[id(user.f_code), user.f_lasti] = number << SITE_SHIFT
        return number

    def _add(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is not None:
            return number
        number = len(self._numbers) + 1
        if number >= SITES:
            return 0
        self._numbers[text] = number
        data = text.encode("utf-8", "replace")[:SITE_BYTES]
        at = SITES_AT + number * SITE_BYTES
        self._memory[at : at + len(data)] = data
        return number


def _is_library(code: CodeType) -> bool:
    return any(part in code.co_filename for part in _LIBRARIES)


def _is_main(frame: FrameType) -> bool:
    """Whether the frame is of the program, which is a library's if it was started by -m."""
    return bool(frame.f_globals.get("__name__") == "__main__")


def write_board(memory: memoryview, board: Board) -> bool:
    """Write the board; False if it is too long."""
    text = msgspec.json.encode(board)
    if len(text) > BOARD_BYTES - BOARD_HEAD.size:
        return False
    begin = BOARD_AT + BOARD_HEAD.size
    # A reader that comes in between sees a checksum that does not match.
    BOARD_HEAD.pack_into(memory, BOARD_AT, 0, 0)
    memory[begin : begin + len(text)] = text
    BOARD_HEAD.pack_into(memory, BOARD_AT, len(text), zlib.crc32(text))
    return True
