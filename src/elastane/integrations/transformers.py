"""The Hugging Face Trainer under `elastane run --in-place`.

Its rank and world size are Accelerate's. Its own gathers, evaluations and checkpoints are made by
one membership.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from elastane.errors import ConfigurationError
from elastane.integrations.accelerate import first_alone, prints_for_node
from elastane.integrations.versions import require_known
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("5.",)


def adopt(name: str, world: VisibleWorld) -> None:
    """Let the Trainer follow `world`; `name`: its module as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name.partition(".")[0])
    require_known(package.__name__, str(package.__version__), KNOWN)
    helpers: Any = importlib.import_module(f"{package.__name__}.trainer_pt_utils")
    for gather in ("distributed_concat", "distributed_broadcast_scalars"):
        world.make_whole(helpers, gather)
    trainer: Any = importlib.import_module(name)
    # The module has imported the name. If rank 0 is lost as it writes, another worker writes again.
    trainer.distributed_broadcast_scalars = helpers.distributed_broadcast_scalars
    world.make_whole(trainer.Trainer, "_save_checkpoint", waits=True)
    # Programs compare the predictions with the dataset: those of question answering fail otherwise.
    world.make_whole(trainer.Trainer, "evaluation_loop")
    log_by_each_rank_0(trainer.Trainer)
    let_one_go_first(trainer.TrainingArguments, world)
    end_at_last_step(trainer.Trainer)
    refuse_split_groups(trainer.Trainer)


def log_by_each_rank_0(owner: Any) -> None:
    """Let a Trainer's state follow its ranks, so that another worker logs once rank 0 is lost.

    A progress bar cannot be continued by another.
    """
    update: Callable[..., Any] = owner._maybe_log_save_evaluate

    @functools.wraps(update)
    def log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = self.callback_handler.callbacks
        if not any(each.__class__.__name__.endswith("ProgressCallback") for each in callbacks):
            is_main = self.is_world_process_zero()
            self.state.is_world_process_zero = is_main
            self.state.is_local_process_zero = prints_for_node(
                is_main, self.is_local_process_zero()
            )
        return update(self, *args, **kwargs)

    owner._maybe_log_save_evaluate = log_save_evaluate


def let_one_go_first(owner: Any, world: VisibleWorld) -> None:
    """Let another worker go first if the first one is lost in a block of `main_process_first`."""
    run: Callable[..., AbstractContextManager[None]] = owner.main_process_first

    @contextmanager
    def main_process_first(self: Any, local: bool = True, desc: str = "work") -> Iterator[None]:
        with first_alone(world, lambda: run(self, local, desc), local=local):
            yield

    owner.main_process_first = functools.wraps(run)(main_process_first)


def refuse_split_groups(owner: Any) -> None:
    """Let a Trainer refuse groups of completions that several workers share, as TRL's may have.

    Such a Trainer gathers the rewards of all workers and takes each `num_generations` of them in a
    row for one group. After a loss these may be of different prompts, so the advantages are wrong.
    """
    train: Callable[..., Any] = owner.train

    @functools.wraps(train)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        size = getattr(self.args, "num_generations", None) or 1
        steps = getattr(self.args, "steps_per_generation", None) or 1
        batch = self.args.per_device_train_batch_size * steps
        if batch % size:
            raise ConfigurationError(
                f"{type(self).__name__}: groups of {size} completions that workers share, with"
                " --in-place",
                slug="in-place-refused",
                expected="per_device_train_batch_size times steps_per_generation a multiple of"
                f" num_generations, since a loss would mix the groups; it is {batch}",
                next_step=f"set per_device_train_batch_size to a multiple of {size}, or start the"
                " script without --in-place",
            )
        return train(self, *args, **kwargs)

    owner.train = checked


def end_at_last_step(owner: Any) -> None:
    """Let a Trainer that resumes after its last step make no further one.

    It looks at `max_steps` only after a step, so each restart after the last one added a step.
    What follows the steps of an epoch, such as an evaluation, is made: a loss may have cut it off.
    """
    run: Callable[..., None] = owner._run_epoch

    @functools.wraps(run)
    def run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        is_over = 0 < self.state.max_steps <= self.state.global_step
        if is_over and "num_update_steps_per_epoch" in kwargs:
            kwargs["num_update_steps_per_epoch"] = 0
        run(self, *args, **kwargs)
        if is_over:
            self.control.should_training_stop = True

    owner._run_epoch = run_epoch
