"""`python -m elastane.run`, as `python -m torch.distributed.run`: the same as `elastane run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastane.cli.main import main_of


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, this process's own by default; SystemExit where it does not succeed."""
    code = main_of("run", sys.argv[1:] if args is None else args, "python -m elastane.run")
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
