"""Child processes that run a command."""

from elastane.elastic.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from elastane.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
