"""Iterators and samplers for elastic training."""

from elastane.elastic.utils.data.cycling_iterator import CyclingIterator
from elastane.elastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
