"""Processes and what connects them: spawning, the zygote, logs, status pages, sessions, files."""
