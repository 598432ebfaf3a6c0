"""Metadata servers of clouds, right and hostile: requests, answers and notices."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.errors import UsageError
from elastane.notices.aws import AwsMetadata
from elastane.notices.azure import AzureMetadata
from elastane.notices.dialogue import LEAST_S, MetadataAnswer, UnreadableAnswerError
from elastane.notices.gcp import maintenance, preemption
from elastane.notices.rules import Address, cloud_of, read_sources
from elastane.notices.watch import read_dmi

# 2026-11-27T08:20:00Z
NOW_S = 1795767600.0
GOOGLE = {"metadata-flavor": "Google", "etag": "a1b2"}
NOTHING = MetadataAnswer(404, {}, b"Not Found", NOW_S)


def ok(body="", headers=None, clock_s=NOW_S):
    return MetadataAnswer(200, headers or {}, body.encode(), clock_s)


def hold(server, *answers):
    """Run one dialogue; return all requests, and the notices at its end."""
    dialogue = server.ask()
    asks = [next(dialogue)]
    for answer in answers:
        try:
            asks.append(dialogue.send(answer))
        except StopIteration as end:
            return asks, end.value
    raise AssertionError(f"not over: {asks}")


def aws(action=None, rebalance=None):
    return hold(AwsMetadata(), ok("TOKEN"), action or NOTHING, rebalance or NOTHING)[1]


def test_aws_is_asked_with_a_token_and_404_is_no_notice():
    asks, notices = hold(AwsMetadata(), ok("TOKEN"), NOTHING, NOTHING)
    assert notices == []
    assert [(ask.method, ask.path) for ask in asks] == [
        ("PUT", "/latest/api/token"),
        ("GET", "/latest/meta-data/spot/instance-action"),
        ("GET", "/latest/meta-data/events/recommendations/rebalance"),
    ]
    assert asks[0].headers == {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    assert asks[1].headers == asks[2].headers == {"X-aws-ec2-metadata-token": "TOKEN"}


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_takes_the_instance_with_any_action_at_the_time_that_it_says(action):
    said = json.dumps({"action": action, "time": "2026-11-27T08:22:00Z"})
    (notice,) = aws(ok(said))
    assert notice.drains and notice.within_s == 120.0 and action in notice.reason


def test_a_deadline_is_by_the_clock_of_the_server():
    said = json.dumps({"action": "stop", "time": "2026-11-27T08:22:00Z"})
    date = {"date": "Fri, 27 Nov 2026 08:21:00 GMT"}
    (notice,) = aws(ok(said, date, clock_s=NOW_S + 86_400))
    assert notice.within_s == 60.0


@pytest.mark.parametrize("time", ["2026-11-27T08:19:00Z", "1970-01-01T00:00:00Z"])
def test_a_deadline_that_has_passed_leaves_a_little_time(time):
    (notice,) = aws(ok(json.dumps({"action": "stop", "time": time})))
    assert notice.drains and notice.within_s == LEAST_S


def test_an_interruption_without_a_right_time_is_one_without_a_deadline():
    (notice,) = aws(ok('{"action": "terminate", "time": "soon"}'))
    assert notice.drains and notice.within_s is None


def test_a_rebalance_recommendation_is_no_reason_to_leave():
    (notice,) = aws(rebalance=ok('{"noticeTime": "2026-11-27T08:22:00Z"}'))
    assert not notice.drains and "rebalance" in notice.reason


def test_aws_keeps_its_token_and_takes_another_one_on_401():
    server, refused = AwsMetadata(), MetadataAnswer(401, {}, b"", NOW_S)
    hold(server, ok("OLD"), NOTHING, NOTHING)
    asks, _ = hold(server, refused, ok("NEW"), NOTHING, NOTHING)
    tokens = [ask.headers.get("X-aws-ec2-metadata-token") for ask in asks]
    assert tokens == ["OLD", None, "NEW", "NEW"]
    with pytest.raises(UnreadableAnswerError, match="401"):
        hold(server, refused, ok("NEWER"), refused)
    assert next(server.ask()).method == "PUT", "it begins with a token again"


@pytest.mark.parametrize("token", ["", "a b", "x\r\nHost: evil", "x" * 2000, "ü"])
def test_a_malformed_token_is_never_sent(token):
    with pytest.raises(UnreadableAnswerError):
        hold(AwsMetadata(), ok(token))


def test_gcp_is_asked_at_once_and_then_waits_for_a_change():
    server = preemption()
    asks, notices = hold(server, ok("FALSE\n", GOOGLE))
    assert notices == [] and asks[0].headers == {"Metadata-Flavor": "Google"}
    assert asks[0].path == "/computeMetadata/v1/instance/preempted"
    asks, notices = hold(server, ok("TRUE", GOOGLE))
    assert "?wait_for_change=true&timeout_sec=15&last_etag=a1b2" in asks[0].path
    assert asks[0].limit_s > 15
    assert [(notice.drains, notice.within_s) for notice in notices] == [(True, 30.0)]


@pytest.mark.parametrize("etag", ["", "a&b=c", "x" * 100, "a b"])
def test_gcp_without_a_right_etag_is_asked_without_waiting_and_less_often(etag):
    server = preemption()
    hold(server, ok("FALSE", {"metadata-flavor": "Google", "etag": etag}))
    assert "?" not in next(server.ask()).path and server.pause_s > 1


def test_gcp_after_a_failure_is_asked_without_waiting():
    server = preemption()
    hold(server, ok("FALSE", GOOGLE))
    server.ask().close()
    dialogue = server.ask()
    next(dialogue)
    with pytest.raises(UnreadableAnswerError):
        dialogue.send(MetadataAnswer(503, GOOGLE, b"", NOW_S))
    assert "?" not in next(server.ask()).path


@pytest.mark.parametrize(
    ("value", "drains"),
    [("TERMINATE_ON_HOST_MAINTENANCE", True), ("MIGRATE_ON_HOST_MAINTENANCE", False)],
)
def test_gcp_leaves_only_for_maintenance_that_stops_the_machine(value, drains):
    _, (notice,) = hold(maintenance(), ok(value, GOOGLE))
    assert notice.drains is drains
    assert hold(maintenance(), ok("NONE", GOOGLE))[1] == []


def test_an_answer_that_is_not_of_google_is_none():
    with pytest.raises(UnreadableAnswerError, match="Google"):
        hold(preemption(), ok("TRUE"))


def azure(*events, name="train_3", headers=None):
    document = json.dumps({"DocumentIncarnation": 2, "Events": events})
    return hold(AzureMetadata(), ok(name), ok(document, headers))[1]


def event(kind, resources=("TRAIN_3",), at="Fri, 27 Nov 2026 08:20:30 GMT", **more):
    return {"EventType": kind, "Resources": [*resources], "NotBefore": at, **more}


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_takes_the_machine_by_these_events(kind):
    (notice,) = azure(event(kind, EventStatus="Scheduled", DurationInSeconds=None))
    assert notice.drains and notice.within_s == 30.0 and kind in notice.reason


@pytest.mark.parametrize("kind", ["Freeze", "SomethingNew"])
def test_azure_keeps_the_machine_through_others(kind):
    assert [notice.drains for notice in azure(event(kind))] == [False]


def test_azure_reports_other_machines_too():
    assert azure(event("Preempt", ["train_4"]), event("Preempt", [])) == []
    (notice,) = azure(event("Reboot", ["train_4", "train_3"]), event("Preempt", ["train_33"]))
    assert "Reboot" in notice.reason


@pytest.mark.parametrize("at", ["", None, "never"])
def test_an_event_that_has_begun_has_no_deadline(at):
    (notice,) = azure(event("Redeploy", at=at))
    assert notice.drains and notice.within_s is None


def test_azure_waits_long_for_the_first_document_alone():
    server, document = AzureMetadata(), ok('{"DocumentIncarnation": 1, "Events": []}')
    asks, _ = hold(server, ok("train_3"), document)
    assert asks[1].limit_s > 120 and asks[1].headers == {"Metadata": "true"}
    asks, _ = hold(server, document)
    assert asks[0].limit_s < 10 and "scheduledevents" in asks[0].path
    assert all(ask.method == "GET" for ask in asks), "nothing is acknowledged"


SERVERS = [AwsMetadata, preemption, maintenance, AzureMetadata]
GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=6,
    ).map(lambda found: json.dumps(found).encode()),
    st.just(b'{"action": 3}'),
    st.just(b'{"Events": [{"EventType": "Preempt", "Resources": "train_3"}]}'),
    st.just(b"[" * 20_000),
)


@pytest.mark.parametrize("make", SERVERS)
@settings(max_examples=60)
@given(
    status=st.just(200)
    | st.sampled_from([204, 301, 302, 307, 400, 401, 403, 404, 405, 410, 429, 500, 503]),
    body=GARBAGE,
    headers=st.just(GOOGLE) | st.sampled_from([{}, {"location": "http://evil/", "date": "x"}]),
)
def test_an_unexpected_answer_makes_no_node_leave(make, status, body, headers):
    """The server sends the same answer ten times; the dialogue ends with notices or an error."""
    dialogue = make().ask()
    next(dialogue)
    for _ in range(10):
        try:
            dialogue.send(MetadataAnswer(status, headers, body, NOW_S))
        except UnreadableAnswerError as error:
            assert len(str(error)) < 300 and "\n" not in str(error)
            return
        except StopIteration as end:
            assert not [notice for notice in end.value if notice.drains]
            return
    raise AssertionError("the dialogue has no end")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("aws", "169.254.169.254", 80),
        ("gcp:http://127.0.0.1:8111", "127.0.0.1", 8111),
        ("aws:http://[fd00:ec2::254]/", "fd00:ec2::254", 80),
    ],
)
def test_a_cloud_is_asked_at_its_address_or_at_another_one(text, host, port):
    assert read_sources(text)[0].address == Address(host, port)


FORM = "http://IP[:PORT]; it has another form"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aws:https://127.0.0.1", f"aws:{FORM}"),
        ("aws:http://user:pass@127.0.0.1", f"aws:{FORM}"),
        ("gcp:http://127.0.0.1/latest", f"gcp:{FORM}"),
        ("aws:http://127.0.0.1:http", f"aws:{FORM}"),
        ("aws:http://[::1", f"aws:{FORM}"),
        ("aws:127.0.0.1", f"aws:{FORM}"),
        (
            "aws:http://metadata.internal",
            "aws:http://IP[:PORT]; 'metadata.internal' is no IP address, and no name is resolved",
        ),
        (
            "aws:http://[::g]",
            "aws:http://IP[:PORT]; '::g' is no IP address, and no name is resolved",
        ),
        (
            "azure:http://127.0.0.1:99999",
            "azure:http://IP[:PORT]; 99999 is no port: it is not from 1 to 65535",
        ),
        (
            "command:say 'it",
            "words as in a shell: each quote is closed, and no backslash stands at the end",
        ),
        ("auto:http://127.0.0.1", "one of file:PATH, command:WORDS, aws, gcp, azure, auto"),
    ],
)
def test_an_address_that_is_no_plain_one_is_named_with_what_is_expected(text, expected):
    with pytest.raises(UsageError) as caught:
        read_sources(text)
    found = caught.value
    assert (
        found.slug == "bad-option-value"
        and text in found.what
        and "docs/notices.md" in found.next_step
    )
    assert found.expected == expected


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, ""),
        ({"sys_vendor": "QEMU"}, ""),
        ({}, ""),
    ],
)
def test_the_cloud_of_a_machine_is_recognized_by_its_firmware(tmp_path, files, cloud):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert cloud_of(read_dmi(tmp_path)) == cloud
