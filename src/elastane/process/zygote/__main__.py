"""`python -m elastane.process.zygote`: the zygote's loop, and the bottom of each worker's stack.

The loop returns in every forked worker. So its frames and sockets are gone when the script runs,
and the interpreter's ordinary shutdown follows when the script ends.
"""

import sys

from elastane.process.zygote.server import main

work = main(sys.argv[1:])
while work is not None:
    work = work()
