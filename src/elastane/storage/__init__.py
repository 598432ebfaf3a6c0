"""Where checkpoints are kept: folders and object stores, what is in them, what of it is valid."""

from elastane.storage.places import open_storage
from elastane.storage.protocol import Progress, Stop, Storage
from elastane.storage.repository import Choice, Found, Repository

__all__ = ["Choice", "Found", "Progress", "Repository", "Stop", "Storage", "open_storage"]
