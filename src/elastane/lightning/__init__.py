"""Lightning's Trainer with workers that join in place, and each sample of an epoch used once.

`ElasticStrategy` is what a script passes to its Trainer. `strategy` decides when a step is complete
and recomputes what lost workers had; `dealt_loader` deals the training data and passes the
boundaries at which workers join; `trainer_state` is what they receive there; `limits` refuses what
is not supported. `scalar_logger` writes what a LightningModule logs. Only this package imports
Lightning.
"""

from elastane.lightning.scalar_logger import ScalarLogger
from elastane.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy", "ScalarLogger"]
