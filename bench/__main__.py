"""`python -m bench`: every table of the project; options go to bench.table."""

from __future__ import annotations

import subprocess
import sys

from bench import table


def main() -> int:
    code = table.main()
    if any(word == "--rows" for word in sys.argv[1:]):
        return code
    print("\nNodes that join one rendezvous, and the round after one of them was replaced:\n")
    sys.stdout.flush()
    # A process of its own: it opens thousands of connections.
    return subprocess.run([sys.executable, "-m", "bench.joining"], check=False).returncode or code


if __name__ == "__main__":
    sys.exit(main())
