"""The control plane of a job in virtual time: thousands of histories of faults, one seed each."""

from elastane.testing.simulation.checks import Violation
from elastane.testing.simulation.faults import Setting, setting_of
from elastane.testing.simulation.history import History, HistoryFailedError, Result, run_seed

__all__ = [
    "History",
    "HistoryFailedError",
    "Result",
    "Setting",
    "Violation",
    "run_seed",
    "setting_of",
]
