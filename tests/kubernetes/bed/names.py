"""What the cluster's DNS would answer, as /etc/hosts of the pods.

From Endpoints, as DNS servers of clusters do: so a name of a headless Service is there once the
pod behind it is ready, or at once where the Service publishes addresses that are not ready.
"""

from __future__ import annotations

from pathlib import Path

from bed.apiclient import Json

SUFFIX = "svc.cluster.local"
KUBERNETES = "10.96.0.1"


class Names:
    """All that is known; kept by the kubelet from its watch."""

    def __init__(self) -> None:
        self._endpoints: dict[tuple[str, str], Json] = {}

    def listed(self, endpoints: list[Json]) -> None:
        self._endpoints = {_key(each): each for each in endpoints}

    def changed(self, kind: str, endpoints: Json) -> None:
        if kind == "DELETED":
            self._endpoints.pop(_key(endpoints), None)
        else:
            self._endpoints[_key(endpoints)] = endpoints

    def write(self, path: Path, namespace: str, own: str) -> None:
        """Write the file in place: a mount of it shows what is new."""
        lines = ["127.0.0.1 localhost", own]
        lines += [f"{KUBERNETES} kubernetes.default.svc kubernetes.default kubernetes"]
        for (where, service), endpoints in sorted(self._endpoints.items()):
            for ip, host in _addresses(endpoints):
                short = service if where == namespace else ""
                names = _forms(short, service, where)
                if host:
                    names += [f"{host}.{name}" for name in _forms(short, service, where)]
                lines.append(f"{ip} {' '.join(names)}")
        with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
            file.write(("\n".join(lines) + "\n").encode())
            file.truncate()


def _key(endpoints: Json) -> tuple[str, str]:
    return endpoints["metadata"]["namespace"], endpoints["metadata"]["name"]


def _addresses(endpoints: Json) -> list[tuple[str, str]]:
    subsets = endpoints.get("subsets") or []
    found = [address for subset in subsets for address in subset.get("addresses") or []]
    return [(address["ip"], address.get("hostname", "")) for address in found]


def _forms(short: str, service: str, namespace: str) -> list[str]:
    full = [f"{service}.{namespace}{end}" for end in (f".{SUFFIX}", ".svc", "")]
    return [*full, short] if short else full
