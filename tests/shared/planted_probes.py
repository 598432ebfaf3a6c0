"""Planted bugs of probes of nodes that are left out, for plain jobs and for jobs in place."""

import msgspec

from elastane.agent.rules import Probing
from elastane.coordinator.rules import cuts


def answer_all(monkeypatch):
    """Let agents report each probe as answered."""
    original = Probing.end

    def end(self, results):
        original(self, tuple(msgspec.structs.replace(each, answers=True) for each in results))

    monkeypatch.setattr(Probing, "end", end)


def ignore_silence(monkeypatch):
    """Let the coordinator record only the probes that were answered."""
    original = cuts.record_probes

    def record_probes(state, node, results):
        return original(state, node, [each for each in results if each.answers])

    monkeypatch.setattr(cuts, "record_probes", record_probes)
