"""Iterators and samplers for elastic training; `CyclingIterator` is torch's own.

The order of ElasticDistributedSampler differs from torch's on purpose. torch shuffles the
indices from `start_index` on, so a job that resumes within an epoch uses some samples twice and
others never. Here an epoch has one permutation of all indices, whatever `start_index` is, and the
rest of it is dealt. After a restart at a position, each sample is still used once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import TypeVar

import torch
from torch.distributed.elastic.utils.data.cycling_iterator import CyclingIterator
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from elastane.elastic import use_itself, use_torchs

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
T = TypeVar("T")
use_torchs(__name__, "cycling_iterator")
use_itself(__name__, "elastic_distributed_sampler")


class ElasticDistributedSampler(DistributedSampler[T]):
    """Deals an epoch from position `start_index` on to `num_replicas`, without overlap.

    The epoch (`set_epoch`) seeds the permutation, so the world may change between two positions of
    one epoch. If the rest does not divide evenly, its first samples are repeated at the end, as in
    DistributedSampler. TypeError for a dataset without a length, ValueError for a position beyond
    it.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError("Dataset must be an instance of collections.abc.Sized")
        if not 0 <= start_index < len(dataset):
            raise ValueError(
                f"Start index {start_index} should be less than dataset size {len(dataset)}"
            )
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        self.start_index = start_index
        self._length = len(dataset)
        self.num_samples = math.ceil((self._length - start_index) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[T]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        order = torch.randperm(self._length, generator=generator)[self.start_index :].tolist()
        repeats = math.ceil(self.total_size / len(order))
        dealt = (order * repeats)[: self.total_size]
        return iter(dealt[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
