"""Elastic, fault-tolerant distributed training for PyTorch.

Names resolve when they are used, so that `import elastane` costs nothing and never imports torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

# pip asks for the version, but a clone in PYTHONPATH gets here under any.
if sys.version_info < (3, 11):  # noqa: UP036
    raise ImportError(
        f"elastane needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}"
    )

from elastane.version import __version__

if TYPE_CHECKING:
    from elastane import accelerate, errors
    from elastane.checkpoint.checkpointer import Checkpointer
    from elastane.checkpoint.simple import load_checkpoint, save_checkpoint
    from elastane.data.sampler import ElasticBatchSampler, ElasticSampler
    from elastane.data.stream import ElasticStream
    from elastane.functions.launch import launch
    from elastane.worker.drain import should_checkpoint
    from elastane.worker.elastic_loader import ElasticLoader, on_world_change
    from elastane.worker.job import Job, init
    from elastane.worker.record import record
    from elastane.worker.scalars import TensorBoard
    from elastane.worker.service_sinks import MLflow, Trackio, WandB
    from elastane.worker.step import Step

__all__ = [
    "Checkpointer",
    "ElasticBatchSampler",
    "ElasticLoader",
    "ElasticSampler",
    "ElasticStream",
    "Job",
    "MLflow",
    "Step",
    "TensorBoard",
    "Trackio",
    "WandB",
    "__version__",
    "accelerate",
    "errors",
    "init",
    "launch",
    "load_checkpoint",
    "on_world_change",
    "record",
    "save_checkpoint",
    "should_checkpoint",
]

# Public name: the module it comes from; itself, where it is a module.
_HOMES = {
    "Checkpointer": "elastane.checkpoint.checkpointer",
    "ElasticBatchSampler": "elastane.data.sampler",
    "ElasticLoader": "elastane.worker.elastic_loader",
    "ElasticSampler": "elastane.data.sampler",
    "ElasticStream": "elastane.data.stream",
    "Job": "elastane.worker.job",
    "MLflow": "elastane.worker.service_sinks",
    "Step": "elastane.worker.step",
    "TensorBoard": "elastane.worker.scalars",
    "Trackio": "elastane.worker.service_sinks",
    "WandB": "elastane.worker.service_sinks",
    "accelerate": "elastane.accelerate",
    "errors": "elastane.errors",
    "init": "elastane.worker.job",
    "launch": "elastane.functions.launch",
    "load_checkpoint": "elastane.checkpoint.simple",
    "on_world_change": "elastane.worker.elastic_loader",
    "record": "elastane.worker.record",
    "save_checkpoint": "elastane.checkpoint.simple",
    "should_checkpoint": "elastane.worker.drain",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastane' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted(__all__)
