"""Small checkpoints for tests: written as a snapshot server writes them, in all steps."""

import secrets

from elastane.protocol.checkpoints import About, CheckpointPart, Key, folder_name
from elastane.storage import Repository, open_storage

ABOUT = About("digits", 2, 1763740000.0, {"elastane": "0.1.0", "torch": "2.13.0"}, "step")
FILES = {"__0_0.distcp": b"weights" * 30, "state.msgpack": b"\x81\xa4step\x07", ".metadata": b"m"}


def opened(where):
    return Repository(open_storage(str(where)))


def key_of(step, *, era=0, round=1, attempt=0):
    return Key(era, round, attempt, step)


def write_part(repository, folder, key, number=0, parts=1, *, files=None, about=ABOUT):
    """Write the files of one writer and vouch for them."""
    files = FILES if files is None else files
    records = tuple(
        repository.storage.write(f"{folder}/{name}", [content]) for name, content in files.items()
    )
    nonce = folder.rpartition(".")[2]
    repository.add_part(folder, CheckpointPart(number, parts, records, key, nonce, about))


def save(repository, step, files=None, nonce=None, **fence):
    """Save and publish as one writer; return the folder's name."""
    key = key_of(step, **fence)
    folder = folder_name(key, nonce or secrets.token_hex(4))
    write_part(repository, folder, key, files=files)
    # The parts of one writer are there at the first look, unless another removes them.
    repository.publish_when_whole(folder, 1, wait_s=0)
    return folder


def begin(repository, step, files=None, nonce=None, **fence):
    """Write the files of a save that does not end; return the folder's name."""
    folder = folder_name(key_of(step, **fence), nonce or secrets.token_hex(4))
    for name, content in (FILES if files is None else files).items():
        repository.storage.write(f"{folder}/{name}", [content])
    return folder


def steps(repository):
    """The steps of what is published, newest first."""
    return [found.key.step for found in repository.published()]
