"""The user's Checkpointer: saves a script's state regularly, and restores it.

Owns when a save is due, and the handling of failed saves; `saving` makes a save, `restoring` reads
one. All ranks call the same methods at the same steps. A fault of the storage never ends the
training: the last checkpoint stays, and a warning is logged once for each reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copy_on_write import CopyOnWriteRestore
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.restoring import Restored, Restorer
from elastane.checkpoint.saving import WAIT_S, SaveProposal, Saver, not_saved, require_durable
from elastane.checkpoint.schedule import SaveSchedule, at_least_one, not_a_step, steps_done
from elastane.checkpoint.state_source import ScriptObjects, StateSource
from elastane.errors import CheckpointError, ElastaneError
from elastane.process import environment
from elastane.process.pauses import pausing
from elastane.process.status_page import before_park
from elastane.protocol.checkpoints import Key
from elastane.protocol.pauses import Pause
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.limits import REQUEST_TIMEOUT_S
from elastane.snapshots.messages import SaveFailed
from elastane.storage import open_storage
from elastane.storage.places import FolderIdentity, absolute_place
from elastane.storage.repository import Repository

_log = logging.getLogger("elastane.checkpoint")
# The pause between two checks whether storage has finished the save before a requested one.
_PAUSE_S = 0.02


class Checkpointer:
    """Checkpoints of one script under `where`: a folder, or a URL that fsspec accepts.

    A process of the node writes checkpoints in the background; the training is blocked only while
    this rank's share is copied. `every_steps`, `every_s` or both say when `maybe_save` saves. With
    neither, as with `every_s="auto"`, the interval is computed from a save's cost and the failures
    so far. `keep` is how many checkpoints are retained; at least one valid one always is. With
    `strict` a damaged newest checkpoint is an error; otherwise it is logged and skipped.
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
        self.where = absolute_place(where)
        if every_steps is None and every_s is None:
            every_s = "auto"
        self._schedule = SaveSchedule(every_steps, every_s, time.monotonic, _log.info)
        self._keep = at_least_one(keep)
        self._strict = strict
        self._source: StateSource | None = None
        self._saver: Saver | None = None
        self._captured: Captured | None = None
        self._borrowed: CopyOnWriteRestore | None = None
        self._cancel_before_park: Callable[[], None] = _nothing
        self._era = 0
        self._job = environment.get("TORCHELASTIC_RUN_ID", "")
        self._last: Key | None = None
        self._missed = ""  # Why a requested save was not made.
        self._logged: set[str] = set()

    def restore(self, what: Any) -> Restored | None:
        """Restore the newest valid state from memory or storage; None if there is none yet.

        `what` is a Job, or a mapping of names to models, optimizers and other objects with
        `state_dict` and `load_state_dict`. It also defines what is saved from now on. All ranks
        call it.
        """
        with pausing(Pause.RESTORING):
            return self._restore(what)

    def _restore(self, what: Any) -> Restored | None:
        bind = getattr(what, "checkpointed_by", None)
        source: StateSource = bind(self) if bind is not None else ScriptObjects(what, self)
        repository = Repository(open_storage(self.where))
        self.close()
        server, place = _connect(self.where), FolderIdentity(repository.storage)
        if server.survives:
            place.wait()
        else:
            place.require()  # Without surviving memory, storage is the only source.
        self._source = source
        self._saver = Saver(source, server, self.where, place)
        source.before_change(self._finish_copies)
        self._cancel_before_park = before_park(self._finish_copies)
        if not source.is_new:
            return None  # The other members send their state, which includes this object's.
        restorer = Restorer(source, server, repository)
        try:
            restored, self._era = restorer.newest(place, strict=self._strict)
        finally:
            self._borrowed = restorer.borrowed
        if restored is None:
            Captured(source.state())  # Refuse what cannot be saved now, not at the first save.
        if restored is not None:
            self._schedule.add_failure()  # A run that is restored was interrupted.
            self._saver.continue_from(restored.nonce, missed=restored.missed)
        if restored is not None and environment.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(ConnectionError):
                server.report_restored(restored.key, restored.where, source.why)
        return restored

    def maybe_save(self, step: Any) -> bool:
        """Save if a save is due and the last one is written; returns whether a save began.

        `step` is an item of `job.steps`, or the number of finished steps. All ranks call it.
        """
        number = _number_of(step)
        reason = self._schedule.is_due(number) if number else ""
        return bool(reason) and self._save(number, reason)

    def save(self, step: Any) -> None:
        """Save at `step`, once the previous save is written. All ranks call it at the same step.

        `step` is the number of finished steps, or the committed Step of a loop. Raises
        CheckpointError for a step that was not committed.
        """
        number = _number_of(step)
        if not number:
            raise not_a_step(step)
        self._missed = ""
        self._save(number, "asked")

    def save_before_stop(self, steps: int) -> None:
        """Save after `steps` steps unless that was done, before all workers are stopped.

        On return the snapshot is complete, and the snapshot server will write it. If each node
        holds the whole state, a busy storage is not waited for.
        """
        if self._source is not None and steps and not (self._last and self._last.step == steps):
            self._save(steps, "leave")
        self._finish_copies()

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the last save is durable; raises CheckpointError if it is not."""
        with pausing(Pause.SAVING):
            self._finish_copies()
            if self._missed:
                reason = f"the last save: {self._missed}"
                raise not_saved(self.where, reason, "snapshot-server-lost")
            if self._last is not None and self._saver is not None:
                require_durable(self._saver.server, self._last, self.where, timeout_s)

    def close(self) -> None:
        """Disconnect from the snapshot server, which completes its writes. Idempotent."""
        self._cancel_before_park()
        self._end_borrowing()
        if self._saver is not None:
            self._saver.close()
        self._saver = self._captured = None

    def state_dict(self) -> dict[str, int]:
        """Return the values that a restart, or a joining member, continues from."""
        schedule = self._schedule
        return {
            "era": self._era,
            "stride": schedule.stride,
            "lived_s": int(schedule.lived_s),
            "failures": schedule.failures,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`."""
        self._era = int(state["era"])
        self._schedule.resume(state["lived_s"], state["failures"], state["stride"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        self.close()

    def _save(self, step: int, reason: str) -> bool:
        with pausing(Pause.SAVING):
            return self._begin_save(step, reason)

    def _begin_save(self, step: int, reason: str) -> bool:
        if self._source is None or self._saver is None:
            raise CheckpointError(
                "save() was called before restore(): the Checkpointer does not know what to save",
                expected="restore() before the first save, also of a new run",
                next_step='checkpointer.restore(job), or restore({"model": model, ...})',
                slug="checkpoint-restore-first",
            )
        self._finish_copies()
        state = self._source.state()
        # A save that a caller waits for must not be dropped, so it is checked completely.
        doubtful = None if reason in ("asked", "leave") else self._saver.doubtful
        if self._captured is None or not self._captured.update(state, doubtful):
            self._captured = Captured(state)
        captured = self._captured
        order = SaveOrder(step, reason, self._keep, self._job)
        try:
            agreed = self._agree(self._saver, captured, order)
            self._log_failures(self._saver.progress.failures)
            if not self._schedule.accept(agreed[0].word):
                return False
            key, began = self._saver.save(captured, order, self._era, agreed)
        except (ElastaneError, RuntimeError) as error:
            if not self._source.is_lost(error):
                raise
            self._missed = str(error) if reason == "asked" else ""
            _log.info("step %d is not saved: %s", step, error)
            return False  # The job's next step meets the same loss, and recovers.
        except OSError as error:  # The snapshot server is gone, silent or without memory.
            what = (
                f"step {step} could not be saved: {error};"
                " training continues [snapshot-server-lost]"
            )
            self._log_once(what, str(error))
            self._missed = str(error) if reason == "asked" else ""
            return False
        is_missed = reason == "asked" and not began
        self._missed = f"storage was not ready within {WAIT_S:g} s" if is_missed else ""
        if began:
            self._last = key
            self._schedule.add_cost(self._saver.blocked_s, self._saver.write_s)
        return began

    def _agree(self, saver: Saver, captured: Captured, order: SaveOrder) -> list[SaveProposal]:
        """Exchange proposals; for a required save, repeat until no snapshot server is writing."""
        word = self._schedule.word(order.step, order.reason)
        # When a node leaves, the memory of its part of a sharded state is lost.
        is_required = order.reason == "asked" or (order.reason == "leave" and captured.is_sharded)
        for _ in range(int(WAIT_S / _PAUSE_S)):
            agreed = saver.agree(captured, order, word)
            if not is_required or not any(each.busy for each in agreed):
                break
            time.sleep(_PAUSE_S)
        return agreed

    def _finish_copies(self) -> None:
        """Wait until the state may change: no copy is running and no tensor shares a snapshot."""
        self._end_borrowing()
        if self._saver is not None:
            self._saver.finish_copy()

    def _end_borrowing(self) -> None:
        """Copy all shared pages now: page faults during training would cost ten times as much."""
        if self._borrowed is not None:
            self._borrowed.wait()
            self._borrowed = None

    def _log_failures(self, failures: Sequence[SaveFailed]) -> None:
        if not failures or environment.get("LOCAL_RANK", "0") != "0":
            return  # One worker of each node logs it.
        for failure in failures:
            self._log_once(
                f"step {failure.key.step} could not be saved: {failure.reason}; training continues,"
                f" the checkpoint before it stays [{failure.slug}]",
                failure.reason,
            )

    def _log_once(self, text: str, reason: str = "") -> None:
        """Log a warning, once for each reason."""
        if (reason or text) not in self._logged:
            self._logged.add(reason or text)
            _log.warning("%s", text)


def _nothing() -> None:
    """Do nothing."""


def _connect(where: str) -> SnapshotClient:
    try:
        return SnapshotClient.connect(where, timeout_s=REQUEST_TIMEOUT_S)
    except OSError as error:
        raise CheckpointError(
            f"no snapshot server: {error}",
            where=where,
            expected="the process that saves, which the agent starts, or this one",
            next_step="look at the agent's output, and at the memory and processes of the host",
            slug="snapshot-server-lost",
        ) from error


def _number_of(step: Any) -> int:
    """Return the number of finished steps after this one; 0 if it was not committed."""
    if hasattr(step, "committed"):
        return int(step.number) + 1 if step.committed else 0
    return steps_done(step)
