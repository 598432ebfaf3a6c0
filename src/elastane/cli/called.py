"""`python -m elastane.cli.called FOLDER PARENT`: the agent of `elastane.launch` and similar calls.

It reads its options from the function's folder. The kernel kills it when the process PARENT, which
waits for it, ends. It is not a command for people.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastane.cli.run import start
from elastane.errors import ElastaneError
from elastane.functions.request import read_request
from elastane.process import environment
from elastane.process.kernel import die_with_parent


def main(argv: list[str]) -> int:
    """Run the agent; returns its exit code."""
    folder, parent = argv
    try:
        die_with_parent(int(parent))
    except ProcessLookupError:
        return 1  # The parent has ended already, so there is no reader for an error.
    environ = environment.snapshot()
    try:
        return start(read_request(Path(folder)).options(environ), environ)
    except ElastaneError as error:
        print(f"elastane: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
