"""The step rate of a node, from its heartbeats."""

import pytest
from coordinator_driver import Driver

from elastane.coordinator.rules.nodes import StepPace
from elastane.protocol.messages import Heartbeat


def test_the_step_rate_uses_the_latest_counts():
    pace = StepPace()
    assert pace.steps_per_s(0.0) is None
    for second in range(100):
        pace.note(float(second), 5 * second)
    assert pace.steps_per_s(99.0) == 5.0
    for second in range(1, 41):
        pace.note(99.0 + second, 495 + second)
    assert pace.steps_per_s(139.0) == 1.0, "what was half a minute before does not count"


def test_a_restarted_count_forgets_the_old_rate():
    pace = StepPace()
    for second, steps in enumerate((10, 20, 3)):
        pace.note(float(second), steps)
    assert pace.steps_per_s(2.0) is None
    pace.note(3.0, 4)
    assert pace.steps_per_s(3.0) == 1.0
    pace.note(4.0, None)
    assert pace.steps_per_s(4.0) is None


def test_the_rate_of_a_node_without_steps_falls():
    pace = StepPace()
    for second in range(3):
        pace.note(float(second), second)
    assert pace.steps_per_s(2.5) == 1.0
    assert pace.steps_per_s(20.0) == pytest.approx(0.1)


def test_status_has_the_rate_of_each_node():
    job = Driver()
    for node_id in "ab":
        job.join(node_id)
    for beat in range(4):
        job.now_s += 1.0
        job.says("a", Heartbeat(progress=2 * beat))
        job.says("b", Heartbeat())
    found = {node.node_id: node.steps_per_s for node in job.machine.report().nodes}
    assert found == {"a": 2.0, "b": None}


def test_the_event_log_gets_the_least_count_of_all_nodes_every_ten_seconds():
    job = Driver()
    for node_id in "ab":
        job.join(node_id)
    for beat in range(25):
        job.now_s += 1.0
        job.says("a", Heartbeat(progress=2 * beat))
        job.says("b", Heartbeat(progress=beat if beat < 15 else 14))
    made = [event.data["steps"] for event in job.events if event.kind == "progress"]
    assert made == [0, 9, 14], "the last is the fourteenth step: nothing moved after it"


def test_a_node_that_reports_no_steps_leaves_the_progress_of_the_job_unknown():
    job = Driver()
    for node_id in "ab":
        job.join(node_id)
    job.says("a", Heartbeat(progress=7))
    job.says("b", Heartbeat())
    assert not [event for event in job.events if event.kind == "progress"]
