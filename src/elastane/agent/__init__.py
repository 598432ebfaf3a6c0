"""The agent of one node: the shell around `agent.rules.agent`.

It starts, watches and stops the local worker group, keeps the connection to the coordinator,
and decides nothing: every event goes to the core, every effect comes from it.
"""
