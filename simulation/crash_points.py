"""Crash points: where a process that dies leaves an action half done.

A shell performs the effects of one list in order, and may be killed before each of them and after
the last. `coordinator_step` and `agent_step` name the place between two effects; the simulation
kills at each of them in turn. It knows effects only; nothing here fails.
"""

from __future__ import annotations

from enum import StrEnum

from elastane.protocol.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    Exit,
    Finished,
    Hangup,
    InterruptGroup,
    MarkGroup,
    Persist,
    RegroupWorkers,
    ReleaseGroup,
    RendezvousEffect,
    Send,
    StartGroup,
    StartWorkers,
    StopGroup,
    Transmit,
    TryAddresses,
    WriteEvent,
)


class EffectGap(StrEnum):
    """A place between two effects of one list."""

    NONE = ""  # nothing is half done here
    BEFORE_RECORD = "decided, not yet durable"
    AFTER_RECORD = "durable, not announced"
    BEFORE_MESSAGES = "about to send"
    BETWEEN_MESSAGES = "sent to some, not to others"
    AFTER_MESSAGES = "sent to all"
    BEFORE_HANGUP = "about to end a session"
    BEFORE_END = "about to end"
    BEFORE_START = "about to start workers"
    AFTER_START = "workers are starting, not reported"
    BEFORE_STOP = "about to stop workers"
    AFTER_STOP = "workers are stopping"
    BEFORE_DRAIN = "about to ask workers to checkpoint"
    BEFORE_REPORT = "about to report"
    AFTER_REPORT = "it is reported"


_BEFORE: dict[type, EffectGap] = {
    StartGroup: EffectGap.BEFORE_START,
    Decline: EffectGap.BEFORE_START,
    StopGroup: EffectGap.BEFORE_STOP,
    StartWorkers: EffectGap.BEFORE_START,
    RegroupWorkers: EffectGap.BEFORE_START,
    InterruptGroup: EffectGap.BEFORE_STOP,
    MarkGroup: EffectGap.BEFORE_DRAIN,
    AimGroup: EffectGap.BEFORE_DRAIN,
    ReleaseGroup: EffectGap.BEFORE_DRAIN,
    Transmit: EffectGap.BEFORE_REPORT,
    Exit: EffectGap.BEFORE_END,
}
_AFTER: dict[type, EffectGap] = {
    StartGroup: EffectGap.AFTER_START,
    StartWorkers: EffectGap.AFTER_START,
    RegroupWorkers: EffectGap.AFTER_START,
    InterruptGroup: EffectGap.AFTER_STOP,
    StopGroup: EffectGap.AFTER_STOP,
    Transmit: EffectGap.AFTER_REPORT,
}


def coordinator_step(done: RendezvousEffect | None, due: RendezvousEffect | None) -> EffectGap:
    """Return the place after `done` and before `due`; None: the begin or the end of the list."""
    if isinstance(due, Persist):
        return EffectGap.BEFORE_RECORD
    if isinstance(done, Persist):
        return EffectGap.AFTER_RECORD
    if isinstance(due, Send):
        return EffectGap.BETWEEN_MESSAGES if isinstance(done, Send) else EffectGap.BEFORE_MESSAGES
    if isinstance(due, Finished):
        return EffectGap.BEFORE_END
    if isinstance(due, Hangup):
        return EffectGap.BEFORE_HANGUP
    return EffectGap.AFTER_MESSAGES if isinstance(done, Send) else EffectGap.NONE


def agent_step(done: AgentEffect | None, due: AgentEffect | None) -> EffectGap:
    """Return the place after `done` and before `due`; None: the begin or the end of the list."""
    if due is not None and not isinstance(due, WriteEvent | TryAddresses):
        return _BEFORE[type(due)]
    return _AFTER.get(type(done), EffectGap.NONE)
