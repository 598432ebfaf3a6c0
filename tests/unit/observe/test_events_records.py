"""The lines of the event log: format, bounds, and the page that documents the kinds."""

import ast
import math
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from elastane.agent.rules import failure_data
from elastane.coordinator.rules.ending import cause_data
from elastane.observe.events import (
    LINE_BYTES_MAX,
    EventOrigin,
    LoggedEvent,
    decode_line,
    encode_line,
    iso_time,
    make_event,
)
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Cause, Failure, Fence

TELLER = EventOrigin(job="job", node="host-a", host="host-a.example", pid=7)
DOCS = Path(__file__).parents[3] / "docs" / "events.md"


def event(note, seq=0):
    return make_event(note, TELLER, source="agent", seq=seq, now_ns=1_700_000_000_123_456_789)


def test_event_is_decoded_as_it_was_logged():
    note = LogEvent(
        kind=EventKind.RESTART,
        reason="1 of 3 restarts used",
        node_id="host-b",
        fence=Fence(3, 1),
        data={"used": 1, "left_s": 0.5, "ok": True, "why": "x"},
    )
    read = decode_line(encode_line(event(note, seq=9)))
    assert (read.kind, read.reason, read.node, read.seq) == ("restart", note.reason, "host-b", 9)
    assert (read.round, read.attempt, read.data) == (3, 1, note.data)
    assert read.time == "2023-11-14T22:13:20.123456789Z"
    assert (read.job, read.host, read.pid, read.source) == ("job", "host-a.example", 7, "agent")


def test_event_without_a_node_has_its_origins_node():
    assert event(LogEvent(kind=EventKind.SIGNAL, reason="SIGTERM")).node == "host-a"


texts = st.text(st.characters(codec=None), max_size=3000)


@given(
    reason=texts, data=st.dictionaries(texts, texts | st.floats() | st.integers() | st.booleans())
)
def test_any_note_gives_one_readable_line_within_the_bound(reason, data):
    line = encode_line(event(LogEvent(kind=EventKind.INCIDENT, reason=reason, data=data)))
    assert len(line) <= LINE_BYTES_MAX
    assert line.count(b"\n") == 1
    assert decode_line(line).kind == "incident"


def test_numbers_that_json_lacks_are_logged_as_text():
    read = decode_line(encode_line(event(LogEvent(kind="x", reason="", data={"loss": math.nan}))))
    assert read.data == {"loss": "nan"}


def test_torn_line_is_no_event_and_an_unknown_kind_with_unknown_fields_is_one():
    line = encode_line(event(LogEvent(kind=EventKind.SIGNAL, reason="r")))
    assert decode_line(line[:40]) is None
    assert decode_line(b"\xff\n") is None
    newer = line.replace(b'"signal"', b'"from-the-future","extra":[1]')
    assert decode_line(newer).kind == "from-the-future"


def test_times_are_utc_with_nanoseconds():
    assert iso_time(1) == "1970-01-01T00:00:00.000000001Z"


def sections():
    """Return the text of each kind's section."""
    parts = re.split(r"^### `([a-z-]+)`\n", DOCS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_kind_has_its_section_and_every_section_a_kind():
    assert list(sections()) == [kind.value for kind in EventKind]


def test_every_section_names_source_time_and_data_of_its_event():
    for kind, text in sections().items():
        for label in ("Logged by:", "When:", "Data:"):
            assert label in text, f"{kind}: no {label}"


def test_every_field_of_a_line_is_documented():
    text = DOCS.read_text()
    for field in LoggedEvent.__struct_fields__:
        assert f"| `{field}` |" in text, field


def told_fields():
    """Yield kind and data fields of each call in the sources that logs an event."""
    for path in (Path(__file__).parents[3] / "src" / "elastane").rglob("*.py"):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            kind = call.args[0] if call.args else named.get("kind")
            if not (isinstance(kind, ast.Attribute) and ast.unparse(kind.value) == "EventKind"):
                continue
            data = named.pop("data", None)
            # None is a ** of fields, which another test compares with the page.
            fields = set(named) - {"kind", "reason", "node_id", "fence", None}
            if isinstance(data, ast.Dict):
                fields |= {key.value for key in data.keys if isinstance(key, ast.Constant)}
            yield EventKind[kind.attr].value, fields


def test_every_data_field_of_an_event_in_the_sources_is_documented():
    told = list(told_fields())
    assert {"job-ended", "worker-exited", "events-lost"} <= {kind for kind, _ in told}
    for kind, fields in told:
        for field in fields:
            assert f"`{field}`" in sections()[kind], f"{kind}: {field} is not in docs/events.md"


def test_every_field_of_a_failed_worker_and_of_a_cause_is_documented():
    failure = Failure(local_rank=0, rank=0, pid=1, exit_code=1)
    page = sections()
    for field in failure_data(failure, stopped=False):
        assert f"`{field}`" in page["worker-exited"], field
    cause = Cause(kind="worker", what="x", failure=failure)
    for field in cause_data(cause):
        assert f"`{field}`" in page["restart"] and f"`{field}`" in page["job-ended"], field
