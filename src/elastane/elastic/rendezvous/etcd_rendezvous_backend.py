"""A register in a key of etcd, and the parameters of the connection to etcd.

The module is for callers that assemble a handler themselves. The backends named etcd and etcd-v2 do
not use it: their coordinator is elected in etcd itself.
"""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]

from elastane.elastic.rendezvous.api import RendezvousParameters, raise_as_api
from elastane.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from elastane.elastic.rendezvous.etcd_store import EtcdStore, StoreClient, etcd_client
from elastane.errors import ElastaneError
from elastane.process.files import safe_name
from elastane.stores import ConflictError, Entry

_PREFIX = "torch/elastic/rendezvous"
_STORE_PREFIX = "torch/elastic/store"


class EtcdRendezvousBackend(RendezvousBackend):
    """A register in one key; the token is the key's version. `ttl` has no effect."""

    def __init__(
        self,
        client: StoreClient,
        run_id: str,
        key_prefix: str | None = None,
        ttl: int | None = None,
    ) -> None:
        if not run_id:
            raise ValueError("run_id = '': expected the job's id")
        self._client = client
        prefix = (key_prefix or "").strip("/")
        self._key = "/".join(filter(None, (prefix, safe_name(run_id))))

    @property
    def name(self) -> str:
        """See RendezvousBackend."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See RendezvousBackend."""
        try:
            return _state(self._client.get(self._key))
        except ElastaneError as error:
            raise_as_api(error)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See RendezvousBackend."""
        if token and not isinstance(token, int):
            found = self.get_state()
            return (*found, False) if found else None
        try:
            written = self._client.compare_and_set(self._key, state, token or 0)
            return written.value, written.version, True
        except ConflictError as conflict:
            there = _state(conflict.current)
            return (*there, False) if there else None
        except ElastaneError as error:
            raise_as_api(error)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Store]:
    """Make a client of the etcd in `params`, a backend in it, and a store for the agents."""
    # v2 is used only if the parameters request it, since newer servers do not support it.
    client = etcd_client(params, "etcd-v2" if params.backend == "etcd-v2" else "etcd")
    return EtcdRendezvousBackend(client, params.run_id, _PREFIX), EtcdStore(client, _STORE_PREFIX)


def _state(found: Entry | None) -> tuple[bytes, Token] | None:
    return (found.value, found.version) if found is not None else None
