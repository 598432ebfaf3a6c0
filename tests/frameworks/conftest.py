"""The agents of real frameworks start with a warm zygote, as those of tests/process do."""

import warm_start

from elastane.testing import processes

processes.start = warm_start.start
