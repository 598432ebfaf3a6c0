"""Every message is decoded as it was sent, and every altered stream raises WireError only."""

import contextlib

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.errors import WireError
from elastane.protocol import messages
from elastane.protocol.messages import Leave, ToAgent, ToCoordinator
from elastane.protocol.wire import ClientHandshake, ServerHandshake, derive_secret

SECRET = derive_secret("digits", "token")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def of_struct(kind):
    """Return a strategy of a Struct from the types of its fields."""
    fields = {f.name: of_type(f.type) for f in msgspec.inspect.type_info(kind).fields}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


PLAIN = {
    msgspec.inspect.NoneType: st.none(),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.IntType: st.integers(1, 4095),
    msgspec.inspect.StrType: TEXT,
}


def of_type(info):
    """Return a strategy of a field's type; KeyError for an unknown type."""
    match info:
        case msgspec.inspect.StructType(cls=cls):
            return of_struct(cls)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=2).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=2)
        case msgspec.inspect.StrType(max_length=int(most)) if most < 20:
            return TEXT.map(lambda text: text[:most])
        case msgspec.inspect.FloatType(le=most):
            return st.floats(0.0, 1e6 if most is None else most)
        case msgspec.inspect.LiteralType(values=choices) | msgspec.inspect.EnumType(cls=choices):
            return st.sampled_from(list(choices))
    return PLAIN[type(info)]


def any_of(union):
    return st.one_of([of_struct(kind) for kind in union.__args__])


def sides():
    agent = ClientHandshake("digits", SECRET, b"c" * 32)
    coordinator = ServerHandshake("digits", SECRET, b"s" * 32)
    agent.feed(coordinator.feed(agent.feed(coordinator.feed(agent.start()))))
    return agent.codec(), coordinator.codec()


@given(sent=st.lists(any_of(ToCoordinator), max_size=4), cut=st.integers(1, 50))
def test_every_message_to_the_coordinator_is_decoded_from_pieces_of_any_size(sent, cut):
    agent, coordinator = sides()
    assert carry(agent, coordinator, sent, cut) == sent


@given(sent=st.lists(any_of(ToAgent), max_size=4), cut=st.integers(1, 50))
def test_every_message_to_the_agent_is_decoded_from_pieces_of_any_size(sent, cut):
    agent, coordinator = sides()
    assert carry(coordinator, agent, sent, cut) == sent


def carry(sender, receiver, sent, cut):
    stream = b"".join(sender.encode(message) for message in sent)
    received = []
    for at in range(0, len(stream), cut):
        receiver.feed(stream[at : at + cut])
        while (message := receiver.next()) is not None:
            received.append(message)
    return received


def mutate(data, at, kind, byte):
    at %= len(data)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ byte]) + data[at + 1 :]
    if kind == "drop":
        return data[:at] + data[at + 1 :]
    if kind == "double":
        return data[: at + 1] + data[at:]
    return data[:at]


KIND = st.sampled_from(["flip", "drop", "double", "truncate"])


@settings(max_examples=300)
@given(at=st.integers(0, 10_000), kind=KIND, byte=st.integers(1, 255))
def test_no_altered_stream_yields_a_message_that_was_not_sent(at, kind, byte):
    agent, coordinator = sides()
    sent = [Leave(f"{i}") for i in range(4)]
    stream = mutate(b"".join(agent.encode(message) for message in sent), at, kind, byte)
    coordinator.feed(stream)
    received = []
    try:
        while (message := coordinator.next()) is not None:
            received.append(message)
    except WireError:
        pass
    assert received == sent[: len(received)]
    assert len(received) < 4 or kind == "double"  # a doubled last byte is an incomplete frame
    assert coordinator.waiting_bytes <= len(stream)


@given(order=st.permutations(range(4)))
def test_frames_in_any_other_order_are_refused(order):
    agent, coordinator = sides()
    frames = [agent.encode(Leave(str(i))) for i in range(4)]
    coordinator.feed(b"".join(frames[i] for i in order))
    received = []
    try:
        while (message := coordinator.next()) is not None:
            received.append(int(message.reason))
    except WireError:
        pass
    in_place = next((i for i in range(4) if order[i] != i), 4)
    assert received == list(range(in_place))


@settings(max_examples=400)
@given(flight=st.integers(0, 3), at=st.integers(0, 1000), kind=KIND, byte=st.integers(1, 255))
def test_no_altered_handshake_proves_both_sides(flight, at, kind, byte):
    agent = ClientHandshake("digits", SECRET, b"c" * 32)
    coordinator = ServerHandshake("digits", SECRET, b"s" * 32)
    agent_done = coordinator_done = False
    try:
        data = agent.start()
        for number in range(4):
            if number == flight:
                data = mutate(data, at, kind, byte)
            data = (agent if number % 2 else coordinator).feed(data)
        agent_done, coordinator_done = agent.done, coordinator.done
    except WireError:
        return
    if agent_done and coordinator_done:
        # One byte more after a complete flight belongs to the first frame, which then fails.
        assert kind == "double"
        sender, receiver = agent.codec(), coordinator.codec()
        if flight == 3:
            sender, receiver = receiver, sender
        receiver.feed(sender.encode(Leave("x")) + b"\0" * 600)
        try:
            assert receiver.next() is None
        except WireError:
            return


@settings(max_examples=300)
@given(data=st.binary(max_size=5000), piece=st.integers(1, 500))
def test_garbage_is_refused_or_incomplete_and_never_a_message(data, piece):
    for side in (
        ClientHandshake("digits", SECRET, b"c" * 32),
        ServerHandshake("digits", SECRET, b"s" * 32),
    ):
        try:
            for at in range(0, len(data), piece):
                side.feed(data[at : at + piece])
        except WireError:
            pass
        assert not side.done
    _, codec = sides()
    codec.feed(data)
    with contextlib.suppress(WireError):
        assert codec.next() is None


def test_the_strategies_cover_every_message():
    kinds = {
        k
        for k in vars(messages).values()
        if isinstance(k, type) and hasattr(k, "__struct_config__")
    }
    tagged = {k for k in kinds if k.__struct_config__.tag is not None}
    assert tagged == set(ToCoordinator.__args__) | set(ToAgent.__args__)
