"""Settings of all tests."""

import os
import signal

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does, and proves nothing.
settings.register_profile(
    "elastane", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("elastane")

# Where a container sets it, workers print in pieces, and the pieces of several mix in one line.
os.environ.pop("PYTHONUNBUFFERED", None)

# `nohup make test &` ignores these, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
