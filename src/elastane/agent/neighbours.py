"""How the snapshot server of a node knows those of the job's other nodes.

Owns the derivation of their secret from the job's. With it a snapshot server can prove itself to
others, and nothing else.
"""

from __future__ import annotations

import hmac

from elastane.options.config import AgentConfig
from elastane.options.keyring import Keyring
from elastane.snapshots.peers import ReplicationSettings

_PURPOSE = b"elastane keepers"


def replica_peers(config: AgentConfig, keyring: Keyring) -> ReplicationSettings:
    """Return the current secrets, address and TLS files for the snapshot server."""
    tls = config.rendezvous.tls
    return ReplicationSettings(
        job=config.spec.job,
        secrets=tuple(hmac.digest(each, _PURPOSE, "sha256") for each in keyring.secrets()),
        host=config.reach,
        tls=(tls.cert, tls.key, tls.ca) if tls is not None else ("", "", ""),
    )
