"""What a decoder raises for bytes that nobody vouches for: one tuple for all who read such.

Text that is no UTF-8 is a ValueError that is not msgspec's own; nesting without end is a
RecursionError, in fields that the type does not have as well (measured with msgspec 0.22).
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
