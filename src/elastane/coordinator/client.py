"""The client of `elastane status`: one question, one answer.

It does not retry; the caller decides whether to ask again.
"""

from __future__ import annotations

import asyncio

from elastane.errors import MembershipError, RendezvousRefusedError
from elastane.process.rpc import connect
from elastane.process.tls import TlsConfig
from elastane.protocol.messages import Query, Refused, Report


async def query(
    host: str,
    port: int,
    job: str,
    secret: bytes,
    tls: TlsConfig | None = None,
    timeout_s: float = 5.0,
) -> Report:
    """Return the coordinator's report of the job.

    Raises as `connect` does; MembershipError without an answer within `timeout_s`;
    RendezvousRefusedError if the coordinator refuses the question.
    """
    session = await connect(host, port, job, secret, tls, timeout_s)
    try:
        session.send(Query())
        async with asyncio.timeout(timeout_s):
            answer = await session.receive()
    except TimeoutError as error:
        raise _no_answer(f"{host}:{port} did not answer within {timeout_s:g} s") from error
    finally:
        session.close("asked")
    match answer:
        case Report():
            return answer
        case Refused(what=what, slug=slug, expected=expected, next_step=next_step):
            raise RendezvousRefusedError(what, slug=slug, expected=expected, next_step=next_step)
        case None:
            raise _no_answer(f"{host}:{port} closed the session: {session.reason}")
        case _:
            raise _no_answer(f"{host}:{port} answered with a {type(answer).__name__}")


def _no_answer(what: str) -> MembershipError:
    return MembershipError(
        what,
        slug="status-unanswered",
        expected="a report of the job",
        next_step="ask again; the job may be ending or changing its coordinator",
    )
