"""The time of each failure of an incident, on the coordinator's one time line."""

from elastane.coordinator.rules.incident import Incident
from elastane.protocol.model import Failure


def failed(rank, age_s):
    return Failure(rank=rank, local_rank=rank, pid=100 + rank, exit_code=1, age_s=age_s)


def order(incident):
    return [one.failure.rank for one in sorted(incident.sightings, key=lambda one: one.at_s)]


def test_a_slow_report_does_not_move_a_first_failure_behind_a_second():
    """Rank 1 failed 1.5 ms before rank 3, and its report took 10 ms."""
    incident = Incident(at_s=10.0, reason="", planned=False)
    incident.record("n", (failed(3, 0.0005),), 10.0)
    incident.record("n", (failed(3, 0.001), failed(1, 0.0025)), 10.010)
    assert order(incident) == [1, 3]


def test_a_faster_report_moves_failures_of_slower_ones_back():
    incident = Incident(at_s=10.0, reason="", planned=False)
    incident.record("n", (failed(3, 0.0),), 10.050)
    incident.record("n", (failed(3, 0.055), failed(1, 0.056)), 10.051)
    assert order(incident) == [1, 3]
    assert all(one.at_s < 10.0 for one in incident.sightings)


def test_reports_of_other_nodes_do_not_count():
    incident = Incident(at_s=10.0, reason="", planned=False)
    incident.record("n", (failed(0, 0.0),), 10.0)
    incident.record("m", (failed(1, 0.5),), 10.2)
    assert order(incident) == [1, 0]
