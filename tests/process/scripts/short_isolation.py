"""`elastane` with scaled-down bounds of isolation, so that a test need not wait two minutes."""

import sys

from elastane.protocol import limits

limits.ISOLATION_LIMIT_S, limits.ISOLATION_GRACE_S = 4.0, 0.5
limits.STANDSTILL_LIMIT_S, limits.FENCE_WAIT_S = 5.0, 12.0

from elastane.cli.main import main  # noqa: E402 - each module reads the bounds when it is imported

sys.exit(main())
