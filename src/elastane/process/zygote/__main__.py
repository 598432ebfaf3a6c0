"""`python -m elastane.process.zygote`: the zygote's loop, and the bottom of each worker's stack.

The loop returns in every forked worker. So its frames and sockets are gone when the script runs,
and the interpreter's ordinary shutdown follows when the script ends.
"""

import sys

# A file of the current folder, such as random.py, must hide no module that the zygote needs.
if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))
from elastane.process.zygote.server import main

if not sys.flags.safe_path:
    sys.path.insert(0, sys.path.pop())
work = main(sys.argv[1:])
while work is not None:
    work = work()
