"""Loaders that deal virtual shards, with and without worker processes; feed_scenarios runs them."""

import json
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elastane.data.feed import Feed
from elastane.data.sampler import ElasticBatchSampler
from elastane.data.shards import ElasticShards

N, BATCH, SHARDS, STEPS = 53, 10, 5, 12
FILES = [(0, 11), (100, 0), (200, 37), (300, 5)]


class NoisyNumbers(Dataset):
    """Numbers with draws from three random streams; it returns whole batches (__getitems__)."""

    def __len__(self):
        return N

    def __getitems__(self, chosen):
        return [[i, random.random(), np.random.rand(), float(torch.rand(()))] for i in chosen]


def noisy(samples):
    """A collate function that draws from three streams."""
    return [samples, random.random(), float(np.random.rand()), float(torch.rand(()))]


def open_numbers(first, start):
    return iter(range(first + start, first + dict(FILES)[first]))


def virtual_index():
    def make_feed(**options):
        sampler = ElasticBatchSampler(N, BATCH, seed=3)
        data = NoisyNumbers()
        return Feed(DataLoader(data, batch_sampler=sampler, collate_fn=noisy, **options))

    return dealt_in_shards(make_feed)


def virtual_files():
    def make_feed(**options):
        data = ElasticShards(FILES, open_numbers, BATCH, seed=3, lanes=2)
        return Feed(DataLoader(data, batch_size=None, collate_fn=noisy, **options))

    return dealt_in_shards(make_feed)


def dealt_in_shards(make_feed):
    """Return the samples and random draws of each virtual shard, over two epochs of some worlds.

    One process plays the ranks in turn; each world has another number of loader workers.
    """
    found, odd = {}, []
    for world, options in (
        *((1, {"num_workers": 0}), (3, {"num_workers": 2, "persistent_workers": True})),
        *((2, {"num_workers": 1}), (5, {"num_workers": 0})),
    ):
        with make_feed(**options) as feed:
            feed.cursor.cut_into(SHARDS, stream_seed=9)
            for step in range(STEPS):
                samples = 0
                for rank in range(world):
                    feed.rewind(rank, world)
                    for _ in range(feed.cursor.portions_per_step):
                        share, batch = next(feed)
                        told = json.dumps(batch)
                        if found.setdefault((share.step, share.shard), told) != told:
                            odd.append([world, *share])
                        samples += share.samples
                assert samples == share.batch_stop - share.batch_start, (step, samples)
                feed.commit(step)
    return {"shards": len(found), "drawn": len({*found.values()}), "odd": odd}
