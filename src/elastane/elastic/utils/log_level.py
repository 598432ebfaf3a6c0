"""The level of logs that nobody has set."""


def get_log_level() -> str:
    """Return the name of the default level."""
    return "WARNING"
