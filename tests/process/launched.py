"""Functions that tests launch by name. The module is light, since each worker imports it."""

import atexit
import os
import sys
import threading
from pathlib import Path


def ranked():
    return int(os.environ["RANK"])


def arguments(*args, **kwargs):
    return os.environ["RANK"], args, kwargs


def chatty():
    print("one")
    print("two", file=sys.stderr)
    os.write(1, b"three\n")


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def by(self, number):
        return self.factor * number

    def __call__(self, number):
        return -self.factor * number


class AbortsWhenDropped:
    """Aborts a process that destroys its modules at exit, as torch's threads sometimes do."""

    def __init__(self) -> None:
        self.abort = os.abort

    def __del__(self) -> None:
        self.abort()


def aborts_at_teardown(kept: str, ends: str) -> int:
    """Return 7, or raise; leave a thread, an exit handler and an object that outlive the call."""

    def note(word: str) -> None:
        with Path(kept).open("a") as file:
            file.write(word)

    vars(sys.modules["json"])["kept"] = AbortsWhenDropped()
    threading.Thread(target=note, args=("joined ",)).start()
    atexit.register(note, "exit")
    if ends == "raises":
        raise ValueError("of the function")
    return 7
