"""Makes the Kubernetes store of what a command line and the environment say."""

from __future__ import annotations

from elastane.kubernetes.store.settings import read_settings
from elastane.kubernetes.store.store import KubernetesStore
from elastane.process.environment import snapshot
from elastane.stores.protocol import Store


def make_store(endpoint: str, conf: dict[str, str]) -> Store:
    """Return the store; does no I/O. Raises ConfigurationError for what cannot be meant."""
    return KubernetesStore(read_settings(endpoint, conf, snapshot()))
