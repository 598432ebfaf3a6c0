"""The wire codec: the proofs of the handshake, and the text of each refusal."""

import msgspec
import pytest

from elastane.errors import WireError
from elastane.protocol import wire
from elastane.protocol.limits import FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX
from elastane.protocol.messages import Alive, Failed, Heartbeat, Join, Leave, Probe, ProbeResult
from elastane.protocol.model import Failure, Fence, JobSpec, NodeSpec, PortOffer, Versions
from elastane.protocol.wire import MAGIC, ClientHandshake, ServerHandshake, derive_secret

SECRET = derive_secret("digits", "open sesame")


def client(job="digits", secret=SECRET):
    return ClientHandshake(job, secret, b"c" * 32)


def server(job="digits", secret=SECRET):
    return ServerHandshake(job, secret, b"s" * 32)


def shake(agent, coordinator):
    """Run a handshake to its end; return both codecs."""
    challenge = coordinator.feed(agent.start())
    verdict = coordinator.feed(agent.feed(challenge))
    assert agent.feed(verdict) == b""
    assert agent.done and coordinator.done
    return agent.codec(), coordinator.codec()


def refusal(action, *arguments):
    with pytest.raises(WireError) as caught:
        action(*arguments)
    return caught.value


def test_both_sides_that_know_the_secret_can_talk_both_ways():
    ours, theirs = shake(client(), server())
    theirs.feed(ours.encode(Heartbeat(fence=Fence(3, 1), progress=7)))
    assert theirs.next() == Heartbeat(fence=Fence(3, 1), progress=7)
    assert theirs.next() is None
    ours.feed(theirs.encode(Alive(authority=True)))
    assert ours.next() == Alive(authority=True)


def test_a_session_of_other_messages_begins_with_the_same_handshake():
    agent, coordinator = client(), server()
    shake(agent, coordinator)
    decoder = msgspec.msgpack.Decoder(Leave)
    ours, theirs = agent.codec_of(decoder), coordinator.codec_of(decoder)
    theirs.feed(ours.encode(Leave("one way")))
    ours.feed(theirs.encode(Leave("and the other")))
    assert (theirs.next(), ours.next()) == (Leave("one way"), Leave("and the other"))


def test_a_handshake_works_when_it_comes_byte_by_byte():
    agent, coordinator = client(), server()
    to_coordinator, to_agent = agent.start(), b""
    while not agent.done:
        for byte in to_coordinator:
            to_agent += coordinator.feed(bytes([byte]))
        to_coordinator = b""
        for byte in to_agent:
            to_coordinator += agent.feed(bytes([byte]))
        to_agent = b""
    assert coordinator.done


def test_another_job_is_refused_and_both_logs_say_so_without_telling_whose_endpoint_it_is():
    agent, coordinator = client(job="letters"), server()
    error = refusal(coordinator.feed, agent.start())
    assert error.slug == "wrong-job" and "'letters'" in error.what and "'digits'" in error.what
    told = refusal(agent.feed, coordinator.farewell)
    assert told.slug == "wrong-job" and "'letters'" in told.what
    assert b"digits" not in coordinator.farewell


def test_another_token_is_refused_on_both_sides():
    agent, coordinator = client(secret=derive_secret("digits", "other")), server()
    proof = agent.feed(coordinator.feed(agent.start()))
    error = refusal(coordinator.feed, proof)
    assert error.slug == "wrong-token"
    assert refusal(agent.feed, coordinator.farewell).slug == "wrong-token"


def test_a_coordinator_that_cannot_prove_the_secret_is_refused():
    agent, coordinator = client(), server()
    agent.feed(coordinator.feed(agent.start()))
    assert refusal(agent.feed, b"\x00" + b"x" * 32).slug == "wrong-token"


def test_another_protocol_version_names_both_versions_on_both_sides():
    agent, coordinator = client(), server()
    hello = bytearray(agent.start())
    hello[len(MAGIC)] = 9
    error = refusal(coordinator.feed, bytes(hello))
    assert error.slug == "protocol-version" and "version 9" in error.what and "1" in error.what
    newer = MAGIC + b"\x09\x00" + b"\x01"
    told = refusal(client().feed, newer)
    assert told.slug == "protocol-version" and "9" in told.what and "agent 1" in told.what


@pytest.mark.parametrize(
    ("first_bytes", "word"),
    [
        (b"GET /healthz HTTP/1.1\r\n", "web client"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "TLS"),
        (b"\x00\xce\xf7\x85<\rT\x16\x00\x00", "TCPStore"),
        (b"\xff\xfe", "began with"),
    ],
)
def test_another_protocol_is_recognised_by_its_first_bytes(first_bytes, word):
    error = refusal(server().feed, first_bytes)
    assert error.slug == "not-an-agent" and word in error.what


def test_an_agent_names_the_program_that_answers_instead_of_a_coordinator():
    error = refusal(client().feed, b"HTTP/1.1 400 Bad Request\r\n")
    assert error.slug == "not-a-coordinator" and "web server" in error.what and error.next_step


def test_bytes_of_an_unproven_peer_are_bounded():
    coordinator = server()
    hello = client().start()[:-1]
    coordinator.feed(hello)
    assert refusal(coordinator.feed, b"x" * HANDSHAKE_BYTES_MAX).slug == "bad-handshake"


