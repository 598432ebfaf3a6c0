"""The certificates of one control plane, and kubeconfigs made of them."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 7
NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
# The second is the address of the Service `kubernetes`, which pods are told.
ADDRESSES = ("127.0.0.1", "10.96.0.1")


def _name(common: str, groups: tuple[str, ...]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


class Certificates:
    """An authority of its own in a folder: {name}.crt and {name}.key, made when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name("bed", ())
        self._sign("ca", self._subject, self._key)
        accounts = rsa.generate_private_key(65537, 2048)
        self.path("accounts.key").write_bytes(_pem(accounts))
        self.path("accounts.pub").write_bytes(
            accounts.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def path(self, name: str) -> Path:
        return self.folder / name

    @property
    def authority(self) -> Path:
        return self.path("ca.crt")

    def pair(self, name: str, common: str = "", groups: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """Return certificate and key of a server or a user named `common`, in these groups."""
        crt, key = self.path(f"{name}.crt"), self.path(f"{name}.key")
        if not crt.exists():
            self._sign(name, _name(common or name, groups), ec.generate_private_key(ec.SECP256R1()))
        return crt, key

    def _sign(self, name: str, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> None:
        is_authority = name == "ca"
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # A clock that a test sets back a little is no reason to be refused.
            .not_valid_before(now - dt.timedelta(days=DAYS))
            .not_valid_after(now + dt.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if not is_authority:
            others = [x509.IPAddress(ipaddress.ip_address(a)) for a in ADDRESSES]
            known = [*(x509.DNSName(n) for n in NAMES), *others]
            use = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            builder = builder.add_extension(x509.SubjectAlternativeName(known), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(use), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        self.path(f"{name}.key").write_bytes(_pem(key))
        self.path(f"{name}.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def kubeconfig(path: Path, server: str, authority: Path, user: dict[str, str]) -> Path:
    """Write a kubeconfig of one context; JSON is YAML too."""
    ca = base64.b64encode(authority.read_bytes()).decode()
    cluster = {"server": server, "certificate-authority-data": ca}
    told = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bed", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "user"}}],
        "current-context": "bed",
    }
    path.write_text(json.dumps(told, indent=1))
    return path


def user_of_pair(pair: tuple[Path, Path]) -> dict[str, str]:
    crt, key = (base64.b64encode(path.read_bytes()).decode() for path in pair)
    return {"client-certificate-data": crt, "client-key-data": key}
