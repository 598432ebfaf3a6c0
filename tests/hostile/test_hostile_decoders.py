"""Any bytes give a value or the documented error in every decoder, within a bound on memory."""

import contextlib
import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_store import MemoryBackend, MemoryStore

from elastane.cli.explain import story_lines
from elastane.errors import ElastaneError, WireError
from elastane.observe.events import LoggedEvent, decode_line, read_events
from elastane.observe.merge import _read_notes
from elastane.observe.report import FinalReport, read_report
from elastane.observe.story import story_of
from elastane.observe.view import decode_progress
from elastane.options.rendezvous import read_conf
from elastane.options.secret import read_tokens
from elastane.options.settings import load
from elastane.process.endpoint import Endpoint, parse_endpoint
from elastane.process.errorfile import read_error_file
from elastane.process.files import JobEntry, JobRegistry
from elastane.process.streams.files import WORKER_FILE
from elastane.process.timers import TimerPipe, TimerTable, WorkerTimer, parse_request
from elastane.protocol.limits import FRAME_BYTES_MAX
from elastane.protocol.model import Fence, JobRecord, JobSpec
from elastane.protocol.unreadable import UNREADABLE
from elastane.protocol.wire import ClientHandshake, ServerHandshake, derive_secret
from elastane.stores.etcd import wire as etcd_wire
from elastane.stores.jobs import Filed, JobKeys, LeaderRecord
from elastane.stores.pages import Hooks, Pages, Root
from elastane.stores.protocol import Entry

SECRET = derive_secret("digits", "token")
# A few times what the largest input of these tests has.
PEAK_BYTES_MAX = 24 << 20


def file_with(folder, name, data):
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def stranger(folder, data):
    server = ServerHandshake("digits", SECRET, b"s" * 32)
    for side in (server, ClientHandshake("digits", SECRET, b"c" * 32)):
        with contextlib.suppress(WireError):
            side.feed(data)
        assert not side.done


def sealed(folder, data):
    """Return a correctly sealed frame, from either side of a session."""
    agent, coordinator = sides()
    for sender, receiver in ((agent, coordinator), (coordinator, agent)):
        sender._encoder = type("Raw", (), {"encode": staticmethod(lambda body: body)})()
        with contextlib.suppress(WireError):
            receiver.feed(sender.encode(data[:FRAME_BYTES_MAX]))
            receiver.next()


def sides():
    agent = ClientHandshake("digits", SECRET, b"c" * 32)
    coordinator = ServerHandshake("digits", SECRET, b"s" * 32)
    agent.feed(coordinator.feed(agent.feed(coordinator.feed(agent.start()))))
    return agent.codec(), coordinator.codec()


def timer(folder, data):
    table = TimerTable()
    for line in data.split(b"\n"):
        request = parse_request(line)
        assert request is None or isinstance(request, WorkerTimer)
        if request is not None:
            table.update(request)
            table.expired(1e9)


def event(folder, data):
    file_with(folder, "job/events.host.jsonl", data)
    found = list(read_events(Path(folder) / "job"))
    assert all(isinstance(one, LoggedEvent) for one in found)
    assert story_lines(story_of("job", "", found))
    assert msgspec.json.encode(story_of("job", "", found))
    assert decode_line(data) is None or isinstance(decode_line(data), LoggedEvent)


def error_file(folder, data):
    read_error_file(str(file_with(folder, "error.json", data)))


def registry(folder, data):
    file_with(folder, "jobs/j/a.json", data)
    assert all(isinstance(entry, JobEntry) for entry in JobRegistry(Path(folder)).running())


def report(folder, data):
    with contextlib.suppress(*UNREADABLE):
        assert isinstance(read_report(str(file_with(folder, "report", data))), FinalReport)


def stored(folder, data):
    keys = JobKeys(MemoryStore(MemoryBackend()), "j")
    with contextlib.suppress(ElastaneError):
        keys.decode(Entry(data, 1))


def page(folder, data):
    skipped = []
    file_with(folder, "p/000000000000000001", data)
    hooks = Hooks(lambda step: None, lambda path, why: skipped.append(why), lambda: None)
    reading = Pages(Path("p"), Root(Path(folder)), hooks).latest()
    assert reading.page is not None or skipped


def settings_file(folder, data):
    file_with(folder, "elastane.toml", data)
    with contextlib.suppress(ElastaneError):
        load(str(Path(folder) / "elastane.toml"), Path(folder))


def token_file(folder, data):
    with contextlib.suppress(ElastaneError):
        assert all(read_tokens(str(file_with(folder, "token", data))))


def rdzv_conf(folder, data):
    with contextlib.suppress(ElastaneError):
        read_conf(data.decode(errors="replace"))


