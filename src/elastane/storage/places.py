"""Opens a place for checkpoints from the user's text: a folder's path, or a URL."""

from __future__ import annotations

from pathlib import Path

from elastane.storage.folder import FolderStorage
from elastane.storage.protocol import Storage


def open_storage(where: str) -> Storage:
    """Open the place that `where` names: a path, file://, or any URL that fsspec knows.

    It reads and creates nothing. Raises ConfigurationError for a URL that cannot be opened.
    """
    scheme, mark, rest = where.partition("://")
    if not mark:
        return FolderStorage(Path(where).expanduser().absolute())
    if scheme in ("file", "local"):
        return FolderStorage(Path("/" + rest.lstrip("/")))
    from elastane.storage.objects import open_objects

    return open_objects(where)
