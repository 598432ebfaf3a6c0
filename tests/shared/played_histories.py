"""Plays simulated histories; the message of a failure has the shortest history that fails."""

import pytest

from simulation import Cut, History, HistoryFailedError, setup_of
from simulation.batch import play
from simulation.shrink import shrunk


def all_hold(seeds, modes, jobs=1, **drawn):
    """Play each seed with a store (True) or without (False); `drawn` is for `setup_of`."""
    failed = play(seeds, modes, jobs, **drawn).failed
    if failed is not None:
        seed, store_backed = failed
        played(setup_of(seed, store_backed=store_backed, **drawn))
        pytest.fail(f"seed {seed} failed in the batch and held alone: not one history")


def played(setting):
    """Play one history; return it and its result."""
    history = History(setting)
    try:
        return history, history.run()
    except HistoryFailedError as failure:
        pytest.fail(str(shrunk(setting, Cut(), failure)))