def test_a_job_name_longer_than_any_is_refused_before_it_is_stored():
    hello = MAGIC + b"\x01\x00" + b"\xff\xff" + b"n" * 32
    assert refusal(server().feed, hello).slug == "bad-handshake"


def test_without_a_token_the_secret_depends_on_the_job():
    assert derive_secret("a", None) != derive_secret("b", None)
    assert derive_secret("a", None) != derive_secret("a", "a")


def test_a_frame_is_accepted_once_and_in_its_place_only():
    ours, theirs = shake(client(), server())
    first, second = ours.encode(Leave("one")), ours.encode(Leave("two"))
    theirs.feed(first + first + second)
    assert theirs.next() == Leave("one")
    assert refusal(theirs.next).slug == "bad-frame"
    assert refusal(theirs.next).slug == "bad-frame"  # for ever after


def test_a_frame_left_out_is_noticed():
    ours, theirs = shake(client(), server())
    ours.encode(Leave("lost"))
    theirs.feed(ours.encode(Leave("two")))
    refusal(theirs.next)


def test_a_frame_sent_back_to_its_sender_is_refused():
    ours, _ = shake(client(), server())
    ours.feed(ours.encode(Leave("hello me")))
    refusal(ours.next)


def test_a_frame_of_another_session_is_refused():
    ours, _ = shake(client(), server())
    _, theirs = shake(client(), ServerHandshake("digits", SECRET, b"t" * 32))
    theirs.feed(ours.encode(Leave("again")))
    refusal(theirs.next)


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come():
    _, theirs = shake(client(), server())
    theirs.feed((FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"m" * 16)
    assert theirs.ready
    assert refusal(theirs.next).slug == "bad-frame"
    theirs.feed(b"x" * 1000)
    assert theirs.waiting_bytes == 0


def test_a_message_that_is_too_large_is_refused_at_its_sender_and_the_session_continues():
    ours, theirs = shake(client(), server())
    assert refusal(ours.encode, Leave("x" * (FRAME_BYTES_MAX + 1))).slug == "frame-too-large"
    theirs.feed(ours.encode(Leave("short")))
    assert theirs.next() == Leave("short")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa4nope",
        b"\x82\xa4type\xa5leave\xa6reason\x07",
        b"\x82\xa4type\xa5ready\xa1x" + b"\x91" * 500_000,
        b"\x82\xa4type\xa5leave\xa6reason\xa2\xff\xfe",
    ],
)
def test_a_proven_peer_that_sends_no_message_is_refused_as_such(body):
    agent, coordinator = client(), server()
    shake(agent, coordinator)
    sender = wire.FrameCodec(send_key=agent._keys[2].to_coordinator, receive_key=b"", decoder=None)
    sender._encoder = type("Raw", (), {"encode": staticmethod(lambda raw: raw)})()
    receiver = coordinator.codec()
    receiver.feed(sender.encode(body))
    assert refusal(receiver.next).slug == "bad-message"


def test_probes_of_another_version_are_read_as_far_as_they_are_known():
    agent, coordinator = shake(client(), server())
    probe = Probe("10.0.0.2", 7001, 1)
    for sender, receiver, message, field, plain in (
        (coordinator, agent, Alive(True, (probe,)), "probes", Alive(True)),
        (agent, coordinator, Heartbeat(probed=(ProbeResult(probe, True),)), "probed", Heartbeat()),
    ):
        newer = msgspec.to_builtins(message)
        newer[field] = [each | {"family": "inet6", "tries": [1, 2]} for each in newer[field]]
        receiver.feed(sender.encode(newer | {"of_a_newer_version": {"x": 1}}))
        assert receiver.next() == message
        older = msgspec.to_builtins(message)
        del older[field]
        receiver.feed(sender.encode(older))
        assert receiver.next() == plain


def test_keys_and_secrets_are_not_in_any_repr():
    agent, coordinator = client(), server()
    shake(agent, coordinator)
    assert repr(agent._keys[2]) == "SessionKeys(...)"


def test_decoding_keeps_up_with_frames_in_one_piece():
    ours, theirs = shake(client(), server())
    count = 3000
    theirs.feed(b"".join(ours.encode(Leave(str(i))) for i in range(count)))
    assert [theirs.next().reason for _ in range(count)] == [str(i) for i in range(count)]
    assert theirs.waiting_bytes == 0


@pytest.mark.parametrize(
    "offence",
    [{"local_world_size": 0}, {"node_id": "n" * 801}, {"age_s": float("nan")}, {"port": 70_000}],
)
def test_values_out_of_their_bounds_are_refused_at_the_wire(offence):
    versions = Versions(elastane="1", python="3")
    node = {"node_id": "a", "incarnation": "1", "local_world_size": 1, "versions": versions}
    failure = {"local_rank": 0, "rank": 0, "pid": 1, "exit_code": 1, "age_s": 0.0}
    spec = JobSpec(job="digits", min_nodes=1, max_nodes=1, max_restarts=0)
    for known in (node, failure):
        known.update({name: value for name, value in offence.items() if name in known})
    messages = [
        Join(spec=spec, node=NodeSpec(**node), offer=PortOffer(offence.get("port", 1), True)),
        Failed(fence=Fence(1, 0), failures=(Failure(**failure),)),
    ]
    refused = 0
    for message in messages:
        ours, theirs = shake(client(), server())
        theirs.feed(ours.encode(message))
        try:
            assert theirs.next() == message
        except WireError as error:
            assert error.slug == "bad-message"
            refused += 1
    assert refused == 1
