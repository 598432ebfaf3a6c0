"""The default log level."""


def get_log_level() -> str:
    """Return the name of the default level."""
    return "WARNING"
