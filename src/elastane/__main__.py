"""`python -m elastane VERB`."""

import sys

from elastane.cli.main import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m elastane"))
