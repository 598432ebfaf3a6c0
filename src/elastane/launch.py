"""`python -m elastane.launch`, as `python -m torch.distributed.launch`.

It is named like the function `elastane.launch`, which the package resolves itself: this file is
for `python -m` alone.
"""

import sys

from elastane.cli.main import main_of

if __name__ == "__main__":
    sys.exit(main_of("launch", sys.argv[1:], "python -m elastane.launch"))
