"""Jobs of ElasticLoaders over a stream, with view-synchronous losses, played by threads.

`Crowd` stands for the OrderedGroups of all workers. The workers of a world meet at each collective
and at each boundary. A worker that is lost there has contributed or has not: all survivors get the
same sum, and see the loss after the first operation that lacks the lost worker. A seed draws which
workers are lost or join, and when all restart from a checkpoint.
"""

from __future__ import annotations

import copy
import random
import threading
from types import SimpleNamespace
from typing import Any

import torch
from stream_schedules import shard_lengths

import elastane
from elastane.data.sources import ShardSource
from elastane.worker import elastic_loader

WORLD_MAX = 5
WAIT_S = 60


class LostError(BaseException):
    """Ends the thread of a worker that is lost; a program cannot catch it."""


class Worker:
    """The group of one worker, as its ElasticLoader sees it."""

    is_shared, ddps = False, ()

    def __init__(self, crowd: Crowd, number: int, given: Any = None) -> None:
        self.crowd, self.number, self.given = crowd, number, given
        self.members: tuple[int, ...] = ()
        self.answer: Any = None
        self.loader: Any = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def share(self, loader: Any) -> None:
        """Accept the loader whose state newcomers get."""
        self.loader = loader

    def pass_boundary(self) -> None:
        """Take the state as a newcomer, or meet the others."""
        if self.given is not None:
            self.loader.load(self.given)
            self.given = None
            return
        self.crowd.meet(self, "boundary", self.loader.state()["data"])

    def run(self) -> None:
        """Train as a script does."""
        self.crowd.local.worker = self
        try:
            self.crowd.train(self)
        except LostError:
            pass
        except Exception as error:
            self.crowd.fail(error)


