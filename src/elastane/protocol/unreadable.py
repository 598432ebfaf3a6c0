"""What a decoder raises for untrusted bytes, as one tuple for all their readers.

Text that is not UTF-8 gives a ValueError that is not msgspec's own. Endless nesting gives a
RecursionError, also in fields that the type does not have (measured with msgspec 0.22).
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
