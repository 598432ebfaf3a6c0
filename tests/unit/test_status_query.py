"""How `elastane status` handles a coordinator's answer."""

import asyncio

import pytest
from reports import report_of

from elastane.coordinator import client
from elastane.errors import ExitCode, MembershipError, RendezvousRefusedError
from elastane.protocol.messages import Query, Refused


class Session:
    """A coordinator's session that answers with one message, or never."""

    reason = "the job has ended"

    def __init__(self, answer, ever=True):
        self.answer, self.ever = answer, ever
        self.sent, self.closed = [], []

    def send(self, message):
        self.sent.append(message)

    async def receive(self):
        if not self.ever:
            await asyncio.Event().wait()
        return self.answer

    def close(self, reason):
        self.closed.append(reason)


def ask(monkeypatch, session, timeout_s=30.0):
    async def connect(*_):
        return session

    monkeypatch.setattr(client, "connect", connect)
    return asyncio.run(client.query("10.0.0.1", 29400, "job", b"secret", timeout_s=timeout_s))


def refused(monkeypatch, session, timeout_s=30.0):
    with pytest.raises(MembershipError) as caught:
        ask(monkeypatch, session, timeout_s)
    assert session.sent == [Query()]
    assert session.closed, "the coordinator holds no session for nobody"
    return caught.value


def test_the_report_is_the_coordinators_answer(monkeypatch):
    report = report_of("job")
    session = Session(report)
    assert ask(monkeypatch, session) is report
    assert session.sent == [Query()]
    assert session.closed == ["asked"]


def test_a_refusal_keeps_the_coordinators_message(monkeypatch):
    answer = Refused(what="another job", slug="wrong-job", expected="job b", next_step="name it")
    error = refused(monkeypatch, Session(answer))
    assert isinstance(error, RendezvousRefusedError)
    assert (error.what, error.slug, error.expected) == ("another job", "wrong-job", "job b")
    assert error.exit_code == ExitCode.CONFIGURATION


def test_a_closed_session_is_reported_with_its_reason(monkeypatch):
    error = refused(monkeypatch, Session(None))
    assert error.slug == "status-unanswered"
    assert error.what == "10.0.0.1:29400 closed the session: the job has ended"


def test_a_silent_coordinator_times_out(monkeypatch):
    error = refused(monkeypatch, Session(None, ever=False), timeout_s=0.01)
    assert error.slug == "status-unanswered"
    assert error.what == "10.0.0.1:29400 did not answer within 0.01 s"


def test_any_other_message_is_not_an_answer(monkeypatch):
    error = refused(monkeypatch, Session(Query()))
    assert error.slug == "status-unanswered"
    assert error.what == "10.0.0.1:29400 answered with a Query"
