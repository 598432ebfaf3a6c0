"""The agent of one node: `rules` decides, and the other modules carry out its effects.

The agent starts, watches and stops the local workers, keeps the connection to the coordinator, and
runs the coordinator while it holds the leadership. The shell decides nothing: it passes every event
to `rules.agent.AgentCore` and carries out every effect that comes back. `elastane run` and
`elastane.functions` start workers through `main`; `membership` serves programs that run their
workers themselves.
"""
