"""Where checkpoints are kept: folders and object stores, what is in them, what of it is valid."""

from elastane.storage.places import open_storage
from elastane.storage.protocol import Progress, Stop, Storage
from elastane.storage.repository import FoundCheckpoint, Repository, RestorePoint

__all__ = [
    "FoundCheckpoint",
    "Progress",
    "Repository",
    "RestorePoint",
    "Stop",
    "Storage",
    "open_storage",
]
