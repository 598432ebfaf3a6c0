"""Settings of all tests."""

import os
import signal

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does, and proves nothing.
settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The same examples in each run: a failure of `make test` is due to the change that it tests.
# `make soak` searches among new ones.
settings.register_profile("elastane", parent=settings.get_profile("search"), derandomize=True)
settings.load_profile("elastane")

# Where a container sets it, workers print in pieces, and the pieces of several mix in one line.
os.environ.pop("PYTHONUNBUFFERED", None)

# `nohup make test &` ignores these, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
