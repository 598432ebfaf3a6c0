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
    # Processes of their own: they open thousands of connections.
    code |= subprocess.run([sys.executable, "-m", "bench.joining"], check=False).returncode
    print("\nA thousand agents without workers, and a hundred of them that die and come back:\n")
    sys.stdout.flush()
    return code | subprocess.run([sys.executable, "-m", "bench.crowd"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
