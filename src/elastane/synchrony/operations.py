"""The kinds of collectives, and what survivors do with one that a lost member interrupted.

`rule_of` is the table. It gives the rule for an operation by torch's name for it, its reduction,
the type of its data and its call site. An operation that is not in the table restarts the job, so
no result is wrong without notice. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

# A process, from its start to its end. It never changes; ranks do.
Identity = NewType("Identity", int)


class Rule(Enum):
    """What survivors do with an operation that none of them has delivered.

    A result that one survivor has delivered is handed to the others in any case, except for
    `PRIVATE` and `REFUSED`.
    """

    # The result has the same meaning over the survivors.
    REPEAT = "run again over the survivors"
    # The contributions were divided by a number of members.
    RESCALE = "run again, with contributions divided by the number of survivors"
    # A broadcast. It runs again from the same member; without that member, from a survivor that has
    # received it.
    ROOTED = "run again from the same member"
    # A broadcast of which each member holds a valid value: it may come from any survivor.
    AUTHORITY = "run again, from the survivor of lowest rank if the root is lost"
    # The buffers have room for a certain number of members.
    SHAPED = "run again if the number of members is the same"
    # Each member has a part of the result that no other member holds.
    PRIVATE = "restart, if a survivor has delivered it and another has not"
    # It has no known meaning in a smaller world.
    REFUSED = "restart"


class Site(Enum):
    """The caller of an operation, as far as the rules depend on it."""

    SCRIPT = "the script"
    # The same, where the program sees the first rank and world size until its end: a sum of floats
    # counts for as many members as that size says.
    FIRST_SIZE = "a script that sees the first world size"
    # Gradients, in the buckets of DistributedDataParallel: divided by the size, then summed.
    REDUCER = "DistributedDataParallel's gradients"
    # torch's communication hooks: as the reducer, but the tensor belongs to the hook.
    HOOK = "a communication hook of torch"
    # Parameters, buffers, bucket order and used parameters of DistributedDataParallel, and a
    # broadcast of a framework's own.
    AUTHORITY = "DistributedDataParallel's state"
    # A sum that is divided by the world size when it returns, or that counts.
    TRUE_SUM = "a framework's sum"
    # FSDP and tensor parallelism: each member holds a part of the parameters. It is refused.
    SHARDED = "torch's sharded parameters"


# Reductions that mean the same over fewer members, whatever the data.
_IDEMPOTENT = frozenset(("min", "max", "avg", "band", "bor"))
_SHAPED = frozenset(
    (
        *("allgather", "_allgather_base", "allgather_coalesced"),
        *("allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    )
)
_REDUCTIONS = frozenset(("allreduce", "allreduce_coalesced", "reduce"))
# Sums of which each member keeps a part: optimizers that keep a part of their state use them.
_SCATTERED = frozenset(
    (
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    )
)
_PRIVATE = _SCATTERED | {
    *("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """One operation, as it has to be the same on all members.

    `kind`: torch's name. `layout`: a digest of the types and element counts of its tensors, which
    have `elements` in all.
    `reduction`: "sum", "max", ..., or "". `root`: the member that a broadcast comes from, by
    identity, since its rank changes. `shaped`: the number of members that the buffers have room
    for; 0: any number. `counts`: whether the data are integers, and no gradients. `is_tally`:
    whether those count samples, tokens or votes: a script may divide its loss by them, or compare
    them with its size.
    """

    kind: str
    layout: int = 0
    elements: int = 0
    reduction: str = ""
    root: Identity | None = None
    shaped: int = 0
    counts: bool = False
    site: Site = Site.SCRIPT
    is_tally: bool = False

    @property
    def rule(self) -> Rule:
        """The rule for this operation."""
        return rule_of(self)

    @property
    def needs_all(self) -> bool:
        """Whether its completion proves that all members have issued it."""
        return self.kind in ("allreduce", "allreduce_coalesced", "barrier") or self.kind in _SHAPED

    @property
    def depends_on_size(self) -> bool:
        """Whether its result means something only together with the number of members."""
        is_sum = self.kind in _REDUCTIONS and self.reduction not in _IDEMPOTENT
        is_read = self.is_of_script or self.site is Site.TRUE_SUM
        return self.kind in _SHAPED or (is_sum and is_read and not self.is_scaled)

    @property
    def is_of_script(self) -> bool:
        """Whether the script called it, and no framework with rules of its own."""
        return self.site in (Site.SCRIPT, Site.FIRST_SIZE)

    @property
    def is_scaled(self) -> bool:
        """Whether its result is multiplied by the size that the program sees, over its members.

        The program may divide the sum by that size, or read it as a count over as many members.
        """
        is_sum = self.kind in _REDUCTIONS and self.reduction == "sum"
        is_measure = not self.counts or self.is_tally
        return is_sum and is_measure and self.site is Site.FIRST_SIZE

    @property
    def is_exact_tally(self) -> bool:
        """Whether it is a sum of counts that is not scaled to the size that the program sees."""
        is_sum = self.kind in _REDUCTIONS and self.reduction == "sum"
        return is_sum and self.counts and not self.is_tally and self.site is Site.FIRST_SIZE

    @property
    def is_own_sum(self) -> bool:
        """Whether it is a sum that the script makes itself on all workers, and sees unscaled."""
        is_to_all = self.kind in _REDUCTIONS and self.kind != "reduce"
        return is_to_all and self.reduction == "sum" and self.site is Site.SCRIPT

    @property
    def may_be_divided(self) -> bool:
        """Whether it is a sum of floats that the program may divide by a number of members."""
        is_refused = self.kind in _REDUCTIONS and self.rule is Rule.REFUSED
        return (self.is_scaled and not self.counts) or is_refused

    def described(self) -> str:
        """Describe the operation for a message: its kind, reduction and caller."""
        what = f"{self.kind} ({self.reduction})" if self.reduction else self.kind
        return what if self.is_of_script else f"{what} of {self.site.value}"


def why_parts_are_lost(signature: Signature, optimizer: str) -> str:
    """Return why workers keep parts of a state that are lost with them; "" if they may not.

    `optimizer`: the class in whose step the operation was called; "" outside of a step.
    """
    if signature.kind in _SCATTERED:
        return (
            f"{signature.described()} leaves a part of a sum on each worker, and a lost worker's"
            " part is on no other"
        )
    means_the_same = signature.reduction in _IDEMPOTENT or signature.counts
    is_harmless = signature.kind in _REDUCTIONS and means_the_same
    if not optimizer or signature.kind == "barrier" or is_harmless or not signature.is_of_script:
        return ""
    return (
        f"the optimizer {optimizer} calls {signature.described()} in its step, so each worker may"
        " keep a part of its state, and a lost worker's part is on no other"
    )


def rule_of(signature: Signature) -> Rule:
    """Return the rule for an operation; REFUSED if the table does not know it."""
    kind = signature.kind
    if kind == "barrier":
        return Rule.REPEAT
    if kind in _REDUCTIONS:
        rule = _rule_of_reduction(signature)
        # The result of a reduction to one member is that member's alone.
        return Rule.PRIVATE if kind == "reduce" and rule is not Rule.REFUSED else rule
    if kind == "broadcast":
        return Rule.AUTHORITY if signature.site is Site.AUTHORITY else Rule.ROOTED
    if kind in _SHAPED:
        return Rule.SHAPED
    return Rule.PRIVATE if kind in _PRIVATE else Rule.REFUSED


def _rule_of_reduction(signature: Signature) -> Rule:
    if signature.site in (Site.REDUCER, Site.HOOK):
        return Rule.RESCALE if signature.reduction == "sum" else Rule.REPEAT
    if signature.reduction in _IDEMPOTENT or signature.counts or signature.is_scaled:
        return Rule.REPEAT
    # A float sum may have been divided before, by a size that no longer holds: all members would
    # agree on parameters that are too small, and no digest would show it.
    is_true_sum = signature.reduction == "sum" and signature.site is Site.TRUE_SUM
    return Rule.REPEAT if is_true_sum else Rule.REFUSED
