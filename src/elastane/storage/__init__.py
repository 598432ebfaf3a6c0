"""Storage of checkpoints: folders and object stores, their contents, and which of it is valid.

`open_storage` opens a place, and `Repository` publishes, finds, verifies and removes checkpoints
there. `retention` and `publishing` hold the rules of removal and of the commit. Other rooms import
from here, and from `digest` and `errors`.
"""

from elastane.storage.places import open_storage
from elastane.storage.protocol import Storage
from elastane.storage.repository import FoundCheckpoint, Repository

__all__ = [
    "FoundCheckpoint",
    "Repository",
    "Storage",
    "open_storage",
]
