"""Simulated clusters: the real rules in virtual time, one history of faults per seed.

The rules of coordinator and agent are the production code; processes, network, store and training
are simulated here. A history that breaks an invariant raises HistoryFailedError with its story and
the command that replays it.
"""

from simulation.checks import Violation
from simulation.history import History, HistoryFailedError, HistoryResult, run_seed
from simulation.setup import Cut, HistorySetup, setup_of

__all__ = [
    "Cut",
    "History",
    "HistoryFailedError",
    "HistoryResult",
    "HistorySetup",
    "Violation",
    "run_seed",
    "setup_of",
]
