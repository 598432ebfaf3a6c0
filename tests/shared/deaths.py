"""Deaths at numbered places of a simulated cluster: whatever runs on the host is killed there."""


def die_at(cluster, numbers, back_s):
    """Kill at these steps, with a new agent `back_s` later; return the list of those passed."""
    passed = []

    def on_step(host, step):
        passed.append((host, step))
        if len(passed) - 1 not in numbers:
            return False
        cluster.upset = True
        cluster.crash(host, f"dies where it is {step.value!r}, step {len(passed) - 1}")
        cluster.clock.after(back_s, lambda: come_back(cluster, cluster.nodes[host]))
        return True

    cluster.on_step = on_step
    return passed


def come_back(cluster, node):
    if not node.alive and cluster.checks.outcome is None:
        cluster.boot(node)
