"""The reports of a coordinator to its ElasticJob's operator, and the directives that it reads."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from elastane.errors import StoreError
from elastane.kubernetes import bridge
from elastane.kubernetes.bridge import OperatorBridge, Summary, is_due, read_directive
from elastane.kubernetes.client.errors import unreachable
from elastane.kubernetes.model.observed import Directive, JobReport
from elastane.protocol.messages import AgentPresence, NodeStatus, Report
from elastane.protocol.model import Fence


def known(steps=(3, 4), *, round_=1, incident="", **more):
    nodes = tuple(
        NodeStatus(
            node_id=f"n{i}",
            host="h",
            state="running",
            node_rank=i,
            local_world_size=1,
            heard_s=0.1,
            progress=step,
        )
        for i, step in enumerate(steps)
    )
    return Report(
        job="j",
        phase="running",
        reason="r",
        fence=Fence(round=round_, attempt=0),
        min_nodes=1,
        max_nodes=2,
        world_size=len(steps),
        restarts_used=1,
        max_restarts=3,
        uptime_s=1.0,
        nodes=nodes,
        last_incident=incident,
        **more,
    )


def rolled(**states):
    return [
        AgentPresence(f"{pod}.1", state, rank) for rank, (pod, state) in enumerate(states.items())
    ]


def test_a_report_has_round_world_step_and_members():
    found = Summary(None).update(known(), rolled(a="joined", b="joined"), 1000.0)
    assert (found.round, found.world_size, found.nodes, found.step) == (1, 2, 2, 3)
    assert (found.phase, found.restarts, found.incident) == ("running", 1, "")
    assert [(m.pod, m.state, m.rank) for m in found.members] == [
        ("a", "joined", 0),
        ("b", "joined", 1),
    ]
    wire = msgspec.to_builtins(found)
    assert {"atS", "worldSize", "stepsPerS", "incidentAtS", "members"} <= wire.keys()


def test_the_pace_is_that_of_a_while_within_one_round():
    summary = Summary(None)
    paces = [summary.update(known((10 * i,)), [], 1000.0 + i).steps_per_s for i in range(5)]
    assert paces == [0.0, 0.0, 10.0, 10.0, 10.0]
    assert summary.update(known((60,), round_=2), [], 1005.0).steps_per_s == 0.0
    assert summary.update(known((70,), round_=2), [], 1010.0).steps_per_s == 2.0
    assert summary.update(known((0,), round_=2), [], 1012.0).steps_per_s == 0.0, "steps begin anew"


def test_an_incident_keeps_its_time_and_outlives_its_coordinator():
    summary = Summary(None)
    first = summary.update(known(incident="node b departed"), [], 1000.0)
    again = summary.update(known(incident="node b departed"), [], 1010.0)
    assert first.incident_at_s == again.incident_at_s == 1000.0
    heir = Summary(again).update(known(), [], 1020.0)
    assert (heir.incident, heir.incident_at_s) == ("node b departed", 1000.0)
    assert Summary(again).update(known(incident="other"), [], 1030.0).incident_at_s == 1030.0


def test_a_pod_that_was_here_and_is_not_has_departed_until_it_comes_back():
    summary = Summary(None)
    summary.update(known(), rolled(a="joined", b="joined"), 1000.0)
    states = lambda report: {m.pod: m.state for m in report.members}  # noqa: E731
    gone = summary.update(known((3,)), rolled(a="joined"), 1002.0)
    assert states(gone) == {"a": "joined", "b": "departed"}
    kept = summary.update(known((3,)), rolled(a="joined"), 1004.0)
    assert states(kept) == {"a": "joined", "b": "departed"}
    back = summary.update(known(), rolled(a="joined", b="joined"), 1006.0)
    assert states(back) == {"a": "joined", "b": "joined"}
    for turn in range(200):
        last = summary.update(known(), rolled(**{f"p{turn}": "joined"}), 1100.0 + turn)
    assert len(last.members) == 1 + bridge.DEPARTED_MAX


def test_changes_are_reported_at_once_and_steps_now_and_then():
    told = Summary(None).update(known((3,)), [], 1000.0)
    later = Summary(None).update(known((9,)), [], 1002.0)
    assert not is_due(told, later)
    assert is_due(told, msgspec.structs.replace(later, at_s=1000.0 + bridge.REFRESH_S))
    assert is_due(told, msgspec.structs.replace(later, world_size=4))
    assert is_due(told, msgspec.structs.replace(later, at_s=900.0)), "a clock that was set back"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, Directive()),
        ({"min": "1", "max": "4", "replicas": "2", "fenced": ""}, Directive((1, 4))),
        ({"fenced": "u1  u2\nu3"}, Directive(None, ("u1", "u2", "u3"))),
        ({"dead": "u1\tu2", "fenced": "u3"}, Directive(None, ("u3",), ("u1", "u2"))),
        ({"min": "0", "max": "4"}, Directive()),
        ({"min": "5", "max": "4"}, Directive()),
        ({"min": "x", "max": "4", "fenced": "u"}, Directive(None, ("u",))),
        ({"min": "1", "max": "9" * 400}, Directive()),
    ],
)
def test_a_directive_is_read_as_far_as_it_makes_sense(data, expected):
    assert read_directive(data) == expected


class FakeMailbox:
    """A mailbox with scripted directives and errors."""

    def __init__(self, *directives: Directive | Exception | None) -> None:
        self.directives_left = list(directives)
        self.reports: list[JobReport] = []
        self.is_done = asyncio.Event()

    async def directives(self):
        while self.directives_left:
            directive = self.directives_left.pop(0)
            if isinstance(directive, Exception):
                raise directive
            yield directive
        self._check_done()
        await asyncio.Event().wait()

    async def last_report(self):
        return None

    async def report(self, report):
        self.reports.append(report)
        self._check_done()

    def _check_done(self):
        if self.reports and not self.directives_left:
            self.is_done.set()


class FakeCoordinator:
    """A coordinator that records its orders."""

    def __init__(self) -> None:
        self.orders: list[object] = []

    def fence(self, incarnations, dead):
        self.orders += [incarnations, dead] if dead else [incarnations]

    def resize(self, low, high):
        self.orders.append((low, high))

    def report(self):
        return known()

    def presence(self):
        return rolled(a="joined")


def bridged(*directives):
    """Run a bridge until every directive was read and a report was written."""

    async def run() -> tuple[FakeCoordinator, FakeMailbox]:
        mailbox, coordinator, begun = FakeMailbox(*directives), FakeCoordinator(), asyncio.Event()
        task = asyncio.create_task(OperatorBridge(mailbox).run(coordinator, coordinator, begun))
        async with asyncio.timeout(90):
            await begun.wait()
            await mailbox.is_done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return coordinator, mailbox

    return asyncio.run(run())


def test_a_directive_reaches_the_coordinator_once_and_lets_it_begin():
    one, two = Directive((1, 2), ("u",)), Directive(None, ("u", "v"), ("d",))
    coordinator, mailbox = bridged(one, one, two, None)
    assert coordinator.orders == [("u",), (1, 2), ("u", "v"), ("d",)]
    assert mailbox.reports[0].members[0].pod == "a"


def test_a_coordinator_begins_without_a_directive_too():
    coordinator, _ = bridged(None)
    assert coordinator.orders == []


def test_an_unreachable_api_server_delays_the_coordinator_only_for_a_moment(monkeypatch):
    monkeypatch.setattr(bridge, "FIRST_LOOK_S", 0.1)
    monkeypatch.setattr(bridge, "RETRY_S", 1.0)  # A busy host keeps the order of the two.
    away = unreachable("get configmaps/x", "refused", where="here", sent=False)
    coordinator, _ = bridged(away, Directive((1, 2)))
    assert coordinator.orders == [(), (1, 2)], "and it hears of it once that is back"


def test_a_coordinator_without_the_right_to_the_directive_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(bridge, "FIRST_LOOK_S", 60.0)
    coordinator, _ = bridged(StoreError("forbidden", slug="store-refused"))
    assert coordinator.orders == []
