"""The sum that does not depend on the world, against plain all-reduce, in the same processes.

python -m bench.reduction [floats]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

SHARDS = 8
REPEATS = 9
FLOATS = 2_000_000


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "process"))
    from comms_crew import Crew  # type: ignore[import-not-found]

    floats = int(sys.argv[1]) if len(sys.argv) > 1 else FLOATS
    print(f"{floats} floats, {SHARDS} shards, gloo, median of {REPEATS}")
    for size in (2, 3, 4, 5):
        with Crew(size, "times_of_sums", size, SHARDS, floats, REPEATS) as crew:
            plain, tree = zip(*crew.hear_all(), strict=True)
        plain_ms, tree_ms = 1000 * statistics.median(plain), 1000 * statistics.median(tree)
        print(
            f"world {size}: all-reduce {plain_ms:6.1f} ms, tree {tree_ms:6.1f} ms,"
            f" {tree_ms / plain_ms:.2f} times"
        )


if __name__ == "__main__":
    main()
