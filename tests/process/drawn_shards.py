"""Checks of drawn loops whose state is sharded (`fully_shard`): each worker records its own part.

The whole gradient, update and state of a step are computed from the whole state before it, which is
put together from the parts of the workers that began it. Each worker's part is compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from drawn_checks import NEAR, Steps, begun, check_beside, check_equal, gradients, updated
from drawn_program import Sharding, part_of
from torch.utils._pytree import tree_map


def whole_of(parts: list[Any]) -> Any:
    """Return the whole state of which each shard has a part."""

    def joined(*leaves: Any) -> Any:
        one = leaves[0]
        return torch.cat(leaves) if isinstance(one, torch.Tensor) and one.dim() else one

    return tree_map(joined, *parts)


class ShardedSteps(Steps):
    """All records of a job of drawn_steps.py with `fully_shard()`, by step and process."""

    program: Sharding

    def __init__(self, program: Sharding, records: Path) -> None:
        super().__init__(program, records)
        # The weights after each step, by the world that made it.
        self._after: dict[tuple[int, tuple[int, int]], dict[str, torch.Tensor]] = {}
        self._is_one_run = not self.began_again and not self.restored

    def weights(self, step: int, ends: list[dict]) -> dict[str, torch.Tensor]:
        """Return the whole weights after a step that one world has made."""
        return self._after[step, ends[0]["fence"]]

    def _parts(self, found: Iterable[dict], get: Callable[[dict], Any]) -> dict[int, Any]:
        """Return what the first record of each shard has."""
        return {each["shard"]: get(each) for each in reversed([*found])}

    def _of(self, whole: Any, shard: int) -> Any:
        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return part_of(leaf, shard, self.program.shard)

        return tree_map(part, whole)

    def _check_made(
        self, step: int, ends: list[dict], lost: list[dict], batch: list[int] | None
    ) -> list[int]:
        self._check_alike(step, ends)
        fence = ends[0]["fence"]
        known = [*ends, *lost]
        if self._is_one_run:  # Workers that were behind have begun the step in a later world, too.
            known += [*self.made[step].values(), *self.begun[step].values()]
        befores = self._parts(known, lambda each: each["before"])
        assert len(befores) == self.program.shard, f"step {step}: state of shards {[*befores]}"
        before = whole_of([befores[shard] for shard in range(self.program.shard)])
        assert batch is not None, "a stream is not sharded here"
        self._check_samples(step, [*ends, *lost], batch)
        model = {"model": begun(self.program, before).state_dict()}
        right = gradients(self.program, model, step, batch, 1.0)
        grads = self._check_gradient(step, ends, right)
        after = updated(self.program, before, grads)
        for each in ends:
            for name, mine in self._of(after["model"], each["shard"]).items():
                assert torch.allclose(mine, each["model"][name], **NEAR), f"step {step}: {name}"
        parts = self._parts(ends, lambda each: each["model"])
        for shard in range(self.program.shard):
            parts.setdefault(shard, self._of(after["model"], shard))
        self._after[step, fence] = whole_of([parts[n] for n in range(self.program.shard)])
        return sorted(batch)

    def _check_alike(self, step: int, ends: list[dict]) -> None:
        """Check that the workers that hold the same shard agree."""
        first = self._parts(ends, lambda each: each)
        for each in ends:
            other = first[each["shard"]]
            what = f"step {step}: {{}} of shard {each['shard']}"
            for kind in ("before", "model", "optimizer", "average"):
                check_equal(other[kind], each[kind], what.format(kind))
            grads = (of["evaluations"][-1]["grads"] for of in (other, each))
            check_equal(*grads, what.format("gradients"))
            check_beside(self.program, each, f"step {step}")
            schedules = {of["before"]["schedule"] for of in ends}
            assert schedules == {step} or (self.program.late and len(schedules) == 1), schedules
            assert each["epoch"] == ends[0]["epoch"], f"step {step}: epochs"

    def _check_samples(self, step: int, members: list[dict], batch: list[int]) -> None:
        """Check that the workers of a world have used the samples of a step, each once."""
        known = [each["evaluations"][-1]["passes"] for each in members]
        used = sorted(n for own in known for numbers, _, _ in own for n in numbers)
        assert {*used} <= {*batch}, f"step {step}: {used}, {batch}"
        if len(known) == members[0]["world"]:
            assert used == sorted(batch), f"step {step}: {used}, {batch}"

    def _check_gradient(
        self, step: int, ends: list[dict], right: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Check the parts of a gradient; return the whole one, computed where none is recorded."""
        found = self._parts(ends, lambda each: each["evaluations"][-1]["grads"])
        grads: list[torch.Tensor | None] = []
        for number, whole in enumerate(right):
            parts = [self._of(whole, shard) for shard in range(self.program.shard)]
            is_used = any(of[number] is not None for of in found.values())
            for shard, own in found.items():
                grad = own[number]
                got = torch.zeros_like(parts[shard]) if grad is None else grad
                error = (got - parts[shard]).abs().max() if len(got) else torch.zeros(())
                error = error / (1e-3 + whole.abs().max())
                assert error < 1e-9, f"step {step}, parameter {number}, shard {shard}: {error}"
                parts[shard] = got
            grads.append(torch.cat(parts) if is_used else None)
        return grads

    def _check_follows(self, step: int) -> None:
        for own, each in self.made[step].items():
            first = each["before"]["model"]
            assert any(_is_near(first, other) for other in self._possible(step, own, each)), (
                f"step {step} of {own} (shard {each['shard']}) does not follow the one before it"
            )
            self._check_average(step, each)

    def _check_average(self, step: int, each: dict) -> None:
        """Check that a worker begins a step with an average that its shard had before it."""
        if not self.program.average:  # The others may have made the step before without a record.
            return
        made = self.made[step - 1].values() if step else ()
        before = [other["average"] for other in made if other["shard"] == each["shard"]]
        if not step:
            before = [self._of(self._first()["average"], each["shard"])]
        first = dict(enumerate(each["before"]["average"]))
        assert any(_is_near(first, dict(enumerate(other))) for other in before), (
            f"step {step} of shard {each['shard']}: the average does not follow"
        )

    def _possible(self, step: int, own: int, each: dict) -> list[dict[str, torch.Tensor]]:
        """Return the parts of weights with which a worker may begin a step."""
        if not step:
            return [self._of(self._first()["model"], each["shard"])]
        if own in self.made.get(step - 1, {}):
            return [self.made[step - 1][own]["model"]]
        after = (weights for (number, _), weights in self._after.items() if number == step - 1)
        return [self._of(weights, each["shard"]) for weights in after]


def _is_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], each, **NEAR) for name, each in other.items())
