"""Integrations with other launchers and frameworks; each module imports the one it is named for."""
