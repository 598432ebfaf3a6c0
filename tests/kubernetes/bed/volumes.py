"""The volumes of a pod as folders of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bed.apiclient import Api, Json
from bed.podenv import NotConfigured, contents, field

_KINDS = (
    *("emptyDir", "configMap", "secret", "projected", "downwardAPI", "hostPath"),
    "persistentVolumeClaim",
)


class Volumes:
    """Of one pod: made in its folder, kept until the pod goes."""

    def __init__(self, api: Api, pod: Json, ip: str, folder: Path) -> None:
        self.api, self.pod, self.ip, self.folder = api, pod, ip, folder
        self.namespace = pod["metadata"]["namespace"]
        self.paths: dict[str, Path] = {}
        # Those that are file systems in memory, and how large.
        self.memory: dict[str, str] = {}

    async def make(self) -> None:
        """Make them all; NotConfigured where one of them refers to what is not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for volume in self.pod["spec"].get("volumes") or []:
            kind = next((kind for kind in _KINDS if volume.get(kind) is not None), None)
            if kind is None:
                raise NotConfigured(f"volume {volume['name']!r}: no kind of {_KINDS}: {volume}")
            path = self.folder / volume["name"]
            self.paths[volume["name"]] = await self._one(kind, volume[kind], path)

    async def _one(self, kind: str, source: Json, path: Path) -> Path:
        if kind == "hostPath":
            return self._of_machine(source)
        if kind == "persistentVolumeClaim":
            return await self._of_claim(source["claimName"])
        path.mkdir(exist_ok=True)  # noqa: ASYNC240 - of a test, and short
        if kind == "emptyDir":
            if source.get("medium") == "Memory":
                self.memory[str(path)] = str(source.get("sizeLimit") or "")
            return path
        for one in source["sources"] if kind == "projected" else [{kind: source}]:
            ((of, told),) = one.items()
            for name, data in (await self._files(of, told)).items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data)
                (path / name).chmod(told.get("defaultMode") or source.get("defaultMode") or 0o644)
        return path

    def _of_machine(self, source: Json) -> Path:
        path = Path(source["path"])
        if source.get("type") in ("DirectoryOrCreate", "", None):
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise NotConfigured(f"hostPath {path}: is not there")
        return path

    async def _of_claim(self, name: str) -> Path:
        claim = await self.api.ask(
            "GET", f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{name}"
        )
        if not (bound := claim["spec"].get("volumeName")):
            raise NotConfigured(f"claim {name!r} is not bound")
        volume = await self.api.ask("GET", f"/api/v1/persistentvolumes/{bound}")
        return self._of_machine(volume["spec"]["hostPath"])

    async def _files(self, kind: str, source: Json) -> dict[str, bytes]:
        if kind == "serviceAccountToken":
            return {source["path"]: (await self.token(source)).encode()}
        if kind == "downwardAPI":
            return {
                item["path"]: field(self.pod, item["fieldRef"]["fieldPath"], self.ip).encode()
                for item in source.get("items") or []
            }
        name = source.get("secretName") or source["name"]
        plural = "configmaps" if kind == "configMap" else "secrets"
        got = await contents(self.api, plural, self.namespace, name, bool(source.get("optional")))
        if not source.get("items"):
            return got
        return {item["path"]: got[item["key"]] for item in source["items"]}

    async def token(self, source: Json) -> str:
        """A token of the pod's service account, which is worth nothing once the pod is gone."""
        meta, spec = self.pod["metadata"], self.pod["spec"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        audience = source.get("audience")
        asked: dict[str, Any] = {
            "audiences": [audience] if audience else [],
            "expirationSeconds": source.get("expirationSeconds", 3600),
            "boundObjectRef": bound,
        }
        account = spec.get("serviceAccountName", "default")
        got = await self.api.ask(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": asked},
        )
        return str(got["status"]["token"])

    async def rotate(self) -> None:
        """Write new tokens in the place of the old ones, as a kubelet does before they expire."""
        for volume in self.pod["spec"].get("volumes") or []:
            for source in (volume.get("projected") or {}).get("sources") or []:
                if told := source.get("serviceAccountToken"):
                    file = self.paths[volume["name"]] / told["path"]
                    new = file.with_name(f".{file.name}")
                    new.write_text(await self.token(told))
                    new.rename(file)

    def mounts(self, container: Json) -> list[tuple[str, str, bool]]:
        """What to bind where, and whether it is read only."""
        found = []
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in self.paths:
                raise NotConfigured(f"volumeMount {mount['name']!r}: the pod has no such volume")
            source = self.paths[mount["name"]] / mount.get("subPath", "")
            found.append((str(source), mount["mountPath"], bool(mount.get("readOnly"))))
        return found
