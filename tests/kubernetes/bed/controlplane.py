"""A real Kubernetes control plane on loopback: etcd and kube-apiserver, and the rest where asked.

    with ControlPlane() as plane:
        plane.kubectl("apply", "-f", "-", given=manifest)
        plane["kube-apiserver"].kill()
        plane.start_part("kube-apiserver")

Several may run side by side: etcd speaks over sockets in the folder, which kube-apiserver shares,
and the one port is the kernel's choice and held for as long as the plane is. The programs end with
this process, also where this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from etcd_server import memory_folder

from bed import binaries
from bed.certificates import Certificates, kubeconfig, user_of_pair
from bed.parts import Part

READY_S = 90.0
ETCD = "unix://etcd:1"
# What tests need to see within seconds, where Kubernetes takes minutes: a node that is silent
# for 8 s is NotReady. All else is as it is by default.
NODE_SILENT_S = 8
CONTROLLERS = "*,-nodeipam,-route,-cloud-node-lifecycle,-attachdetach,-persistentvolume-expander"
PAGE_BYTES = 2000


class ControlPlane:
    """One control plane in a folder of its own, which is made short for the sake of sockets."""

    def __init__(self, *, whole: bool = True, extra: tuple[str, ...] = ()) -> None:
        self.whole, self.extra = whole, extra
        self.parts: dict[str, Part] = {}
        self.namespaces = 0

    def __enter__(self) -> Self:
        binaries.need(binaries.unavailable(binaries.WHOLE if self.whole else binaries.MINIMAL))
        self.folder = Path(tempfile.mkdtemp(prefix="bed-"))
        self._data = memory_folder()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}"
        self.certificates = Certificates(self.folder / "pki")
        self.admin = self.user("admin", ("system:masters",))
        try:
            for name in binaries.WHOLE if self.whole else binaries.MINIMAL:
                self.start_part(name)
            if self.whole:
                self.wait("the service account of default", self._has_accounts)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for part in reversed(self.parts.values()):
            part.kill()
        self._held.close()
        shutil.rmtree(self._data, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]

    # ---- users

    def user(self, name: str, groups: tuple[str, ...] = ()) -> Path:
        """The kubeconfig of a user, by certificate."""
        path = self.folder / f"{name}.kubeconfig"
        if path.exists():
            return path
        user = user_of_pair(self.certificates.pair(name, name, groups))
        return kubeconfig(path, self.url, self.certificates.authority, user)

    def account(self, name: str, namespace: str) -> Path:
        """The kubeconfig of a service account, by a token that the API server issues."""
        where = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.ask("POST", where, asked)["status"]["token"]
        path = self.folder / f"{namespace}.{name}.kubeconfig"
        return kubeconfig(path, self.url, self.certificates.authority, {"token": token})

    # ---- parts

    def start_part(self, name: str) -> None:
        """Start it, or start it again on what it has on disk, and wait until it serves."""
        part = self.parts.setdefault(name, Part(name, self.folder))
        if name == "etcd":
            for socket_file in self.folder.glob("etcd:*"):
                socket_file.unlink()
        part.start([self._program(name), *self._arguments(name)])
        if name == "kube-apiserver":
            self.wait("the API server", lambda: self._is_ready("/readyz"), part)

    def _program(self, name: str) -> str:
        return str(binaries.folder() / name)

    def _arguments(self, name: str) -> list[str]:
        match name:
            case "etcd":
                return self._etcd()
            case "kube-apiserver":
                return self._apiserver()
            case "kube-controller-manager":
                return self._controllers()
            case _:
                config = self.user("system:kube-scheduler")
                return [f"--kubeconfig={config}", *_silent()]

    def _etcd(self) -> list[str]:
        peers = "unix://etcd:2"
        return [
            "--name=bed", f"--data-dir={self._data}", "--log-level=warn",
            f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=bed={peers}",
        ]  # fmt: skip

    def _apiserver(self) -> list[str]:
        crt, key = self.certificates.pair("kube-apiserver")
        admin, admin_key = self.certificates.pair("admin")
        accounts = self.certificates.path("accounts.key")
        # Without a controller manager nobody makes service accounts for pods.
        less = [] if self.whole else ["--disable-admission-plugins=ServiceAccount"]
        return [
            f"--etcd-servers={ETCD}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--permit-port-sharing",
            "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={crt}", f"--tls-private-key-file={key}",
            f"--client-ca-file={self.certificates.authority}", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.certificates.path('accounts.pub')}",
            f"--service-account-signing-key-file={accounts}", "--allow-privileged=true",
            f"--kubelet-client-certificate={admin}", f"--kubelet-client-key={admin_key}",
            "--kubelet-preferred-address-types=InternalIP", "--profiling=false",
            *_of_old("--insecure-port=0", _OWN_TOKENS), *less, *self.extra,
        ]  # fmt: skip

    def _controllers(self) -> list[str]:
        config = self.user("system:kube-controller-manager")
        return [
            f"--kubeconfig={config}", "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.certificates.path('accounts.key')}",
            f"--root-ca-file={self.certificates.authority}", f"--controllers={CONTROLLERS}",
            *_of_old(_OWN_TOKENS),
            "--node-monitor-period=1s", f"--node-monitor-grace-period={NODE_SILENT_S}s",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--horizontal-pod-autoscaler-cpu-initialization-period=1s",
            "--horizontal-pod-autoscaler-initial-readiness-delay=0s",
            *_silent(),
        ]  # fmt: skip

    # ---- requests

    def context(self) -> ssl.SSLContext:
        """How a client connects as admin."""
        context = ssl.create_default_context(cafile=str(self.certificates.authority))
        context.load_cert_chain(*self.certificates.pair("admin"))
        return context

    def _open(self, method: str, path: str, body: object = None, kind: str = "json") -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        request.add_header("Content-Type", f"application/{kind}")
        with urllib.request.urlopen(request, timeout=10, context=self.context()) as answer:
            return bytes(answer.read())

    def ask(self, method: str, path: str, body: object = None, kind: str = "json") -> Any:
        """One request as admin; AssertionError with what the server said where it refuses."""
        try:
            return json.loads(self._open(method, path, body, kind))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:PAGE_BYTES]
            raise AssertionError(f"{method} {path}: {error.code}: {text}") from error

    def newest(self, group: str, *versions: str) -> str:
        """Return the first of the versions of an API group that is served."""
        served = {each["version"] for each in self.ask("GET", f"/apis/{group}")["versions"]}
        return f"{group}/{next(each for each in versions if each in served)}"

    def _is_ready(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return self._open("GET", path) == b"ok"
        return False

    def _has_accounts(self) -> bool:
        with contextlib.suppress(AssertionError, OSError):
            self.ask("GET", "/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
            self.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default")
            return True
        return False

    def wait(
        self, what: str, is_so: Any, part: Part | None = None, limit_s: float = READY_S
    ) -> None:
        """Wait for it; AssertionError with the logs where it does not come to be."""
        deadline_s = time.monotonic() + limit_s
        while not is_so():
            dead = part is not None and not part.is_alive
            if dead or time.monotonic() > deadline_s:
                why = f"{part.name} has ended" if dead and part else f"not within {limit_s:g} s"
                raise AssertionError(f"{what}: {why}\n{self.report()}")
            time.sleep(0.05)

    def kubectl(self, *argv: str, given: str = "", namespace: str = "", limit_s: float = 60) -> str:
        """Run the real kubectl as admin; AssertionError with what it said where it fails."""
        more = ("-n", namespace) if namespace else ()
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.admin), *more, *argv],
            input=given, capture_output=True, text=True, timeout=limit_s, check=False,
            env={**os.environ, "HOME": str(self.folder)},
        )  # fmt: skip
        assert done.returncode == 0, f"kubectl {' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def namespace(self) -> str:
        """A namespace of its own for a test, with its service account where there are any."""
        self.namespaces += 1
        name = f"test-{self.namespaces}"
        meta = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.ask("POST", "/api/v1/namespaces", meta)
        if self.whole:
            self.wait(f"the service account of {name}", lambda: self._has_account(name))
        return name

    def _has_account(self, namespace: str) -> bool:
        listed = self.ask("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts")["items"]
        return bool(listed)

    def report(self, lines_max: int = 10) -> str:
        return "\n".join(part.tail(lines_max) for part in self.parts.values())

    def pause(self, name: str) -> None:
        """Stop a part without ending it, as a machine that hangs does."""
        self.parts[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.parts[name].send(signal.SIGCONT)


# As it is from 1.21 on: pods get tokens of their own, which end with them.
_OWN_TOKENS = "--feature-gates=BoundServiceAccountTokenVolume=true"


def _of_old(*arguments: str) -> tuple[str, ...]:
    """Return arguments that servers need, until 1.24 refuses them: what they say is so there."""
    return arguments if binaries.version() < (1, 24) else ()


def _silent() -> tuple[str, ...]:
    """Return the arguments without elections and ports, which nobody here needs."""
    return ("--leader-elect=false", "--secure-port=0", *_of_old("--port=0"))
