"""Ends a process that saves before each system call that changes something, as SIGKILL would.

    checkpoint_steps.py FOLDER

Before each such save there is a sound checkpoint of the step before; after it either that or the
new one must be the newest valid. Prints a line of JSON: at how many calls, and how often which.
"""

import json
import os
import signal
import sys
from collections import Counter

from checkpoint_kills import save

from elastane.storage import Repository, open_storage

# Those that change something; between two of them it does not matter when a process ends.
CALLS = ("open", "mkdir", "pwrite", "write", "fsync", "link", "unlink", "rmdir")


def count_down(calls):
    """Let this process be killed before the call with this number."""
    left, os_open = [calls], os.open
    for name in CALLS:
        real = getattr(os, name)

        def counted(*args, real=real, **kwargs):
            left[0] -= real is not os_open or bool(args[1] & os.O_CREAT)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)


def ended_at(where, step, calls):
    """Save and prune in a child that is killed at a call; return whether it was."""
    child = os.fork()
    if child == 0:
        repository = Repository(open_storage(where))
        repository.storage.place()
        count_down(calls)
        save(repository, step)
        repository.prune(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main():
    where, found = sys.argv[1], Counter()
    save(Repository(open_storage(where)), 1)
    step, calls = 1, 1
    while ended_at(where, step + 1, calls):
        repository = Repository(open_storage(where))
        choice = repository.newest_valid()
        assert choice.found is not None and not choice.skipped, (calls, choice)
        newest = choice.found.key.step
        assert newest in (step, step + 1), (calls, newest, step)
        found["previous" if newest == step else "new"] += 1
        step, calls = newest, calls + 1
        for folder in repository.unfinished():
            repository.storage.remove(folder)
    print(json.dumps({"calls": calls, **found}))


if __name__ == "__main__":
    main()
