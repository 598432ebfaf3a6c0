"""The etcd servers that a command line names, and the settings of their connections.

Owns the reading of `--rdzv-endpoint` and of the keys of `--rdzv-conf` that concern etcd, in torch's
spellings (`protocol`, `cert`, `key`, `cacert` of its etcd; `ssl_cert`, `ssl_cert_key`, `ca_cert` of
its etcd-v2) and ours. It opens no file and no connection. It fails with ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastane.errors import ConfigurationError
from elastane.process.endpoint import parse_endpoint

PORT = 2379
# Below it lies a folder for each job; torch's is /torchelastic/p2p, for the same keys of another
# form, so the two never meet.
PREFIX = "elastane"
_UNIX = "unix://"
ENDPOINT = "the etcd servers, HOST:PORT,HOST:PORT,..."
# Key of --rdzv-conf: the field it sets.
CONF_KEYS = {
    "protocol": "protocol",
    "cacert": "ca",
    "ca_cert": "ca",
    "cert": "cert",
    "ssl_cert": "cert",
    "key": "key",
    "ssl_cert_key": "key",
    "etcd_prefix": "prefix",
    "user": "user",
    "password": "password",
}


@dataclass(frozen=True)
class EtcdSettings:
    """The servers (base URLs, in the user's order) and the login."""

    urls: tuple[str, ...]
    prefix: str = PREFIX
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def socket(self) -> str:
        """The path of the server's socket; "" for a server with a port."""
        url = self.urls[0]
        return url.removeprefix(_UNIX) if url.startswith(_UNIX) else ""

    @property
    def names(self) -> str:
        """The servers, for a person."""
        return ", ".join(self.urls)


def read_settings(endpoint: str, conf: Mapping[str, str]) -> EtcdSettings:
    """Read `HOST[:PORT],...` or URLs; ConfigurationError for anything else."""
    values: dict[str, str] = {}
    for name, field_name in CONF_KEYS.items():
        if conf.get(name):
            values[field_name] = conf[name]
    given = values.pop("protocol", "") or ("https" if values.get("ca") else "http")
    protocol = given.strip().lower()
    if protocol not in ("http", "https"):
        raise ConfigurationError(
            f"--rdzv-conf protocol = {given!r}", slug="bad-rdzv-conf", expected="http or https"
        )
    if endpoint.startswith(f"{_UNIX}/"):  # The etcd sidecar of an agent.
        urls: tuple[str, ...] = (endpoint,)
    else:
        urls = tuple(_url(part.strip(), protocol) for part in endpoint.split(",") if part.strip())
    if not urls:
        raise ConfigurationError(
            "--rdzv-backend etcd without --rdzv-endpoint",
            slug="endpoint-missing",
            expected=ENDPOINT,
            next_step=f"--rdzv-endpoint HOST:{PORT}; one machine alone needs none: --standalone",
        )
    _check_pairs(values, urls)
    values["prefix"] = values.get("prefix", PREFIX).strip("/") or PREFIX
    return EtcdSettings(urls=urls, **values)


def _check_pairs(values: Mapping[str, str], urls: tuple[str, ...]) -> None:
    for one, other in (("cert", "key"), ("user", "password")):
        if bool(values.get(one)) != bool(values.get(other)):
            given, missing = (one, other) if values.get(one) else (other, one)
            raise ConfigurationError(
                f"--rdzv-conf has {given} for etcd, and no {missing}",
                slug="bad-rdzv-conf",
                expected=f"{one} and {other} together, or neither",
            )
    tls = [name for name in ("ca", "cert") if values.get(name)]
    if tls and not all(url.startswith("https:") for url in urls):
        raise ConfigurationError(
            f"--rdzv-conf has {tls[0]} for etcd, and an endpoint is plain http",
            slug="bad-rdzv-conf",
            expected="https://HOST:PORT, or protocol=https",
        )


def _url(written: str, protocol: str) -> str:
    scheme, found, rest = written.partition("://")
    if not found:
        scheme, rest = protocol, written
    scheme = scheme.lower()
    if scheme not in ("http", "https"):
        raise ConfigurationError(
            f"--rdzv-endpoint {written}: scheme {scheme!r}",
            slug="endpoint-syntax",
            expected="HOST:PORT, http://HOST:PORT or https://HOST:PORT",
        )
    if "@" in rest:  # Not shown: the part before it is likely a password.
        raise ConfigurationError(
            f"--rdzv-endpoint {scheme}://***@{rest.rpartition('@')[2]}: it holds a user",
            slug="endpoint-syntax",
            expected="HOST:PORT; the login belongs in --rdzv-conf user=NAME,password=PASSWORD",
        )
    where = parse_endpoint(rest.rstrip("/"), default_port=PORT)
    host = f"[{where.host}]" if ":" in where.host else where.host
    return f"{scheme}://{host}:{where.port}"
