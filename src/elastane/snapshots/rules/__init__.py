"""Which snapshots and replicas a snapshot server keeps, moves and drops. Pure."""
