"""After any message of an agent, the coordinator's state is valid and its answers can be sent.

The messages are all that the wire accepts, at the edges of their fields' bounds.
"""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.coordinator.rules import Rendezvous, Takeover
from elastane.coordinator.rules.admission import ROUND_MAX
from elastane.protocol.effects import Persist, Send, WriteEvent
from elastane.protocol.events import Broken, Received, Tick
from elastane.protocol.limits import COUNT_MAX, LOCAL_WORLD_SIZE_MAX
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Conclude, Heartbeat, Join, Leave, ToAgent, ToCoordinator
from elastane.protocol.model import Fence, JobRecord, JobSpec, NodeSpec, PortOffer, Versions

SPEC = JobSpec(job="digits", min_nodes=2, max_nodes=3, max_restarts=2)
VERSIONS = Versions(elastane="1", python="3")
A, B, HOSTILE, AGAIN = 1, 2, 3, 4
INFO = msgspec.inspect
WHOLE = st.sampled_from([0, 1, 2, 3, 100, -1, -100, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
NOW = Fence(1, 0)
OTHERS = [Fence(1, 1), Fence(2, 0), Fence(0, 0), Fence(COUNT_MAX, 0), Fence(ROUND_MAX, COUNT_MAX)]
FENCES = st.sampled_from([*[NOW] * 6, *OTHERS, Fence(ROUND_MAX + 1, 0)])

PLAIN = {
    INFO.NoneType: st.none(),
    INFO.BoolType: st.booleans(),
}
TEXTS = ["a", "b", "x", "y", "T", "R", "connection reset by peer"]


def of_type(info):
    """A strategy for a field, at the edges of what its annotation allows."""
    match info:
        case INFO.StructType(cls=cls):
            return of_struct(cls)
        case INFO.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case INFO.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=3).map(tuple)
        case INFO.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=3)
        case INFO.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case INFO.LiteralType(values=values):
            return st.sampled_from(list(values))
    return bounded(info)


def bounded(info):
    """A strategy for a plain value, within the bounds of its annotation."""
    match info:
        case INFO.StrType(max_length=most):
            return st.sampled_from([text for text in TEXTS if most is None or len(text) <= most])
        case INFO.FloatType(ge=low, le=top):
            edges = [edge for edge in (low, top) if edge is not None]
            return st.sampled_from([n for n in (0.0, 0.5, 1e9, *edges) if _within(n, low, top)])
        case INFO.IntType(ge=low, le=high, lt=below):
            top = high if high is not None else below - 1 if below is not None else None
            edges = [low, top] if low is not None else []
            return WHOLE.filter(lambda n: _within(n, low, top)) | st.sampled_from(edges or [0])
    return PLAIN[type(info)]


def _within(number, low, top):
    return (low is None or number >= low) and (top is None or number <= top)


def of_struct(cls):
    if cls is Fence:
        return FENCES
    if cls is JobSpec:
        return st.just(SPEC)
    if cls is Versions:
        return st.just(VERSIONS)
    fields = {field.name: of_type(field.type) for field in INFO.type_info(cls).fields}
    return st.fixed_dictionaries(fields).map(lambda values: cls(**values))


# What the honest do meanwhile: one asks to leave, another one comes.
ACTS = st.sampled_from([(1, Leave("maintenance")), (5, None)])
KINDS = [kind for kind in ToCoordinator.__args__ if kind is not Conclude]
MESSAGES = st.one_of([of_struct(kind) for kind in [*KINDS, Join, Join, Join]])


def join(node_id):
    node = NodeSpec(node_id=node_id, incarnation=node_id, local_world_size=1, versions=VERSIONS)
    return Join(spec=SPEC, node=node, offer=PortOffer(1, True))


class Desk:
    """A coordinator; each answer and record is encoded and decoded."""

    def __init__(self, *, store_backed):
        self.now_s = 0.0
        self.machine = Rendezvous(SPEC, 0.0, Takeover(store_backed=store_backed))
        self.told = []

    def hear(self, event, after_s=0.01):
        self.now_s += after_s
        for effect in self.machine.handle(event, self.now_s):
            if isinstance(effect, Send):
                data = msgspec.msgpack.encode(effect.message)
                msgspec.msgpack.decode(data, type=ToAgent)
                assert len(data) < 1 << 20
            elif isinstance(effect, Persist):
                msgspec.json.decode(msgspec.json.encode(effect.record), type=JobRecord)
            elif isinstance(effect, WriteEvent):
                self.told.append(effect.event)

    def say(self, session, message, after_s=0.01):
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToCoordinator)
        self.hear(
            Received(session=session, message=received, peer_host="h", local_host="h"), after_s
        )

    def pass_time(self, seconds, *alive):
        """Let time pass, with heartbeats of these sessions."""
        for _ in range(int(seconds / 0.5)):
            self.hear(Tick(), 0.5)
            for session in alive:
                self.say(session, Heartbeat())


def running(store_backed):
    desk = Desk(store_backed=store_backed)
    for session, node in ((A, "a"), (B, "b")):
        desk.say(session, join(node))
    desk.pass_time(4.0, A, B)
    assert desk.machine.report().phase == "running"
    return desk


@settings(max_examples=125)
@given(
    said=st.lists(st.tuples(st.sampled_from([B, HOSTILE, AGAIN]), MESSAGES) | ACTS, max_size=12),
    store_backed=st.booleans(),
    end=st.sampled_from([None, B, HOSTILE]),
)
def test_no_message_of_a_hostile_agent_breaks_the_coordinator(said, store_backed, end):
    """The agent may be a stranger to the world, a member of it, or both in turn."""
    desk = running(store_backed)
    for session, message in said:
        desk.say(session, message or join("c"))
    if end is not None:
        desk.hear(Broken(end, "gone", True))
    desk.pass_time(8.0, A)
    desk.pass_time(8.0, A, B, HOSTILE, AGAIN)
    report = desk.machine.report()
    assert report.fence is None or report.fence.round <= ROUND_MAX + 20
    msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ToAgent)


@settings(max_examples=50)
@given(said=st.lists(MESSAGES.filter(lambda m: not isinstance(m, Join)), max_size=20))
def test_messages_of_an_agent_that_never_joined_change_nothing(said):
    desk = running(False)
    before = desk.machine.report()
    for message in said:
        desk.say(HOSTILE, message)
    after = desk.machine.report()
    assert (after.phase, after.fence, after.restarts_used) == (
        before.phase, before.fence, before.restarts_used,
    )  # fmt: skip
    assert not [note for note in desk.told if note.kind == EventKind.INCIDENT]


def test_a_fence_from_the_future_is_refused_and_the_next_round_is_the_next():
    desk = running(False)
    for fence in (Fence(COUNT_MAX, 0), Fence(ROUND_MAX + 1, 0)):
        desk.say(HOSTILE, msgspec.structs.replace(join("x"), seen=fence))
    assert [note.kind for note in desk.told].count(EventKind.NODE_REFUSED) == 2
    desk.say(AGAIN, join("c"))
    desk.pass_time(2.0, A, B, AGAIN)
    assert desk.machine.report().reason.startswith("adding workers of c")


def test_a_size_larger_than_any_machine_is_refused():
    assert LOCAL_WORLD_SIZE_MAX * 10_000 < COUNT_MAX
