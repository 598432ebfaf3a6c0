"""`elastane` with scaled-down bounds of isolation, so that a test waits for some seconds."""

import sys

from elastane.protocol import limits

limits.ISOLATION_LIMIT_MIN_S = 4.0
limits.ISOLATION_GRACE_S, limits.STANDSTILL_MARGIN_S = 0.5, 1.5

from elastane.cli.main import main  # noqa: E402 - each module reads the bounds when it is imported

sys.exit(main())