class Crowd:
    """One job; `committed` has the epoch, the step and the samples of each update."""

    def __init__(self, seed: int, *, n: int = 97, epochs: int = 2) -> None:
        self.rng = random.Random(seed)
        self.n, self.epochs = n, epochs
        self.batch = self.rng.choice((2, 7, 16, 24, 60))
        self.lanes = self.rng.choice((1, 3, 8))
        self.micro_batches = self.rng.choice((1, 1, 2))
        lengths = shard_lengths(self.rng, n)
        firsts = [sum(lengths[:k]) for k in range(len(lengths))]
        self.shards = [*zip(firsts, lengths, strict=True)]
        self.events = dict.fromkeys(
            ("round", "second round", "body", "boundary", "joined", "restarted", "further"), 0
        )
        self.committed: list[tuple[int, int, list[int]]] = []
        self.checkpoint: tuple[dict[str, Any] | None, int] = (None, 0)
        self.local = threading.local()
        self.changed = threading.Condition()
        self.view: list[Worker] = []
        self.here: dict[int, tuple[str, Any]] = {}
        self.threads: list[threading.Thread] = []
        self.made = 0
        self.sums_in_step = 0
        self.failure: Exception | None = None

    # What a script does.

    def train(self, worker: Worker) -> None:
        """Train to the end of the last epoch."""
        source = ShardSource(self.shards, lambda shard, at, _: range(sum(shard))[shard[0] + at :])
        stream = elastane.ElasticStream(
            source, self.batch, seed=7, lanes=self.lanes, collate_fn=list
        )
        loader = elastane.ElasticLoader(stream, accumulate=self.micro_batches)
        if worker.given is None and self.checkpoint[0] is not None:
            loader.load_state_dict(copy.deepcopy(self.checkpoint[0]))
        own: list[int] = []
        for epoch in loader.epochs(self.epochs):
            for samples in loader:
                own += samples if loader.samples else []
                if loader.is_last:
                    place = epoch, loader.step, loader.is_further
                    self.meet(worker, "body", (place, own))
                    own = []
                loader.backward(torch.zeros(1, requires_grad=True).sum())
        self.meet(worker, "end", None)

    # What the group does.

    def play(self, monkeypatch) -> None:
        """Play the job to its end."""
        monkeypatch.setattr(elastic_loader, "group_of_process", lambda: self.local.worker)
        monkeypatch.setattr(
            elastic_loader,
            "dist",
            SimpleNamespace(
                is_initialized=lambda: True,
                get_rank=lambda: self.local.worker.members.index(self.local.worker.number),
                get_world_size=lambda: len(self.local.worker.members),
                all_reduce=self.all_reduce,
            ),
        )
        with self.changed:
            self.begin()
            self.changed.wait_for(lambda: self.failure or not self.view, WAIT_S)
        if self.failure:
            raise self.failure
        assert not self.view, "the job hangs"
        for thread in self.threads:
            thread.join()

    def all_reduce(self, total: torch.Tensor) -> None:
        """Add up over the workers, in place."""
        total.copy_(torch.tensor(self.meet(self.local.worker, "sum", total.tolist())))

    def begin(self) -> None:
        """Start a world of any size."""
        self.here.clear()
        self.view = [self.new() for _ in range(self.rng.randint(1, WORLD_MAX))]
        self.show()
        self.start(self.view)

    def new(self, given: Any = None) -> Worker:
        """Make a worker."""
        self.made += 1
        return Worker(self, self.made, given)

    def start(self, workers: list[Worker]) -> None:
        """Start workers."""
        for worker in workers:
            self.threads.append(worker.thread)
            worker.thread.start()

    def show(self) -> None:
        """Let all see the present members."""
        numbers = tuple(worker.number for worker in self.view)
        for worker in self.view:
            worker.members = numbers

    def fail(self, error: Exception) -> None:
        """End the job with an error."""
        with self.changed:
            self.failure = self.failure or error
            self.view = []
            self.changed.notify_all()

    def meet(self, worker: Worker, kind: str, brought: Any) -> Any:
        """Wait for the other members; return what the operation gives."""
        with self.changed:
            if worker not in self.view:
                raise LostError
            self.here[worker.number] = kind, brought
            if len(self.here) == len(self.view):
                self.complete(kind)
                self.changed.notify_all()
            else:
                self.changed.wait_for(
                    lambda: worker.number not in self.here or worker not in self.view
                )
            if worker not in self.view and kind != "end":
                raise LostError
            return worker.answer

    def complete(self, kind: str) -> None:
        """Complete an operation at which all members are, perhaps with a loss."""
        assert {each for each, _ in self.here.values()} == {kind}, self.here
        place = kind
        if kind == "sum":
            self.sums_in_step += 1
            place = "round" if self.sums_in_step == 1 else "second round"
        chance = {"round": 0.05, "second round": 0.15, "body": 0.12, "boundary": 0.03, "end": 0}
        may_be_lost = len(self.view) > 1 and self.rng.random() < chance[place]
        gone: list[Worker] = []
        if may_be_lost:
            gone = self.rng.sample(self.view, self.rng.randint(1, len(self.view) - 1))
            self.events[place] += 1
        has_contributed = self.rng.random() < 0.5
        if not has_contributed:
            self.lose(gone)
        self.show()
        getattr(self, f"complete_{kind}")([self.here[each.number][1] for each in self.view])
        if has_contributed:
            self.lose(gone)
        if kind == "boundary":
            self.let_join()
        self.here.clear()
        if kind == "body" and self.rng.random() < 0.01:
            self.restart()

    def lose(self, gone: list[Worker]) -> None:
        """Lose workers: their threads end as they next look."""
        self.view = [worker for worker in self.view if worker not in gone]

    def complete_sum(self, brought: list[list[int]]) -> None:
        """Give each member the sum of the numbers."""
        for worker in self.view:
            worker.answer = [sum(numbers) for numbers in zip(*brought, strict=True)]

    def complete_body(self, brought: list[Any]) -> None:
        """Commit an update with the samples of those that contributed."""
        self.sums_in_step = 0
        [(epoch, step, is_further)] = {place for place, _ in brought}
        self.events["further"] += is_further
        self.committed.append((epoch, step, [x for _, own in brought for x in own]))

    def complete_boundary(self, brought: list[Any]) -> None:
        """Compare positions; perhaps save them."""
        assert all(each == brought[0] for each in brought), brought
        if self.rng.random() < 0.1:
            self.checkpoint = copy.deepcopy(brought[0]), len(self.committed)

    def complete_end(self, _brought: list[Any]) -> None:
        """End the job."""
        self.view = []

    def let_join(self) -> None:
        """Show the survivors of a boundary their world, perhaps with newcomers."""
        joining = []
        if self.rng.random() < 0.1 and len(self.view) < WORLD_MAX:
            state = copy.deepcopy(self.view[0].loader.state())
            joining.append(self.new(state))
            self.view.insert(self.rng.randint(0, len(self.view)), joining[0])
            self.events["joined"] += 1
        self.show()
        self.start(joining)

    def restart(self) -> None:
        """End all workers, and begin again from the checkpoint."""
        del self.committed[self.checkpoint[1] :]
        self.events["restarted"] += 1
        self.begin()
