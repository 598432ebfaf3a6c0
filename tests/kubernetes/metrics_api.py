"""What a metrics server says of pods, behind the API server that asks it: any usage, by a word.

with MetricsApi(plane, space) as metrics:
    metrics.cpu = "200m"        # of each pod's worker, from now on
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from bed.controlplane import ControlPlane

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
NAME = f"{VERSION}.{GROUP}"
SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
Json = dict[str, Any]


class MetricsApi:
    """Serves metrics.k8s.io of a control plane for as long as it is open."""

    def __init__(self, plane: ControlPlane, space: str) -> None:
        self.plane, self.space, self.cpu = plane, space, "0"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*plane.certificates.pair("metrics", "localhost"))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        place = {"namespace": self.space, "name": "metrics", "port": self.server.server_port}
        spec = {"type": "ExternalName", "externalName": "localhost"}
        service = {"metadata": {"name": "metrics"}, "spec": spec}
        self.plane.ask("POST", f"/api/v1/namespaces/{self.space}/services", service)
        told = {
            "metadata": {"name": NAME},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": place,
            },
        }
        self.plane.ask("POST", SERVICES, told)
        self.plane.wait("the metrics", self._is_served)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            # While it is announced and not there, no namespace can be deleted.
            self.plane.ask("DELETE", f"{SERVICES}/{NAME}")
        finally:
            self.server.shutdown()
            self.server.server_close()

    def _is_served(self) -> bool:
        with contextlib.suppress(AssertionError, OSError):
            return bool(self.plane.ask("GET", f"/apis/{GROUP}/{VERSION}")["resources"])
        return False

    def answer(self, path: str) -> Json:
        """Return the answer to one request of the API server."""
        asked = urllib.parse.urlsplit(path)
        if not asked.path.endswith("/pods"):
            pods = {"name": "pods", "kind": "PodMetrics", "namespaced": True, "verbs": ["list"]}
            version = f"{GROUP}/{VERSION}"
            return {"kind": "APIResourceList", "groupVersion": version, "resources": [pods]}
        space = asked.path.split("/")[-2]
        found = self.plane.ask("GET", f"/api/v1/namespaces/{space}/pods?{asked.query}")["items"]
        items = [self._usage(pod) for pod in found if pod["status"].get("phase") == "Running"]
        return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "items": items}

    def _usage(self, pod: Json) -> Json:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = {key: pod["metadata"][key] for key in ("name", "namespace")}
        usage = {"cpu": self.cpu, "memory": "64Mi"}
        names = [each["name"] for each in pod["spec"]["containers"]]
        containers = [{"name": name, "usage": usage} for name in names]
        return {"metadata": meta, "timestamp": now, "window": "5s", "containers": containers}
