"""One half of a parted job: saves in its round until it is fenced off, or has made COUNT saves.

    checkpoint_half.py FOLDER ROUND FIRST COUNT

Prints a line of JSON: the steps whose saves returned as published, and whether it was fenced off.
"""

import contextlib
import json
import sys

from small_saves import key_of, opened, save

from elastane.errors import FencedError


def main():
    where, number, first, count = sys.argv[1], *map(int, sys.argv[2:])
    repository, published, fenced = opened(where), [], False
    for step in range(first, first + count):
        try:
            save(repository, step, round=number)
        except FencedError:
            fenced = True
        except FileNotFoundError:  # the other half has removed what this one was writing
            with contextlib.suppress(FencedError):
                repository.check_fence(key_of(step, round=number))
                raise
            fenced = True
        if fenced:
            break
        published.append(step)
        print(step, file=sys.stderr, flush=True)
        repository.prune(2)
    print(json.dumps({"published": published, "fenced": fenced}))


if __name__ == "__main__":
    main()
