"""`elastane traces`: each span of a job reaches a collector once, with the same ids each time."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from jobs import until
from view_events import event, exited, settled, started

from elastane.cli import traces
from elastane.cli.main import main
from elastane.dashboard.traces import JobTrace, SpanSender
from elastane.errors import ConfigurationError, ExitCode
from elastane.observe.events import encode_line

STORY = [
    settled(1, "a", 2, time_s=1e9),
    started("a", 1, 2, round=1, attempt=0, time_s=1e9 + 1),
    event("workers-training", "a", round=1, attempt=0, time_s=1e9 + 2),
    exited(1, round=1, time_s=1e9 + 20),
    settled(2, "a", 1, time_s=1e9 + 21),
    started("a", 1, round=2, attempt=0, time_s=1e9 + 22),
]
ENDED = event("job-ended", ok=True, time_s=1e9 + 60, reason="all workers succeeded")
DEADLINE_S = 90.0


def write(folder, *events):
    folder.mkdir(exist_ok=True)
    with (folder / "events.h.jsonl").open("ab") as file:
        file.writelines(map(encode_line, events))
    return folder


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent, and refuses some requests first."""

    def __init__(self, refused=0):
        super().__init__(("127.0.0.1", 0), Taking)
        self.spans, self.refused = [], refused

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Taking(BaseHTTPRequestHandler):
    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_refused = self.server.refused > 0
        self.server.refused -= 1
        if self.path == "/v1/traces" and not is_refused:
            found = ExportTraceServiceRequest.FromString(body)
            self.server.spans += [
                span
                for resource in found.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        self.send_response(400 if is_refused else 200)
        self.end_headers()

    def log_message(self, *words):
        pass


def test_json_has_the_spans_of_each_run_and_needs_no_package(tmp_path, capsys):
    job = write(tmp_path / "demo", *STORY)
    assert main(["traces", "--json", str(job)]) == 0
    [found] = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in found["spans"]]
    assert names[0] == "job demo" and "incident #1: Rank 1 on a: SIGKILL" in names
    assert main(["traces", "--json", "--follow", str(job)]) == ExitCode.USAGE


def test_runs_that_follow_each_other_are_whole(tmp_path):
    write(tmp_path, *STORY, ENDED, event("coordinator-started", "a", time_s=1e9 + 100))
    trace = JobTrace(tmp_path)
    trace.read()
    (first, spans), (second, _) = trace.take(all_=True)
    assert first != second and spans[0].key == "job" and spans[0].is_over
    assert not any(one.is_over for _, some in trace.take(all_=True) for one in some)


def test_an_endpoint_without_a_scheme_is_refused_with_the_right_one(tmp_path, capsys):
    words = ["traces", "--endpoint", "tempo:4318", str(write(tmp_path / "demo", *STORY))]
    assert main(words) == ExitCode.USAGE
    assert "--endpoint http://tempo:4318" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, capsys):
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from elastane.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "traces", str(write(tmp_path / "demo", *STORY))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.CONFIGURATION, done.stderr
    assert "pip install 'elastane[otel]'" in done.stderr


def test_spans_reach_a_collector_in_one_tree(tmp_path, capsys):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    job = write(tmp_path / "demo", *STORY, ENDED)
    with Collector() as collector:
        for _ in range(2):
            assert main(["traces", "--endpoint", collector.url, str(job)]) == 0
        assert f"spans of job demo were sent to {collector.url}" in capsys.readouterr().out
        half = len(collector.spans) // 2
        first, again = collector.spans[:half], collector.spans[half:]
    assert [one.span_id for one in first] == [one.span_id for one in again]
    assert len({one.trace_id for one in first}) == 1
    by_name = {one.name: one for one in first}
    job_span, incident = by_name["job demo"], by_name["incident #1: Rank 1 on a: SIGKILL"]
    assert not job_span.parent_span_id and incident.parent_span_id == job_span.span_id
    assert by_name["rebuilding"].parent_span_id == incident.span_id
    assert job_span.end_time_unix_nano - job_span.start_time_unix_nano == 60 * 10**9
    attributes = {one.key: one.value for one in incident.attributes}
    assert attributes["elastane.rank"].int_value == 1
    assert incident.status.code == incident.status.STATUS_CODE_ERROR


def test_spans_of_a_job_without_an_end_are_sent_as_open_ones(tmp_path, capsys):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as collector:
        assert (
            main(["traces", "--endpoint", collector.url, str(write(tmp_path / "demo", *STORY))])
            == 0
        )
    assert "--follow waits for them" in capsys.readouterr().out
    open_ = {
        one.name for one in collector.spans if "elastane.open" in {a.key for a in one.attributes}
    }
    assert "job demo" in open_ and "world of 2 workers" not in open_


def test_a_collector_that_refuses_is_an_error(tmp_path, capsys):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    job = write(tmp_path / "demo", *STORY, ENDED)
    with Collector(refused=100) as collector:
        assert main(["traces", "--endpoint", collector.url, str(job)]) == ExitCode.CONFIGURATION
    assert "took no spans" in capsys.readouterr().err


def test_an_error_of_the_exporters_client_is_a_collector_that_took_nothing(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    sender = SpanSender("http://127.0.0.1:9")

    def export(spans):
        raise ConnectionResetError("closed by the other side")

    sender._exporter.export = export
    trace = JobTrace(write(tmp_path / "demo", *STORY, ENDED))
    trace.read()
    with pytest.raises(ConfigurationError, match="closed by the other side"):
        sender.send(*trace.take()[0])


def test_a_job_that_is_followed_sends_each_span_once_until_its_end(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(traces, "POLL_S", 0.02)
    job = write(tmp_path / "demo", *STORY)
    codes = []
    with Collector(refused=1) as collector:
        words = ["traces", "--follow", "--endpoint", collector.url, str(job)]
        following = threading.Thread(target=lambda: codes.append(main(words)))
        following.start()
        until(lambda: collector.spans, "what is over is sent", DEADLINE_S)
        assert "job demo" not in {one.name for one in collector.spans}
        write(job, ENDED)
        following.join(DEADLINE_S)
        assert codes == [0]
        ids = [one.span_id for one in collector.spans]
        assert len(ids) == len(set(ids))
        assert "job demo" in {one.name for one in collector.spans}
