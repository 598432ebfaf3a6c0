"""Training programs from seeds: what an ordinary DDP script may do, and where its workers die.

The script that runs a program and the test that checks its records both read it here, so that both
have the same samples, model and optimizer.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

WIDTH, CLASSES, SAMPLES = 6, 3, 26
# Where a worker may die: each is passed once in a step, or in a step that has it.
PLACES = (
    *("forward", "backward", "reduced", "norm", "updated", "extra", "extra made"),
    *("evaluate", "evaluated", "save", "saved"),
)


@dataclass(frozen=True)
class Death:
    """A worker dies once, `delay_s` after it has passed `place` in `step`."""

    rank: int
    step: int
    place: str
    delay_s: float


@dataclass(frozen=True)
class Program:
    """One training script. `norm`: the type of the summed count by which it divides its loss."""

    seed: int
    workers: int
    may_change: bool
    by: str  # "ddp", or how the script averages gradients itself: "sum" or "avg"
    static: bool
    unused: bool
    views: bool
    small_buckets: bool
    batch_norm: bool
    micro: int
    no_sync: bool
    optimizer: str
    clip: bool
    norm: str
    keeps_size: bool
    extras: tuple[str, ...]
    evaluates: str
    evaluate_every: int
    save_every: int
    save_barrier: bool
    deaths: tuple[Death, ...]
    steps: int = 14
    pause_s: float = 0.0

    @classmethod
    def drawn(cls, seed: int) -> Program:
        """Draw a program; the same seed gives the same one."""
        draw = random.Random(seed)
        workers = draw.choice((3, 3, 4))
        static = draw.random() < 0.2
        micro = draw.choice((1, 1, 2, 3))
        ops = (
            *("mean", "sum", "max", "count", "barrier", "broadcast", "broadcast last"),
            *("async sum", "reduce", "gather", "object"),
        )
        steps = cls.steps
        deaths = [
            Death(
                draw.choice((*range(1, workers), *range(workers))),
                draw.randrange(1, steps),
                draw.choice(PLACES),
                draw.choice((0.0, 0.0, draw.uniform(0, 0.004))),
            )
            for _ in range(draw.choice((1, 2, 2, 3)))
        ]
        return cls(
            seed=seed,
            workers=workers,
            may_change=draw.random() < 0.5,
            by=draw.choice(("ddp",) * 6 + ("sum", "avg")),
            static=static,
            unused=not static and draw.random() < 0.25,
            views=draw.random() < 0.4,
            small_buckets=draw.random() < 0.6,
            batch_norm=draw.random() < 0.3,
            micro=micro,
            no_sync=micro > 1 and not static and draw.random() < 0.5,
            optimizer=draw.choice(("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")),
            clip=draw.random() < 0.4,
            norm=draw.choice(("", "", "float", "int")),
            keeps_size=draw.random() < 0.3,
            extras=tuple(draw.choice(ops) for _ in range(draw.choice((0, 1, 2, 3)))),
            evaluates=draw.choice(("pair", "two", "mean")),
            evaluate_every=draw.choice((0, 3, 5)),
            save_every=draw.choice((0, 2, 5)),
            save_barrier=draw.random() < 0.5,
            deaths=tuple(deaths),
        )


def from_outside(program: Program) -> Program:
    """Return a longer program whose workers die of nothing but what is done to them."""
    return replace(program, deaths=(), steps=50, pause_s=0.04)


class Net(torch.nn.Module):
    """A small classifier in float64, whose second head is not used in each step."""

    def __init__(self, program: Program | Joining) -> None:
        super().__init__()
        wide = 9
        self.first = torch.nn.Linear(WIDTH, wide)
        self.norm = torch.nn.BatchNorm1d(wide) if program.batch_norm else torch.nn.Identity()
        self.second = torch.nn.Linear(wide, wide)
        self.head = torch.nn.Linear(wide, CLASSES)
        self.other = torch.nn.Linear(wide, CLASSES) if program.unused else None

    def forward(self, inputs: torch.Tensor, *, other: bool = False) -> torch.Tensor:
        """Return the logits, [batch, CLASSES]."""
        hidden = torch.tanh(self.norm(self.first(inputs)))
        hidden = hidden + torch.tanh(self.second(hidden))
        result: torch.Tensor = self.head(hidden)
        if self.other is not None and other:
            result = result + self.other(hidden)
        return result


def model_of(program: Program | Joining) -> Net:
    """Return the model with its first weights."""
    torch.manual_seed(program.seed)
    return Net(program).double()


class Pair:
    """Two optimizers, each of half of the parameters."""

    def __init__(self, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        self.parts = [one, other]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        """Step both."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> list[dict[str, object]]:
        """Return the states of both."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Load the states of both."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def optimizer_of(
    program: Program | Joining, model: torch.nn.Module
) -> torch.optim.Optimizer | Pair:
    """Return the optimizer of a model."""
    kind = getattr(torch.optim, program.optimizer)
    if program.optimizer == "LBFGS":
        lbfgs: torch.optim.Optimizer = kind(model.parameters(), lr=0.02, max_iter=3, history_size=3)
        return lbfgs
    more = {"momentum": 0.9} if program.optimizer == "SGD" else {}
    make = partial(kind, lr=0.02, foreach=False, **more)
    parameters = [*model.parameters()]
    if isinstance(program, Stepping) and program.two:
        half = len(parameters) // 2
        return Pair(make(parameters[:half]), make(parameters[half:]))
    optimizer: torch.optim.Optimizer = make(parameters)
    return optimizer


def batch_of(
    program: Program, rank: int, step: int, micro: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels; with `norm` their number differs between workers and passes."""
    seed = ((program.seed * 101 + step) * 7 + micro) * 13 + rank
    draw = torch.Generator().manual_seed(seed)
    count = 4 if not program.norm else 3 + int(torch.randint(0, 4, (), generator=draw))
    inputs = torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (count,), generator=draw)


