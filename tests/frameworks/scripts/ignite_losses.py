"""An ordinary script of PyTorch-Ignite in which worker 1 of three dies in the sums of a metric.

Usage: ignite_losses.py FOLDER SUM: the number of the sum in which it dies. Worker R has samples of
loss R, of which R in four are right. The worker of rank 0 writes what it has to said.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from ignite.metrics import Accuracy, EpochMetric, Loss, Metric, RunningAverage

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])


class Alone(Metric):
    """A metric that needs no other worker."""

    def reset(self):
        """Begin again."""
        self.count = 0

    def update(self, output):
        """Count a batch."""
        self.count += 1

    def compute(self):
        """Return the count."""
        return self.count


def die_in_sum(calls):
    """End worker 1 in one of its next sums, which the others begin."""
    function, left = torch.distributed.all_reduce, [calls]

    def all_reduce(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and FIRST_RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    torch.distributed.all_reduce = all_reduce


def main(_local_rank):
    """Evaluate, and lose worker 1 meanwhile."""
    net = idist.auto_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def train(_engine, _batch):
        net(torch.ones(4, 1)).square().mean().backward()
        optimizer.step()
        return float(FIRST_RANK)

    trainer = Engine(train)
    RunningAverage(output_transform=lambda output: output).attach(trainer, "running")
    evaluator = Engine(lambda _engine, batch: batch)
    Accuracy().attach(evaluator, "accuracy")
    Loss(lambda predicted, _labels: predicted.mean() * 0 + FIRST_RANK).attach(evaluator, "loss")
    EpochMetric(lambda _predicted, labels: float(len(labels))).attach(evaluator, "samples")
    if FIRST_RANK == 0:
        Alone().attach(evaluator, "alone")
    predicted, labels = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    predicted[:FIRST_RANK, 0] = 1.0
    predicted[FIRST_RANK:, 1] = 1.0
    trainer.run([0])
    die_in_sum(int(sys.argv[2]))
    said = dict(evaluator.run([(predicted, labels)]).metrics)
    said["again"] = dict(evaluator.run([(predicted, labels)]).metrics)
    said["running"] = trainer.run([0], max_epochs=2).metrics["running"]
    if idist.get_rank() == 0:
        (FOLDER / "said.json").write_text(json.dumps(said))


torch.set_num_threads(1)
with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
