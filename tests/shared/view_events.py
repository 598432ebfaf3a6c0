"""Logged events as the tests of the view and of incidents make them."""

from elastane.observe.events import LoggedEvent
from elastane.observe.view import JobView, after_event
from elastane.protocol.log_events import EventKind


def event(kind: str, node: str = "node-a", reason: str = "because", **data) -> LoggedEvent:
    return LoggedEvent(
        time="",
        time_s=data.pop("time_s", 100.0),
        mono_s=0.0,
        seq=0,
        job="demo",
        kind=kind,
        reason=reason,
        node=node,
        host="h",
        pid=1,
        round=data.pop("round", None),
        attempt=data.pop("attempt", None),
        data=data,
    )


def play(*events: LoggedEvent) -> JobView:
    view = JobView()
    for one in events:
        view = after_event(view, one)
    return view


def started(node: str, *pids: int, **more) -> LoggedEvent:
    return event(EventKind.WORKERS_STARTED, node, pids=str(tuple(pids)), **more)


def settled(round_: int, members: str, size: int, **more) -> LoggedEvent:
    return event(
        EventKind.ROUND_SETTLED, round=round_, attempt=0, members=members, world_size=size, **more
    )


def exited(rank: int, **more) -> LoggedEvent:
    data = {"node": "a", "exit_code": -9, "attempt": 0, "reason": "SIGKILL (from outside)", **more}
    return event(EventKind.WORKER_EXITED, rank=rank, local_rank=rank, pid=100 + rank, **data)