def uses_other(program: Program | Joining, step: int) -> bool:
    """Whether the second head is used in this step, on all workers."""
    return program.unused and step % 3 != 1


def losses_of(
    model: torch.nn.Module, batch: tuple[torch.Tensor, ...], **more: bool
) -> torch.Tensor:
    """Return the loss of each sample."""
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs, **more), labels, reduction="none")


@dataclass(frozen=True)
class Joining:
    """A training script with an ElasticLoader; of a death, `rank` is the local rank.

    `stream`: the samples are in shards whose lengths are not known.
    """

    seed: int
    workers: int
    static: bool
    unused: bool
    views: bool
    small_buckets: bool
    micro: int
    no_sync: bool
    optimizer: str
    clip: bool
    samples: int
    batch: int
    epochs: int
    pause_s: float
    extras: tuple[str, ...]
    save_every: int
    deaths: tuple[Death, ...]
    stream: bool
    batch_norm: bool = False
    may_change: bool = True

    @classmethod
    def drawn(cls, seed: int) -> Joining:
        """Draw a program; the same seed gives the same one."""
        draw = random.Random(seed)
        workers = draw.choice((2, 3, 3, 4))
        static = draw.random() < 0.2
        micro = draw.choice((1, 1, 2, 3))
        samples, batch = draw.choice((37, 48, 61)), draw.choice((8, 12, 13))
        epochs = draw.choice((6, 8))
        steps = epochs * (samples // batch)
        deaths = [
            Death(
                draw.randrange(workers),
                draw.randrange(1, steps),
                draw.choice(("forward", "backward", "reduced", "updated", *PLACES)),
                draw.choice((0.0, 0.0, draw.uniform(0, 0.004))),
            )
            for _ in range(draw.choice((2, 3, 4, 6)))
        ]
        return cls(
            seed=seed,
            workers=workers,
            static=static,
            unused=not static and draw.random() < 0.25,
            views=draw.random() < 0.4,
            small_buckets=draw.random() < 0.6,
            micro=micro,
            no_sync=micro > 1 and not static and draw.random() < 0.6,
            optimizer=draw.choice(("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")),
            clip=draw.random() < 0.4,
            samples=samples,
            batch=batch,
            epochs=epochs,
            pause_s=draw.choice((0.02, 0.05)),
            extras=draw.choice(((), (), ("max",), ("sum",), ("barrier", "max"))),
            save_every=draw.choice((0, 1, 3)),
            deaths=tuple(deaths),
            stream=random.Random(f"stream {seed}").random() < 0.3,
        )


@dataclass(frozen=True)
class Stepping(Joining):
    """A training script with `job.steps()`.

    `two`: two optimizers have half of the parameters each. `closure`: the optimizer calls the
    passes; LBFGS does so several times in a step. `waits`: a worker builds once it has its place.
    `loops`: a loop for each epoch, and not one for all. `verify`: the workers compare their
    replicas after this many steps; 0: never. `saves`: a Checkpointer saves after this many steps;
    0: there is none. `all_die`: in this step all workers die; 0: in none.

    What a body does besides: it `decays` the weights at its beginning, and `clamps` them after the
    update. An `average` of them is changed "inside" the body or "behind" it, or there is none.
    `late`: the schedules step after the first of the extra collectives.
    """

    may_change: bool = False
    two: bool = False
    closure: bool = False
    waits: bool = True
    loops: bool = False
    verify: int = 0
    saves: int = 0
    all_die: int = 0
    decays: bool = False
    clamps: bool = False
    average: str = ""
    late: bool = False

    @property
    def evaluations(self) -> int:
        """How often the optimizer computes the gradient in a step, at most."""
        return 3 if self.optimizer == "LBFGS" else 1

    @classmethod
    def drawn(cls, seed: int) -> Stepping:
        """Draw a program; the same seed gives the same one."""
        draw = random.Random(f"steps {seed}")
        base = Joining.drawn(seed)
        # BatchNorm takes no batch of one sample, whatever the world.
        least = 2 * (base.workers + 1) * base.micro
        has_enough = min(base.batch, base.samples % base.batch or base.batch) >= least
        closure, stream = draw.random() < 0.25, draw.random() < 0.25
        more = {
            "may_change": False,
            "batch_norm": not stream and draw.random() < 0.5 and has_enough,
            "closure": closure,
            "two": not closure and draw.random() < 0.3,
            "stream": stream,
            "waits": draw.random() < 0.7,
            "loops": draw.random() < 0.4,
            "verify": draw.choice((0, 0, 3)),
        }
        if closure and draw.random() < 0.6:
            # It would count the batches of BatchNorm once in each of its evaluations.
            more |= {"optimizer": "LBFGS", "batch_norm": False}
        if draw.random() < 0.5:
            steps = base.epochs * (base.samples // base.batch)
            more["saves"] = draw.choice((1, 3, 5))
            more["all_die"] = draw.choice((0, draw.randrange(1, steps), draw.randrange(8, steps)))
        own = random.Random(f"own {seed}")
        more["decays"] = own.random() < 0.3
        more["clamps"] = own.random() < 0.3
        more["average"] = own.choice(("", "inside", "behind"))
        more["late"] = own.random() < 0.3
        return cls(**{**vars(base), **more})


@dataclass(frozen=True)
class Sharding(Stepping):
    """A training script with `job.steps()` and `fully_shard()`.

    `shard`: the number of workers of a replica. `quiet`: what the passes before the last one of a
    step leave out, "gradient_sync", "all_reduce" (of a reduced shard) or "" for nothing.

    In the step `cut` (0: in none) the worker of local rank `cut_dies` dies once all have agreed on
    the last update. Those of `cut_waits` do not see the end of the agreement, and the others make
    the update.
    """

    shard: int = 2
    quiet: str = ""
    cut: int = 0
    cut_dies: int = 0
    cut_waits: tuple[int, ...] = ()

    @classmethod
    def drawn(cls, seed: int) -> Sharding:
        """Draw a program whose workers are on one node; the same seed gives the same one."""
        draw = random.Random(f"shards {seed}")
        base = Stepping.drawn(seed)
        workers = draw.choice((4, 4, 6))
        shard = draw.choice((workers // 2, workers // 2, workers // 2, workers))
        more = {
            "workers": workers,
            "shard": shard,
            "quiet": draw.choice(("", "gradient_sync", "all_reduce")),
            "batch_norm": False,
            "stream": False,
            "no_sync": False,
            "verify": 0,
            "optimizer": "Adam" if base.optimizer == "LBFGS" else base.optimizer,
            "deaths": tuple(replace(each, rank=draw.randrange(workers)) for each in base.deaths),
        }
        own = random.Random(f"cut {seed}")
        if shard < workers and own.random() < 0.7:
            dies, *rest = own.sample(range(workers), workers)
            more |= {"cut": own.randrange(1, 12), "cut_dies": dies}
            more["cut_waits"] = tuple(rest[: own.randrange(1, workers - 1)])
        return cls(**{**vars(base), **more})

    @classmethod
    def of_nodes(cls, seed: int) -> Sharding:
        """Draw a program of which each of two nodes has a replica."""
        program = cls.drawn(seed)
        return replace(program, shard=program.workers // 2, deaths=(), all_die=0, cut=0)


def decay(weights: Iterable[torch.Tensor]) -> None:
    """Decay weights, as a body may do by itself."""
    for each in weights:
        each.mul_(0.99)


def clamp(weights: Iterable[torch.Tensor]) -> None:
    """Clamp weights, as a body may do by itself."""
    for each in weights:
        each.clamp_(-0.4, 0.4)


def put_into(average: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
    """Put weights into an average of them."""
    for mean, each in zip(average, weights, strict=True):
        mean.lerp_(each, 0.1)


def part_of(whole: torch.Tensor, shard: int, shards: int) -> torch.Tensor:
    """Return the part of a tensor that `fully_shard()` gives to a shard."""
    parts = whole.chunk(shards) if whole.dim() else [whole] * shards
    return parts[shard] if shard < len(parts) else whole[:0]


def deaths_at(folder: Path, deaths: tuple[Death, ...], rank: int, step: int, place: str) -> None:
    """Die here if one of these deaths says so, and has not happened."""
    for number, death in enumerate(deaths):
        mark = folder / f"death{number}"
        if (death.rank, death.step, death.place) == (rank, step, place) and not mark.exists():
            mark.write_text(str(os.getpid()))
            if death.delay_s:
                threading.Thread(target=_die, args=(death.delay_s,), daemon=True).start()
            else:
                _die(0.0)


def die_once(folder: Path, name: str) -> None:
    """Die here if no process has died by this name."""
    mark = folder / name
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        _die(0.0)


def _die(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def training_set(program: Joining) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers of the samples, their inputs and their labels."""
    draw = torch.Generator().manual_seed(program.seed)
    inputs = torch.randn(program.samples, WIDTH, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (program.samples,), generator=draw)
    return torch.arange(program.samples), inputs, labels


def evaluation_set(program: Program | Joining) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of the evaluation, of which each worker has every n-th."""
    draw = torch.Generator().manual_seed(program.seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
