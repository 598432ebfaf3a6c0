"""The environment of a container as its manifest asks for it, and `$(VAR)` in its arguments."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from bed.apiclient import Api, Json, Refused
from bed.sandbox import in_bytes

_REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class NotConfigured(Exception):
    """What the manifest refers to is not there: CreateContainerConfigError."""


def expand(text: str, env: dict[str, str]) -> str:
    """Put values for $(NAME); names that nobody knows stay as they are, and $$ is one dollar."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else env.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def field(pod: Json, path: str, ip: str) -> str:
    """A field of the pod by its path in the downward API."""
    meta = pod["metadata"]
    if found := _KEYED.fullmatch(path):
        return str((meta.get(found[1]) or {}).get(found[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        values = meta.get(path.split(".")[1]) or {}
        return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
    if path in ("status.podIP", "status.podIPs"):
        return ip
    if path == "status.hostIP":
        return "127.0.0.1"
    found_value: Any = pod
    for part in path.split("."):
        found_value = found_value.get(part, "")
    return str(found_value)


async def contents(
    api: Api, kind: str, namespace: str, name: str, optional: bool
) -> dict[str, bytes]:
    """The keys and values of a ConfigMap or Secret."""
    try:
        got = await api.ask("GET", f"/api/v1/namespaces/{namespace}/{kind}/{name}")
    except Refused as error:
        if optional and error.status == 404:
            return {}
        raise NotConfigured(f"{kind} {name!r} not found") from error
    data = got.get("data") or {}
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    binary = got.get("binaryData") or {}
    plain = {key: value.encode() for key, value in data.items()}
    return plain | {key: base64.b64decode(value) for key, value in binary.items()}


class Environment:
    """Of one pod: what a container of it is given."""

    def __init__(self, api: Api, pod: Json, ip: str, base: dict[str, str]) -> None:
        self.api, self.pod, self.ip, self.base = api, pod, ip, base
        self.namespace = pod["metadata"]["namespace"]

    async def of(self, container: Json) -> dict[str, str]:
        env = dict(self.base)
        for source in container.get("envFrom") or []:
            env |= await self._all(source)
        for var in container.get("env") or []:
            if (value := await self._one(var, container)) is not None:
                env[var["name"]] = expand(value, env) if "value" in var else value
        return env

    async def _all(self, source: Json) -> dict[str, str]:
        kind = "configmaps" if "configMapRef" in source else "secrets"
        ref = source.get("configMapRef") or source["secretRef"]
        optional = bool(ref.get("optional"))
        got = await contents(self.api, kind, self.namespace, ref["name"], optional)
        prefix = source.get("prefix", "")
        return {prefix + key: value.decode() for key, value in got.items()}

    async def _one(self, var: Json, container: Json) -> str | None:
        source = var.get("valueFrom")
        if not source:
            return str(var.get("value", ""))
        if "fieldRef" in source:
            return field(self.pod, source["fieldRef"]["fieldPath"], self.ip)
        if "resourceFieldRef" in source:
            return _resource(container, source["resourceFieldRef"]["resource"])
        kind = "configmaps" if "configMapKeyRef" in source else "secrets"
        ref = source.get("configMapKeyRef") or source["secretKeyRef"]
        optional = bool(ref.get("optional"))
        got = await contents(self.api, kind, self.namespace, ref["name"], optional)
        if ref["key"] not in got:
            if optional:
                return None
            raise NotConfigured(f"{kind} {ref['name']!r} has no key {ref['key']!r}")
        return got[ref["key"]].decode()


def _resource(container: Json, path: str) -> str:
    """A request or limit: whole cores, or bytes."""
    kind, name = path.split(".", 1)
    value = str((container.get("resources", {}).get(kind) or {}).get(name, "0"))
    if value.endswith("m"):
        return str(math.ceil(int(value[:-1]) / 1000))
    return str(in_bytes(value))
