"""How a job ended, for an agent of it whom no coordinator is left to tell.

The coordinator may have died between the record and its messages, or this host stood still
meanwhile. The seat then says that the job has ended, which for a newcomer is a mistake in the
configuration; an agent that was in the job ends as all others did. Where the store does not
answer, it is left at the mistake.
"""

from __future__ import annotations

from elastane.errors import StoreError
from elastane.protocol.effects import Exit
from elastane.stores.jobs import JobKeys


async def as_on_record(exit_: Exit, keys: JobKeys | None, *, was_in_it: bool) -> Exit:
    """Return the exit that the job's record means, where the seat found the job ended."""
    closed = exit_.outcome is not None and exit_.outcome.slug == "rdzv-closed"
    if keys is None or not was_in_it or not closed:
        return exit_
    try:
        record = await keys.load()
    except StoreError:
        return exit_
    outcome = record.outcome if record is not None else None
    return exit_ if outcome is None else Exit(outcome.exit_code, outcome.reason, outcome)
