"""Helpers of launchers and workers: torch's own, except for `data` and `process_state`."""

from torch.distributed.elastic.utils.api import (
    get_env_variable_or_raise,
    get_socket_with_port,
    macros,
)

from elastane.elastic import use_torchs

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
use_torchs(__name__, "api", "distributed", "log_level", "logging", "store")
