"""How a job ended, for an agent that has no coordinator left to ask.

The coordinator may have died between its record and its messages, or this host stood still
meanwhile. The leadership then reports that the job has ended, which is a configuration mistake for
a new node. An agent that took part ends like all others instead. If the store does not answer, the
mistake is reported.
"""

from __future__ import annotations

from elastane.errors import StoreError
from elastane.protocol.effects import Exit
from elastane.stores.jobs import JobKeys


async def recorded_exit(exit_: Exit, keys: JobKeys | None, *, was_welcomed: bool) -> Exit:
    """Return the exit of the job's record, if the leadership found the job closed."""
    closed = exit_.outcome is not None and exit_.outcome.slug == "rdzv-closed"
    if keys is None or not was_welcomed or not closed:
        return exit_
    try:
        record = await keys.load()
    except StoreError:
        return exit_
    outcome = record.outcome if record is not None else None
    return exit_ if outcome is None else Exit(outcome.exit_code, outcome.reason, outcome)