def endpoint(folder, data):
    with contextlib.suppress(ElastaneError):
        assert isinstance(parse_endpoint(data.decode(errors="replace")), Endpoint)


def etcd(folder, data):
    assert isinstance(etcd_wire.trouble_of(data), str)


def worker_note(folder, data):
    file_with(folder, WORKER_FILE, data)
    assert _read_notes(Path(folder)) is not None


def progress(folder, data):
    decode_progress(data)


DECODERS = [
    stranger, sealed, timer, event, error_file, registry, report, stored, page, settings_file,
    token_file, rdzv_conf, endpoint, etcd, worker_note, progress,
]  # fmt: skip

EVENT = {
    "time": "t", "time_s": 1.0, "mono_s": 1.0, "seq": 1, "job": "j", "kind": "worker-exited",
    "reason": "r", "node": "n", "host": "h", "pid": 1, "round": 1, "attempt": 0,
    "data": {"exit_code": 1, "age_s": 1.0}, "source": "agent",
}  # fmt: skip
RECORD = JobRecord(spec=JobSpec(job="j", min_nodes=1, max_nodes=1, max_restarts=0))
VALID = [
    msgspec.json.encode(EVENT),
    msgspec.json.encode(WorkerTimer(1, "s", 1.0)),
    msgspec.json.encode(Filed(term=1, record=RECORD)),
    msgspec.json.encode(LeaderRecord(term=1, node_id="a", endpoint=Endpoint("h", 1))),
    msgspec.json.encode(FinalReport(job="j", ok=True, exit_code=0, reason="")),
    msgspec.json.encode(JobEntry(job="j", node="a", endpoint="h:1", token="t", pid=1, process="x")),
    b'{"message": {"message": "x", "extraInfo": {"timestamp": "1"}, "errorCode": 3}}',
    msgspec.msgpack.encode({"type": "heartbeat", "fence": Fence(1, 0), "progress": 1}),
    b'[run]\nnnodes = "1:2"\n',
    b"elastane-page 1 value 1 a - 1 digest\nx",
]
NASTY = [
    b"", b"\0", b"\n", b"\xff\xfe", b"[" * 50_000, b'{"x":' * 20_000, b'{"x":' + b"[" * 50_000,
    b'{"pid":' + b"9" * 5000 + b"}", b'{"time_s":1e999}', b'"' + b"a" * 1_000_000,
    b'{"job":"\xff"}', b'{"job":"\\ud800"}', b"a = " + b"[" * 5000, b"[a" + b".a" * 5000 + b"]",
    b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"k=" + b"9" * 5000, b"h:" + b"9" * 5000,
    *(valid.replace(b"1.0", odd) for valid in VALID for odd in (b"1e308", b"-1e308", b"1e999")),
    *(valid.replace(b":1", b":" + b"9" * 30) for valid in VALID),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decoders")


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda one: one.__name__)
def test_malicious_bytes_are_refused_as_documented_and_use_no_memory(decoder, folder):
    tracemalloc.start()
    try:
        for data in NASTY:
            decoder(folder, data)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


FIELDS = st.sampled_from(sorted({*EVENT, "term", "record", "message", "extraInfo", "type"}))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


def spoilt(valid, at, byte, cut):
    at %= len(valid)
    return (valid[:at] + bytes([byte]) + valid[at + 1 :])[: len(valid) - cut % 3]


GARBAGE = (
    st.binary(max_size=400)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.builds(spoilt, st.sampled_from(VALID), st.integers(0, 999), st.integers(0, 255),
                st.integers(0, 9))
)  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda one: one.__name__)
@settings(max_examples=150)
@given(data=GARBAGE)
@example(data=b"")
def test_any_bytes_are_refused_with_the_documented_error(decoder, folder, data):
    decoder(folder, data)


def test_a_pipe_full_of_garbage_is_counted_and_the_timers_between_it_are_read(tmp_path):
    pipe = TimerPipe(str(tmp_path / "timers"))
    pipe.open()
    try:
        with open(tmp_path / "timers", "wb", buffering=0) as file:
            file.write(b"[" * 30_000 + b"\n" + VALID[1] + b"\n" + b"x" * 5000)
            assert pipe.read() == [WorkerTimer(1, "s", 1.0)]
            assert pipe.refused == 2 and not pipe._rest
    finally:
        pipe.close()


def test_timers_of_a_worker_that_sets_too_many_or_too_long_ones_stay_small():
    line = msgspec.json.encode(WorkerTimer(1, "s" * 60_000, 1.0))
    assert parse_request(line) is None
    table = TimerTable()
    taken = sum(table.update(WorkerTimer(1, f"s{n}", 1e12)) for n in range(12_000))
    assert taken == len(table) == 10_000
