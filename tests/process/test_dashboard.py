"""`elastane dashboard` as a real HTTP server: browsers, other users and crowds."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import pytest
from process_harness import until
from view_events import event, exited, settled, started

from elastane.cli.main import main
from elastane.dashboard.server import HEARTBEAT_S, STREAMS_MAX
from elastane.errors import ExitCode
from elastane.observe.events import encode_line

DEADLINE_S = 90.0
STORY = [
    settled(1, "a", 2, time_s=1e9),
    started("a", 1, 2, round=1, attempt=0, time_s=1e9 + 1),
    exited(1, round=1, time_s=1e9 + 20),
    settled(2, "a", 1, time_s=1e9 + 21),
    started("a", 1, round=2, attempt=0, time_s=1e9 + 22),
]


def write(folder, *events):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.h.jsonl").open("ab") as file:
        file.writelines(encode_line(one) for one in events)


class Served:
    """A server of the folder `logs`, which has an ended job and a killed one."""

    def __init__(self, folder, *options):
        self.logs = folder / "logs"
        write(self.logs / "ended", *STORY, event("job-ended", ok=True, time_s=1e9 + 60))
        write(self.logs / "killed", *STORY)
        private = folder / "run"
        private.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "elastane", "dashboard", "--port", "0", *options]
        self.said = folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*command, "--log-dir", str(self.logs)],
                env={**os.environ, "XDG_RUNTIME_DIR": str(private)},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        told = self.process.stdout.readline()
        self.port = int(re.search(r"http://[\d.]+:(\d+)/", told)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def get(self, path, **headers):
        return httpx.get(self.url + path, headers=headers, timeout=DEADLINE_S)

    def close(self):
        """End the server; it would print tasks or connections that are still open."""
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        assert (code, self.said.read_text()) == (-signal.SIGTERM, "")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    found = Served(tmp_path_factory.mktemp("dashboard"))
    yield found
    found.close()


def messages(answer):
    """Yield the id and the data of each event of a stream."""
    number = None
    for line in answer.iter_lines():
        if line.startswith("id: "):
            number = line[4:]
        elif line.startswith("data: "):
            yield number, json.loads(line[6:])


def first(served, job, wanted, **headers):
    """Return the id and data of the first message for which `wanted` holds."""
    url = f"{served.url}/api/jobs/{job}/stream"
    with httpx.stream("GET", url, headers=headers, timeout=DEADLINE_S) as answer:
        return next(found for found in messages(answer) if wanted(found[1]))


def read(served, job):
    return first(served, job, lambda data: data.get("job", {}).get("is_read"))


def test_the_page_and_its_files_come_from_this_server_alone(served):
    page = served.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "access-control-allow-origin" not in page.headers
    for name in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        found = served.get(name)
        assert found.status_code == 200 and "https://" not in found.text
    assert not re.findall(r'(?:src|href)="(?!/|#|data:,)', page.text)


def test_jobs_snapshots_incidents_and_events_are_answered(served):
    assert {job["key"] for job in served.get("/api/jobs").json()["jobs"]} == {"ended", "killed"}
    read(served, "ended")
    found = served.get("/api/jobs/ended").json()
    assert found["job"]["state"] == "done"
    assert found["incidents"][0]["title"] == "Rank 1 on a: SIGKILL"
    assert served.get("/api/jobs/ended/incidents/1").json()["state"] == "recovered"
    rows = served.get("/api/jobs/ended/events?incident=1").json()["rows"]
    kinds = [row["kind"] for row in rows]
    assert kinds == ["job-ended", "workers-started", "round-settled", "worker-exited"]
    series = served.get("/api/jobs/ended/series?from=1000000000&to=1000000060").json()
    assert set(series["world"]) == {1, 2}


def test_a_job_that_was_killed_has_no_end_and_says_so(served):
    assert read(served, "killed")[1]["job"]["state"] == "silent"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/jobs/none", 404),
        ("/api/jobs/..%2f..%2fetc", 404),
        ("/api/jobs/ended/incidents/99", 404),
        ("/api/jobs/ended/series?from=5&to=1", 400),
        ("/api/jobs/ended/series?from=nan&to=x", 400),
        ("/api/jobs/ended/events?before=-1", 400),
        ("/api/jobs/ended/log?node=a&local_rank=0", 404),
        ("/api/jobs/ended/log?node=..%2f..&local_rank=0", 404),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(served, path, status):
    found = served.get(path)
    assert found.status_code == status and found.json()["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_other_sites_neither_read_nor_drive_the_page(served, headers, status):
    for path in ("/", "/api/jobs", "/api/jobs/ended"):
        assert served.get(path, **headers).status_code == status


def test_nothing_can_be_changed(served):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert (
            httpx.request(method, f"{served.url}/api/jobs/ended", timeout=DEADLINE_S).status_code
            == 405
        )


def test_a_stream_continues_where_a_lost_connection_ended(served):
    write(served.logs / "growing", *STORY)
    number, _ = read(served, "growing")
    write(served.logs / "growing", event("job-ended", ok=True, time_s=1e9 + 90))

    def changed(data):
        return "job" in data

    number, data = first(served, "growing", changed, **{"last-event-id": number})
    assert data["job"]["state"] == "done" and "checkpoints" not in data, "only what has changed"
    _, data = first(served, "growing", changed, **{"last-event-id": "00000000-9"})
    assert "checkpoints" in data, "the number of another server is worth nothing"
    _, data = first(served, "growing", lambda data: True, **{"last-event-id": number})
    assert set(data) == {"now_s"}, "a heartbeat"


def test_a_crowd_of_clients_that_do_not_read_does_not_block_users(served):
    request = b"GET /api/jobs/ended/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with ExitStack() as stack:
        crowd = []
        for _ in range(STREAMS_MAX + 20):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            sock.settimeout(DEADLINE_S)
            sock.sendall(request)
            crowd.append(sock.recv(12))
        assert crowd.count(b"HTTP/1.1 200") == STREAMS_MAX
        assert crowd.count(b"HTTP/1.1 503") == 20
        begun_s = time.monotonic()
        assert served.get("/api/jobs/ended").json()["job"]["state"] == "done"
        assert time.monotonic() - begun_s < 10 * HEARTBEAT_S
    until(lambda: admits(served, "ended"), "a place of those who left is free")


def admits(served, job):
    """Whether the server gives one more client the stream of a job."""
    url = f"{served.url}/api/jobs/{job}/stream"
    with httpx.stream("GET", url, timeout=DEADLINE_S) as answer:
        return answer.status_code == 200


def test_garbage_ends_its_own_connection_alone(served):
    pieces = [b"\x16\x03\x01\x02\x00", b"\x00" * 100_000, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50,
              b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"GET /%ff%00 HTTP/1.1\r\n\r\n",
              b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000]  # fmt: skip
    for piece in pieces:
        with socket.create_connection(("127.0.0.1", served.port)) as sock:
            sock.settimeout(DEADLINE_S)
            try:
                sock.sendall(piece)
                sock.shutdown(socket.SHUT_WR)
                assert b"200 OK" not in sock.recv(100)
            except ConnectionError:
                pass
    assert served.get("/").status_code == 200


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, setpriv")
def test_other_users_of_the_machine_are_refused(served):
    code = f"import urllib.request as u; print(u.urlopen('{served.url}/').status)"
    python = [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", code]
    as_nobody = ["setpriv", "--reuid", "65534", "--clear-groups"]
    own = subprocess.run(python, check=True, capture_output=True, timeout=DEADLINE_S)
    other = subprocess.run(
        [*as_nobody, *python], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert own.stdout == b"200\n" and other.returncode != 0
    assert "RemoteDisconnected" in other.stderr or "ConnectionReset" in other.stderr


def test_the_token_is_required_unless_on_the_loopback(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("correct horse\n")
    served = Served(tmp_path, "--token-file", str(secret))
    try:
        assert served.get("/api/jobs").status_code == 401
        assert served.get("/api/jobs", authorization="Bearer wrong").status_code == 401
        assert served.get("/api/jobs", authorization="Bearer correct horse").status_code == 200
        with httpx.Client(base_url=served.url, timeout=DEADLINE_S) as browser:
            assert browser.get("/").headers["location"] == "/login"
            assert browser.post("/login", content="token=wrong\r\n").status_code == 401
            answer = browser.post("/login", content="token=correct horse\r\n")
            assert "HttpOnly" in answer.headers["set-cookie"]
            assert "SameSite=strict" in answer.headers["set-cookie"]
            assert "correct" not in answer.headers["set-cookie"]
            assert browser.get("/api/jobs").status_code == 200
            origin = {"origin": "http://evil.example"}
            assert browser.post("/login", headers=origin).status_code == 403
    finally:
        served.close()


def test_the_log_of_a_worker_is_that_of_its_newest_process(served):
    folder = served.logs / "ended" / "round_1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "worker.jsonl").write_text('{"node": "a", "host": "h", "local_rank": 0, "rank": 0}\n')
    (folder / "stderr.log").write_text("10%\r20%\rdone\nlast <b>words</b>\n")
    found = served.get("/api/jobs/ended/log?node=a&local_rank=0&round=2").json()
    assert found["text"] == "done\nlast <b>words</b>\n" and not found["is_cut"]
    assert served.get("/api/jobs/ended/log?node=a&local_rank=0&round=0").status_code == 404


def test_the_command_refuses_what_cannot_be_served(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.delenv("ELASTANE_TOKEN", raising=False)
    assert main(["dashboard", "--host", "0.0.0.0"]) == ExitCode.USAGE
    assert "[dashboard-token]" in capsys.readouterr().err
    assert main(["dashboard", "none", "--log-dir", str(tmp_path)]) == ExitCode.USAGE
    assert "[no-such-job]" in capsys.readouterr().err
    assert main(["dashboard", "--port", "70000"]) == ExitCode.USAGE
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["dashboard", "--port", port]) == ExitCode.CONFIGURATION
    assert "[dashboard-listen]" in capsys.readouterr().err
