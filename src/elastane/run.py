"""`python -m elastane.run`, as `python -m torch.distributed.run`: the same as `elastane run`."""

import sys

from elastane.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], prog="python -m elastane"))
