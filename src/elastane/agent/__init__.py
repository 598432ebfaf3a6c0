"""The agent of one node: `rules` decides, and the other modules carry out its effects.

The agent starts, watches and stops the local workers, keeps the connection to the coordinator, and
runs the coordinator while it holds the leadership. `shell` decides nothing: it passes every event
to `rules.AgentCore` and carries out every effect that comes back. A worker's death takes this way:
`workers` sees the process end, `failure_reports` says why, `rules` decides, and `link` sends the
report to the coordinator.

Other rooms use `main.launch` (`elastane run`), `ending.show`, and `membership` for programs that
run their workers themselves. `simulation` drives `rules.AgentCore` in virtual time.
"""
