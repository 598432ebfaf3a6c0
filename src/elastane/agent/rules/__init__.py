"""The decisions of an agent, pure: a coordinator that comes and goes, the local worker group."""
