"""`elastane` in which a lease of ten minutes may be ended for a coordinator that has died."""

import sys

from elastane.protocol import limits

limits.ENDED_LEASE_S = 600.0

from elastane.cli.main import main  # noqa: E402 - each module reads the bound when it is imported

sys.exit(main())
