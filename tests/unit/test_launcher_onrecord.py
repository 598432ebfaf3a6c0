"""An agent that missed the end of its job ends with the recorded outcome."""

import asyncio

from elastane.agent.main import recorded_exit
from elastane.errors import ExitCode, StoreError
from elastane.protocol.effects import Exit
from elastane.protocol.model import JobRecord, JobSpec, Outcome

CLOSED = Exit(
    int(ExitCode.CONFIGURATION),
    "closed: job letters has ended",
    Outcome(ok=False, reason="closed", slug="rdzv-closed", exit_code=ExitCode.CONFIGURATION),
)
SUCCESS = Outcome(ok=True, reason="all 4 workers of round 1 attempt 0 succeeded")


class Keys:
    def __init__(self, outcome=SUCCESS, fails=False):
        self.outcome, self.fails = outcome, fails

    async def load(self):
        if self.fails:
            raise StoreError("away", slug="store-unreachable")
        spec = JobSpec(job="letters", min_nodes=2, max_nodes=2, max_restarts=0)
        return JobRecord(spec=spec, outcome=self.outcome)


def judged(exit_=CLOSED, keys=None, was_welcomed=True):
    return asyncio.run(recorded_exit(exit_, keys or Keys(), was_welcomed=was_welcomed))


def test_an_agent_of_an_ended_job_exits_with_the_recorded_outcome():
    assert judged() == Exit(0, SUCCESS.reason, SUCCESS)


def test_a_new_node_of_an_ended_job_is_refused():
    assert judged(was_welcomed=False) is CLOSED


def test_any_other_exit_stays_unchanged():
    other = Exit(75, "no coordinator", None)
    assert judged(other) is other
    assert judged(keys=Keys(outcome=None)) is CLOSED
    assert judged(keys=Keys(fails=True)) is CLOSED
    assert asyncio.run(recorded_exit(CLOSED, None, was_welcomed=True)) is CLOSED
