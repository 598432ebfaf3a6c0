"""Loaders with worker processes under a Feed. It runs as a program, since it forks.

Runs every scenario and prints the results as JSON by name. It judges nothing: the tests
that read it do.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from virtual_scenarios import virtual_files, virtual_index

from elastane.data.feed import Feed
from elastane.data.sampler import ElasticBatchSampler
from elastane.data.shards import ElasticShards

N, BATCH = 97, 10
# Worker processes that are spawned import this anew, and find the folder of the first.
if "FEED_FLAGS" not in os.environ:
    os.environ["FEED_FLAGS"] = tempfile.mkdtemp(prefix="feed-")
FLAGS = Path(os.environ["FEED_FLAGS"])
# How often torch looks for dead workers while it waits for one; 5 s if not set.
TORCH_LOOKS_S = 60.0


def read_slowly():
    """Note that a sample is being read, which lasts while the gate is shut."""
    with (FLAGS / "reads").open("ab", buffering=0) as reads:
        reads.write(b".")
    while (FLAGS / "shut").exists():
        time.sleep(0.001)


def count_reads():
    """Return the number of samples whose reading has begun, of those that note it."""
    return (FLAGS / "reads").stat().st_size if (FLAGS / "reads").exists() else 0


class Numbers(Dataset):
    """Sample i is (i, the worker's pid, a random number); it may be slow, stuck or broken.

    `before` is called with i before the sample is made.
    """

    def __init__(self, before):
        self.before = before

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.before(index)
        while (FLAGS / "hang").exists():
            time.sleep(0.01)
        if (FLAGS / "broken").exists():
            raise ValueError(f"sample {index} is broken")
        return index, os.getpid(), random.getrandbits(30)


def make(before=lambda index: None, batches=None, **loader):
    sampler = batches or ElasticBatchSampler(N, BATCH, seed=3)
    options = {"num_workers": 2, "prefetch_factor": 3, **loader}
    return Feed(DataLoader(Numbers(before), batch_sampler=sampler, **options))


def indices(portion):
    return portion.batch[0].tolist()


def workers():
    """Return the pids of all loader workers of this process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid() and state != "Z" and "pt_data_worker" in name:
            found.append(int(stat.parent.name))
    return sorted(found)


def current(feed):
    """Return the pids of the workers of the feed's current iterator."""
    return [worker.pid for worker in feed._batches._workers]


def wait_gone(pids, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while set(pids) & set(workers()) and time.monotonic() < end:
        time.sleep(0.01)
    return not set(pids) & set(workers())


def only_current(feed, deadline_s=60.0):
    """Wait until the present iterator's workers are the only ones; return how many there are.

    A worker that has just been forked has not named itself yet, and is no worker to workers().
    """
    end = time.monotonic() + deadline_s
    while workers() != sorted(current(feed)) and time.monotonic() < end:
        time.sleep(0.01)
    return len(workers())


def rewound_to_another_world(persistent):
    with make(persistent_workers=persistent) as feed:
        first = [next(feed) for _ in range(3)]
        feed.commit(0)
        feed.commit(1)
        pids = workers()
        feed.rewind(1, 2)
        again = next(feed)
        return {
            "steps": [p.step for p in first],
            "again": [again.step, again.samples, again.weight, indices(again)],
            "was": indices(first[2]),
            "same_workers": workers() == pids,
            "gone": wait_gone(pids) if not persistent else None,
        }


def many_rewinds(persistent):
    """The world changes at random: what was committed, and the workers at each time.

    With persistent workers for two epochs. Otherwise for one, since each rewind starts two workers.
    """
    rng, committed, pids, epochs = random.Random(5), [], set(), 2 if persistent else 1
    with make(persistent_workers=persistent) as feed:
        while feed.cursor.epoch < epochs:
            world = rng.randint(1, 3)
            of_step = []
            for rank in range(world):  # one process plays the ranks in turn
                feed.rewind(rank, world)
                portion = next(feed)
                of_step += indices(portion) if portion.samples else []
            pids |= set(workers())
            if rng.random() < 0.7:
                committed.append((portion.share.epoch, of_step))
                feed.commit(portion.step)
        at_end = only_current(feed)
    used = [sorted(i for e, step in committed if e == n for i in step) for n in range(epochs)]
    return {
        "once": [epoch == list(range(N)) for epoch in used],
        "pids": len(pids),
        "at_end": at_end,
        "left": workers(),
    }


def whole_epochs(persistent):
    """`for` over two epochs and a third that is broken off, as a plain script has it."""
    seen, pids = [], []
    with make(persistent_workers=persistent) as feed:
        for _ in range(2):
            seen.append([])
            for portion in feed:
                seen[-1] += indices(portion)
                feed.commit(portion.step)
                pids.append(portion.batch[1][0].item())
        try:
            with feed:
                next(iter(feed))
                raise KeyError("the script")
        except KeyError:
            left = workers()
    once = [sorted(epoch) == list(range(N)) for epoch in seen]
    return {"once": once, "differ": seen[0] != seen[1], "pids": len(set(pids)), "left": left}


def killed_worker(persistent):
    with make(lambda index: time.sleep(0.002), persistent_workers=persistent) as feed:
        feed.commit(next(feed).step)
        old = workers()
        raised = ""
        # torch's handler of SIGCHLD raises once for each dead worker, wherever we are by then:
        # also after the error of a batch that the worker did not send whole.
        try:
            try:
                os.kill(old[0], signal.SIGKILL)
                while True:
                    next(feed)
            except (OSError, EOFError, RuntimeError) as error:
                raised = str(error)
            with contextlib.suppress(ChildProcessError):  # the loader has reaped it
                os.waitid(os.P_PID, old[0], os.WEXITED | os.WNOWAIT)
            torch._C._error_if_any_worker_fails()  # unless the handler did
        except RuntimeError as error:
            raised = str(error)
        feed.rewind()
        again = next(feed)
        return {"raised": raised, "step": again.step, "alive": len(set(workers()) - set(old))}


def killed_worker_unseen():
    """Kill a worker while no data is requested, and rewind; its last results were received."""
    torchs_look = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    defaults, torchs_look.__defaults__ = torchs_look.__defaults__, (TORCH_LOOKS_S,)
    try:
        with slow_after_first_step(persistent_workers=True) as feed:
            shut_gate(feed)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises in this very loop
            victim = workers()[0]
            feed.rewind()
            os.kill(victim, signal.SIGKILL)
            os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
            (FLAGS / "shut").unlink()
            begun = time.monotonic()
            step = next(feed).step
            return {"step": step, "first": time.monotonic() - begun < TORCH_LOOKS_S}
    finally:
        torchs_look.__defaults__ = defaults


def broken_sample():
    with make(persistent_workers=True) as feed:
        feed.commit(next(feed).step)
        feed.rewind()
        (FLAGS / "broken").touch()
        try:
            next(feed)
            raised = ""
        except ValueError as error:
            raised = str(error)
        (FLAGS / "broken").unlink()
        feed.rewind()
        return {"raised": raised, "step": next(feed).step}


def slow_loader(persistent):
    """Rewind while each worker reads a slow sample of a later step."""
    with slow_after_first_step(persistent_workers=persistent) as feed:
        return rewound_in_the_middle(feed, 5)


def slow_after_first_step(**loader):
    """Return a feed whose samples of later steps are slow."""
    first = set(next(iter(ElasticBatchSampler(N, BATCH, seed=3))))
    return make(lambda index: index in first or read_slowly(), **loader)


def shut_gate(feed):
    """Commit the first step, while both workers begin a sample that lasts until the gate opens."""
    (FLAGS / "reads").unlink(missing_ok=True)
    (FLAGS / "shut").touch()
    feed.commit(next(feed).step)
    while count_reads() < 2:
        time.sleep(0.001)


def rewound_in_the_middle(feed, world):
    """Rewind into a world while both workers read a sample that ends after the rewind."""
    shut_gate(feed)
    opens = threading.Timer(100.0, (FLAGS / "shut").unlink)
    opens.start()
    feed.rewind(0, world)
    waited = not (FLAGS / "shut").exists()
    opens.cancel()
    (FLAGS / "shut").unlink(missing_ok=True)
    samples = next(feed).samples
    return {"waited": waited, "reads": count_reads(), "samples": samples}


def slow_shards():
    """Rewind while workers read the middle of a batch of shards."""
    data = ElasticShards([(0, 400)], open_slowly, 40, lanes=1)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    with Feed(loader) as feed:
        return rewound_in_the_middle(feed, 20)


def hung_worker():
    with make(persistent_workers=True) as feed:
        feed.commit(next(feed).step)
        feed.rewind()
        next(feed)
        (FLAGS / "hang").touch()
        hung = workers()
        feed.rewind(restart_workers=True)
        (FLAGS / "hang").rename(FLAGS / "was-hung")  # the new ones are not to hang
        step = next(feed).step
        return {"step": step, "fresh": not set(hung) & set(workers()) or wait_gone(hung)}


def random_streams():
    torch.manual_seed(11)
    before, drawn = torch.get_rng_state(), []
    with make() as feed:
        for rank in (0, 1, 0):
            feed.rewind(rank, 2)
            drawn.append(next(feed).batch[2].tolist())
    own = torch.Generator().manual_seed(5)
    expected = torch.empty((), dtype=torch.int64).random_(generator=own).item()
    own.manual_seed(5)
    with make(generator=own, worker_init_fn=note_seed) as feed:
        next(feed)
    noted = int((FLAGS / "seed-0").read_text())
    return {
        "untouched": torch.equal(before, torch.get_rng_state()),
        "repeatable": drawn[0] == drawn[2],
        "ranks_differ": drawn[0] != drawn[1],
        "own_generator": noted == expected,
    }


def note_seed(worker):
    (FLAGS / f"seed-{worker}").write_text(str(torch.initial_seed()))


def open_numbers(shard, start):
    return iter(range(shard * 1_000 + start, shard * 1_000 + LENGTHS[shard]))


def open_slowly(shard, start):
    is_first = (FLAGS / "shut").exists()  # It is opened before the rewind.
    for number in range(start, 400):
        if is_first and number >= 40:  # after the first step
            read_slowly()
        yield number


LENGTHS = [11, 0, 23, 5, 40, 1, 17]


def shards(workers_, epochs=2, persistent=False, context=None):
    """Epochs with a world that changes."""
    rng, committed = random.Random(workers_), []
    data = ElasticShards(list(enumerate(LENGTHS)), open_numbers, BATCH, seed=2, lanes=4)
    data.accumulate(2)
    options = {"num_workers": workers_, "multiprocessing_context": context}
    loader = DataLoader(
        data, batch_size=None, collate_fn=default_collate, persistent_workers=persistent, **options
    )
    with Feed(loader) as feed:
        while data.epoch < epochs:
            world, of_step = rng.randint(1, 3), []
            for rank in range(world):
                feed.rewind(rank, world)
                portions = [next(feed) for _ in range(2)]
                of_step += [i for p in portions if p.samples for i in p.batch.tolist()]
            if rng.random() < 0.7:
                committed.append((portions[0].share.epoch, of_step))
                feed.commit(portions[0].step)
    every = sorted(s * 1_000 + i for s, long in enumerate(LENGTHS) for i in range(long))
    used = [sorted(i for e, step in committed if e == n for i in step) for n in range(epochs)]
    return {"once": [epoch == every for epoch in used], "left": workers()}


def plain_persistent_shards():
    """Iterate without a feed: repeating an epoch is an error, a named epoch is not."""
    data = ElasticShards(list(enumerate(LENGTHS)), open_numbers, BATCH, lanes=4)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    count = sum(len(batch) for batch in loader)
    try:
        sum(len(batch) for batch in loader)
        raised = ""
    except Exception as error:
        raised = str(error)
    return {"count": count, "raised": raised}


def plain_named_epochs():
    data = ElasticShards(list(enumerate(LENGTHS)), open_numbers, BATCH, lanes=4)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        data.set_epoch(epoch)
        epochs.append([int(i) for batch in loader for i in batch])
    return {
        "once": all(len(set(epoch)) == sum(LENGTHS) for epoch in epochs),
        "differ": epochs[0] != epochs[1] != epochs[2],
    }


SCENARIOS = {
    "rewound": lambda: rewound_to_another_world(persistent=False),
    "rewound-persistent": lambda: rewound_to_another_world(persistent=True),
    "many": lambda: many_rewinds(persistent=False),
    "many-persistent": lambda: many_rewinds(persistent=True),
    "epochs": lambda: whole_epochs(persistent=False),
    "epochs-persistent": lambda: whole_epochs(persistent=True),
    "killed": lambda: killed_worker(persistent=False),
    "killed-persistent": lambda: killed_worker(persistent=True),
    "killed-unseen": killed_worker_unseen,
    "broken": broken_sample,
    "slow": lambda: slow_loader(persistent=False),
    "slow-persistent": lambda: slow_loader(persistent=True),
    "slow-shards": slow_shards,
    "hung": hung_worker,
    "random": random_streams,
    "shards-0": lambda: shards(0),
    "shards-3": lambda: shards(3, epochs=1),
    "shards-2-persistent": lambda: shards(2, persistent=True),
    "shards-2-spawned": lambda: shards(1, epochs=1, persistent=True, context="spawn"),
    "shards-plain-persistent": plain_persistent_shards,
    "shards-plain-epochs": plain_named_epochs,
    "virtual-index": virtual_index,
    "virtual-files": virtual_files,
}


def main():
    found = {}
    for name in sys.argv[1:] or SCENARIOS:
        begun = time.monotonic()
        try:
            found[name] = SCENARIOS[name]()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        found[name]["left"] = found[name].get("left", workers())
        print(f"{name}: {time.monotonic() - begun:.2f} s", file=sys.stderr)
    shutil.rmtree(FLAGS)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
