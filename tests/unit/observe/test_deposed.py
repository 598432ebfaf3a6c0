"""What a coordinator says that is cut off and deposed is not shown as what happened to the job."""

from msgspec.structs import replace
from view_events import event, play, settled, started

from elastane.observe.deposed import HELD_S, Decided, decided
from elastane.observe.story import story_of

AWAY = "did not come back to the new coordinator within the time"


def said(host, kind, node, time_s, reason="because", **more):
    """Return an event of the coordinator on `host`."""
    fence = {"round": 1, "attempt": 0} | more
    return replace(
        event(kind, node, reason, time_s=time_s, **fence), host=host, source="coordinator"
    )


BEGUN = [
    said("a", "coordinator-started", "a", 1.0),
    replace(settled(1, "a b c", 3, time_s=2.0), host="a", source="coordinator"),
    *(started(node, 1, round=1, attempt=0, time_s=3.0) for node in "abc"),
]
# As the hosts of a real job logged it, whose coordinator on `a` was cut off at 10 s.
CUT = [
    said("a", "authority-lost", "a", 11.7, "the store is silent"),
    said("a", "node-departed", "b", 12.3, "silent for 3.0 s"),
    said("c", "coordinator-started", "c", 12.4),
    said("c", "node-registered-again", "c", 12.5),
    said("a", "node-departed", "c", 12.8, "silent for 3.0 s"),
    said("a", "incident", "a", 12.8, "node c departed: silent for 3.0 s"),
    said("c", "node-registered-again", "b", 13.2),
    said("c", "node-departed", "a", 13.6, f"it {AWAY}"),
    said("c", "incident", "c", 13.6, f"node a {AWAY}", departed=1),
    replace(settled(2, "b c", 2, time_s=13.7), host="c", source="coordinator"),
    *(started(node, 1, round=2, attempt=0, time_s=13.8) for node in "bc"),
]


def test_the_side_that_leads_is_shown_and_not_what_the_side_that_was_cut_off_says():
    view = play(*decided([*BEGUN, *CUT]))
    assert {node.name: node.state for node in view.nodes.values()} == {
        "a": "gone", "b": "training", "c": "training"
    }  # fmt: skip
    store, lost = view.incidents.listed
    assert (store.kind, store.state, store.to_s) == ("authority", "recovered", 12.4)
    assert (lost.title, lost.node, lost.state) == ("Node a was lost", "a", "recovered")
    story = story_of("job", "", decided([*BEGUN, *CUT]))
    assert [line.strip() for line in story.departures] == [f"a: it {AWAY}"]
    assert story.attempts[0].ended_because == f"node a {AWAY}"


def test_a_coordinator_that_led_alone_is_believed_once_that_is_known():
    """The store was away, for it and for all."""
    departed = said("a", "node-departed", "b", 14.0, "silent for 3.0 s")
    lost, regained = (
        said("a", "authority-lost", "a", 11.0),
        said("a", "authority-regained", "a", 15.0),
    )
    assert [*decided([*BEGUN, lost, departed, regained])] == [*BEGUN, lost, departed, regained]
    count = said("a", "progress", "a", 14.0 + HELD_S)
    assert [*decided([*BEGUN, lost, departed, count])] == [*BEGUN, lost, departed, count]
    assert [*decided([*BEGUN, lost, departed])] == [*BEGUN, lost, departed]
    live = Decided(lambda one: one)
    assert [one for each in [*BEGUN, lost, departed] for one in live.take(each)] == [*BEGUN, lost]
    assert live.due(14.0 + HELD_S - 0.1) == []
    assert live.due(14.0 + HELD_S) == [departed]


def test_a_coordinator_that_notices_late_that_it_was_deposed_is_not_believed():
    """It was stopped for as long as its successor needed."""
    led = said("c", "coordinator-started", "c", 12.0)
    lost = said("a", "authority-lost", "a", 20.0)
    claim = said("a", "node-departed", "c", 20.1)
    assert [*decided([*BEGUN, led, lost, claim])] == [*BEGUN, led]
    again = said("a", "coordinator-started", "a", 30.0)
    claim = said("a", "node-departed", "c", 31.0)
    assert [*decided([*BEGUN, led, lost, again, claim])] == [*BEGUN, led, again, claim]


def test_events_of_agents_and_of_jobs_without_a_fault_pass():
    own = event("workers-stopping", "a", time_s=12.9)
    assert own in [*decided([*BEGUN, *CUT, own])]
    assert [*decided(BEGUN)] == BEGUN
