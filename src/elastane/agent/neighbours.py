"""What a node's keeper is told so that it knows the keepers of the job's other nodes.

Owns how their secret comes from the job's: a keeper proves itself by it, and can do nothing else
with it.
"""

from __future__ import annotations

import hmac

from elastane.options.config import AgentConfig
from elastane.options.keyring import Keyring
from elastane.snapshots.peers import Neighbours

_PURPOSE = b"elastane keepers"


def neighbours(config: AgentConfig, keyring: Keyring) -> Neighbours:
    """Return it, as of now."""
    tls = config.rendezvous.tls
    return Neighbours(
        job=config.spec.job,
        secrets=tuple(hmac.digest(each, _PURPOSE, "sha256") for each in keyring.secrets()),
        host=config.reach,
        tls=(tls.cert, tls.key, tls.ca) if tls is not None else ("", "", ""),
    )
