"""Metadata servers of clouds on the loopback, which answer as the real ones are documented to.

Each is a context: `address` is what `--notices CLOUD:ADDRESS` takes, `put` makes a notice appear,
`asked` has all requests. A request that the real server refuses is refused here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, urlsplit


class FakeServer:
    """One server; a subclass says in `answer` what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self.number = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.asked.append((self.command, self.path))
                headers = {name.lower(): value for name, value in self.headers.items()}
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                status, more, body = owner.answer(self.command, parts.path, query, headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **more}.items():
                    self.send_header(name, value)
                with contextlib.suppress(ConnectionError):  # A request that waited, of who left.
                    self.end_headers()
                    self.wfile.write(body)

            do_PUT = do_GET  # noqa: N815 - http.server's own name

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def change(self) -> None:
        with self.changed:
            self.number += 1
            self.changed.notify_all()

    def answer(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError


class FakeAws(FakeServer):
    """IMDSv2: a token by PUT, 401 without a valid one, 404 until there is a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: set[str] = set()
        self.pages: dict[str, object] = {}

    def put(self, within_s: float = 120.0, action: str = "terminate") -> None:
        at = (datetime.now(UTC) + timedelta(seconds=within_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.pages["/latest/meta-data/spot/instance-action"] = {"action": action, "time": at}

    def clear(self) -> None:
        self.pages = {}

    def recommend(self) -> None:
        path = "/latest/meta-data/events/recommendations/rebalance"
        self.pages[path] = {"noticeTime": "2026-11-27T08:22:00Z"}

    def answer(self, method, path, query, headers):
        if method == "PUT":
            ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if path != "/latest/api/token" or not ttl.isdecimal() or int(ttl) > 21_600:
                return 400, {}, b""
            token = f"AQAE{len(self.asked)}=="
            self.tokens.add(token)
            return 200, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": ttl}, token.encode()
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, {}, b"Unauthorized"
        page = self.pages.get(path)
        return (404, {}, b"Not Found") if page is None else (200, {}, json.dumps(page).encode())


class FakeGcp(FakeServer):
    """The values of keys, with ETags; 403 without Metadata-Flavor; waits for a change if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def put(self, key: str = "preempted", value: str = "TRUE") -> None:
        self.values[key] = value
        self.change()

    def clear(self) -> None:
        self.put(value="FALSE")

    def answer(self, method, path, query, headers):
        if headers.get("metadata-flavor") != "Google":
            return 403, {}, b"Missing Metadata-Flavor:Google header."
        key = path.rpartition("/")[2]
        if query.get("wait_for_change") == "true":
            until_s = time.monotonic() + float(query.get("timeout_sec", "60"))
            with self.changed:
                while self.etag(key) == query.get("last_etag") and time.monotonic() < until_s:
                    self.changed.wait(0.1)
        return 200, {"Metadata-Flavor": "Google", "ETag": self.etag(key)}, self.values[key].encode()

    def etag(self, key: str) -> str:
        return self.values[key].encode().hex()[:16]


class FakeAzure(FakeServer):
    """Scheduled events of a scale set; 400 without Metadata: true, and of other versions."""

    NAME = "train_3"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []

    def put(self, kind: str = "Preempt", within_s: float = 30.0, name: str = NAME) -> None:
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=within_s), usegmt=True)
        event = {
            "EventId": f"602d9444-d2cd-49c7-8624-{len(self.events):012}",
            "EventStatus": "Scheduled",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [name],
            "NotBefore": at,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events = [*self.events, event]
        self.change()

    def clear(self) -> None:
        self.events = []

    def answer(self, method, path, query, headers):
        if headers.get("metadata") != "true" or "x-forwarded-for" in headers:
            return 400, {}, b'{"error": "Bad request. Required metadata header not specified"}'
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, {}, self.NAME.encode()
        if path == "/metadata/scheduledevents" and query.get("api-version") == "2020-07-01":
            document = {"DocumentIncarnation": self.number, "Events": self.events}
            return 200, {}, json.dumps(document).encode()
        return 400, {}, b'{"error": "Bad request. api-version is invalid or was not specified"}'


CLOUDS = {"aws": FakeAws, "gcp": FakeGcp, "azure": FakeAzure}
