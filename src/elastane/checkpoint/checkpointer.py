"""Saves a script's state now and then, and gives it back: what a user holds.

Owns when a save is due and what becomes of a save that failed; how one is made is `saving`, how one
comes back `restoring`. All ranks call the same methods at the same steps. A fault of the storage
never ends the training: the last checkpoint stays, and the user is told, once for each reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copy_on_write import Loan
from elastane.checkpoint.folder_identity import StoragePath, absolute
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.restoring import Restored, Restorer
from elastane.checkpoint.save_schedule import Cadence, at_least_one, not_a_step, steps_done
from elastane.checkpoint.saving import WAIT_S, Agreed, Saver, insist_durable, not_saved
from elastane.checkpoint.state_source import Objects, Subject
from elastane.errors import CheckpointError, ElastaneError
from elastane.process import environment
from elastane.process.status_page import before_park
from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import KEEPER_PATIENCE_S
from elastane.snapshots.client import Keeper
from elastane.snapshots.messages import SaveFailed
from elastane.storage import open_storage
from elastane.storage.repository import Repository

_log = logging.getLogger("elastane.checkpoint")
# Between two looks whether storage has taken the save before one that was asked for.
_PAUSE_S = 0.02


class Checkpointer:
    """Checkpoints of one script under `where`: a folder, or a URL that fsspec takes.

    A checkpoint is written behind the training, by a process of the node; the training stands for
    one copy of this rank's share. `every_steps`, `every_s` or both say when `maybe_save` saves;
    with neither, as with `every_s="auto"`, it is as often as a save's cost and the failures so far
    make it pay. `keep` checkpoints are left, never fewer than one that is valid. `strict`: a
    damaged newest checkpoint is an error, where else it is named and passed over.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | Literal["auto"] | None = None,
        keep: int = 3,
        strict: bool = False,
    ) -> None:
        self.where = absolute(where)
        if every_steps is None and every_s is None:
            every_s = "auto"
        self._cadence = Cadence(every_steps, every_s)
        self._keep, self._strict = at_least_one(keep), strict
        self._subject: Subject | None = None
        self._saver: Saver | None = None
        self._captured: Captured | None = None
        self._loan: Loan | None = None
        self._cancel_settling: Callable[[], None] = _nothing
        self._era, self._job = 0, environment.get("TORCHELASTIC_RUN_ID", "")
        self._last: Key | None = None
        self._missed = ""  # why what was asked for was not saved
        self._told: set[str] = set()

    def restore(self, what: Any) -> Restored | None:
        """Bring back the newest valid state, in memory or in storage; None where there is none yet.

        `what` is a Job, or a mapping of names to models, optimizers and whatever else has
        `state_dict` and `load_state_dict`. It says what is saved from now on as well. On all ranks.
        """
        bind = getattr(what, "checkpointed_by", None)
        subject: Subject = bind(self) if bind is not None else Objects(what, self)
        repository = Repository(open_storage(self.where))
        self.close()
        keeper, place = _keeper(self.where), StoragePath(repository.storage)
        if keeper.survives:
            place.wait()
        else:
            place.insist()  # There is no memory to go on from.
        self._subject, self._saver = subject, Saver(subject, keeper, self.where, place)
        subject.before_change(self._settle)
        self._cancel_settling = before_park(self._settle)
        if not subject.is_new:
            return None  # The others give it their state, and with it ours.
        restorer = Restorer(subject, keeper, repository)
        try:
            restored, self._era = restorer.newest(place, strict=self._strict)
        finally:
            self._loan = restorer.loan
        if restored is None:
            Captured(subject.state())  # What cannot be saved is refused now, not at the first save.
        self._cadence.failures += restored is not None  # A run that goes on was cut short.
        if restored is not None:
            self._saver.go_on_from(restored.nonce, missed=restored.missed)
        if restored is not None and environment.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(ConnectionError):
                keeper.went_on(restored.key, restored.where, subject.why)
        return restored

    def maybe_save(self, step: Any) -> bool:
        """Save if it is due, and the one before is written; returns whether it began.

        `step` is what `job.steps` yields, or how many steps are done. On all ranks.
        """
        number = _number_of(step)
        reason = self._cadence.is_due(number) if number else ""
        return bool(reason) and self._save(number, reason)

    def save(self, step: Any) -> None:
        """Save now; waits for the one before to be written. On all ranks."""
        number = _number_of(step)
        if not number:
            raise not_a_step(step)
        self._missed = ""
        self._save(number, "asked")

    def save_before_stop(self, steps: int) -> None:
        """Save after so many steps, if that was not done; then all workers are going to be stopped.

        What is saved is whole when this returns; that it is written out is the keeper's. So storage
        that is behind is not waited for, where each node holds all of the state.
        """
        if self._subject is not None and steps and not (self._last and self._last.step == steps):
            self._save(steps, "leave")
        self._settle()

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the last save is durable; CheckpointError with the reason where it is not."""
        self._settle()
        if self._missed:
            raise not_saved(self.where, f"the last save: {self._missed}", "keeper-lost")
        if self._last is not None and self._saver is not None:
            insist_durable(self._saver.keeper, self._last, self.where, timeout_s)

    def close(self) -> None:
        """Let go of the keeper, which ends what it is writing. Idempotent."""
        self._cancel_settling()
        self._end_loan()
        if self._saver is not None:
            self._saver.close()
        self._saver = self._captured = None

    def state_dict(self) -> dict[str, int]:
        """Return what is to go on after a restart, and in members that come later."""
        cadence = self._cadence
        return {
            "era": self._era,
            "stride": cadence.stride,
            "lived_s": int(cadence.lived_s),
            "failures": cadence.failures,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._era = int(state["era"])
        self._cadence.go_on(state["lived_s"], state["failures"], state["stride"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        self.close()

    def _save(self, step: int, reason: str) -> bool:
        if self._subject is None or self._saver is None:
            raise CheckpointError(
                "nothing was named that is to be saved",
                expected="restore() before the first save, also of a new run",
                next_step='checkpointer.restore(job), or restore({"model": model, ...})',
                slug="checkpoint-restore-first",
            )
        self._settle()
        state = self._subject.state()
        # What somebody waits for is not to be dropped.
        doubtful = None if reason in ("asked", "leave") else self._saver.doubtful
        if self._captured is None or not self._captured.again(state, doubtful):
            self._captured = Captured(state)
        captured = self._captured
        order = SaveOrder(step, reason, self._keep, self._job)
        try:
            heard = self._agreed(self._saver, captured, order)
            self._tell_failures(self._saver.progress.failures)
            if not self._cadence.hear(heard[0].word, step):
                return False
            key, began = self._saver.save(captured, order, self._era, heard)
        except (ElastaneError, RuntimeError) as error:
            if not self._subject.is_lost(error):
                raise
            self._missed = str(error) if reason == "asked" else ""
            _log.info("step %d is not saved: %s", step, error)
            return False  # The job's next step meets the loss as well, and recovers.
        except OSError as error:  # The keeper's: gone, held up, or without memory.
            what = f"step {step} could not be saved: {error}; training goes on [keeper-lost]"
            self._tell(what, str(error))
            self._missed = str(error) if reason == "asked" else ""
            return False
        is_missed = reason == "asked" and not began
        self._missed = f"storage was not ready within {WAIT_S:g} s" if is_missed else ""
        if began:
            self._last = key
            self._cadence.cost(self._saver.blocked_s, self._saver.write_s)
        return began

    def _agreed(self, saver: Saver, captured: Captured, order: SaveOrder) -> list[Agreed]:
        """Hear all ranks; where a save must not be left out, once no keeper is writing any more."""
        word = self._cadence.word(order.step, order.reason)
        # What one node holds of a sharded state goes with it, from its memory.
        insists = order.reason == "asked" or (order.reason == "leave" and captured.is_sharded)
        for _ in range(int(WAIT_S / _PAUSE_S)):
            heard = saver.agree(captured, order, word)
            if not insists or not any(each.busy for each in heard):
                break
            time.sleep(_PAUSE_S)
        return heard

    def _settle(self) -> None:
        """Wait until what is being copied may change, and what was restored is here alone."""
        self._end_loan()
        if self._saver is not None:
            self._saver.settle()

    def _end_loan(self) -> None:
        """Have each page copied by who does that: read before, it costs the training ten times."""
        if self._loan is not None:
            self._loan.wait()
            self._loan = None

    def _tell_failures(self, failures: Sequence[SaveFailed]) -> None:
        if not failures or environment.get("LOCAL_RANK", "0") != "0":
            return  # One worker of a node tells it.
        for failure in failures:
            self._tell(
                f"step {failure.key.step} could not be saved: {failure.reason}; training goes on,"
                f" the checkpoint before it stays [{failure.slug}]",
                failure.reason,
            )

    def _tell(self, text: str, reason: str = "") -> None:
        """Say it, once for each reason."""
        if (reason or text) not in self._told:
            self._told.add(reason or text)
            _log.warning("%s", text)


def _nothing() -> None:
    """Do nothing."""


def _keeper(where: str) -> Keeper:
    try:
        return Keeper.connect(where, patience_s=KEEPER_PATIENCE_S)
    except OSError as error:
        raise CheckpointError(
            f"no keeper of snapshots: {error}",
            where=where,
            expected="the process that saves, which the agent starts, or this one",
            next_step="look at the agent's output, and at the memory and processes of the host",
            slug="keeper-lost",
        ) from error


def _number_of(step: Any) -> int:
    """Return how many steps are done after this one; 0 where it did not happen."""
    if hasattr(step, "committed"):
        return int(step.number) + 1 if step.committed else 0
    return steps_done(step)
