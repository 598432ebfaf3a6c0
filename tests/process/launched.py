"""What tests launch by name: light, since each worker imports it."""

import os
import sys


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
