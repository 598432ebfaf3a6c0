"""The control plane of a job in virtual time: thousands of histories of faults, one seed each."""

from simulation.checks import Violation
from simulation.history import History, HistoryFailedError, HistoryResult, run_seed
from simulation.setup import Cut, Setting, setting_of

__all__ = [
    "Cut",
    "History",
    "HistoryFailedError",
    "HistoryResult",
    "Setting",
    "Violation",
    "run_seed",
    "setting_of",
]
