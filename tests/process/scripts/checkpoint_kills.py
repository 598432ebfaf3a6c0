"""Kills a process that saves checkpoints, over and over, and looks each time at what is left.

    checkpoint_kills.py FOLDER KILLS SEED

The saver is a fork of this process, which has one thread. After each kill the newest valid
checkpoint must be the last that was published for the saver, or a later one; and the next saver
must be able to continue. Prints a line of JSON: kills, and in what state saves were found.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter

from elastane.protocol.checkpoints import About, CheckpointPart, Key, folder_name
from elastane.storage import Repository, open_storage

ABOUT = About("kills", 1, 0.0, {}, "step")
DATA = os.urandom(1_500_000)


def save(repository, step):
    key = Key(0, 1, 0, step)
    nonce = os.urandom(4).hex()
    folder = folder_name(key, nonce)
    write = repository.storage.write
    records = (
        write(f"{folder}/__0_0.distcp", [DATA, b"%d" % step]),
        write(f"{folder}/state.msgpack", [b"%d" % step]),
    )
    repository.add_part(folder, CheckpointPart(0, 1, records, key, nonce, ABOUT))
    repository.publish_when_whole(folder, 1, wait_s=60)


def saver(where, first, told):
    """Save in an endless loop; report each step once it is published."""
    repository = Repository(open_storage(where))
    for step in range(first, 1 << 30):
        save(repository, step)
        os.write(told, b"%d\n" % step)
        repository.prune(2)


def killed_once(where, first, moment_s):
    """Kill a saver some time after its first checkpoint; return the last step that it reported."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            saver(where, first, tell)
        finally:
            os._exit(1)
    os.close(tell)
    heard = os.read(told, 100)
    time.sleep(moment_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    while piece := os.read(told, 1 << 16):
        heard += piece
    os.close(told)
    return int(heard.split()[-1])


def main():
    where, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dice, states, step = random.Random(seed), Counter(), 0
    for _ in range(kills):
        last = killed_once(where, step + 1, dice.uniform(0, 0.03))
        repository = Repository(open_storage(where))
        choice = repository.newest_valid()
        assert choice.found is not None and not choice.skipped, choice
        step = choice.found.key.step
        assert last <= step <= last + 1, (last, step)
        content = repository.storage.read(f"{choice.found.folder}/__0_0.distcp")
        assert content == DATA + b"%d" % step
        for folder in repository.unfinished():
            names = repository.storage.names(folder)
            states["vouched for" if any("part" in name for name in names) else "begun"] += 1
            repository.storage.remove(folder)
        states["told" if step == last else "published"] += 1
    print(json.dumps({"kills": kills, **states}))


if __name__ == "__main__":
    main()
