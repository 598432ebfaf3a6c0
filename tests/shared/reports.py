"""A coordinator's report of a job in which nothing happens."""

from elastane.protocol.messages import Report


def report_of(job):
    return Report(
        job=job,
        phase="running",
        reason="all is well",
        fence=None,
        min_nodes=1,
        max_nodes=1,
        world_size=1,
        restarts_used=0,
        max_restarts=0,
        uptime_s=1.0,
        nodes=(),
    )
