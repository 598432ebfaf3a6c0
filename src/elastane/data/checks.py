"""Checks of arguments: whole numbers in a range, datasets with a length.

How it fails: ConfigurationError, which names the argument.
"""

from __future__ import annotations

import operator

from elastane.errors import ConfigurationError

SEED_END = 2**64
# The longest epoch: two halves of at most 31 bits (data.permutation), within a 64-bit position.
N_MAX = 2**62


def whole(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return `value` as an int; raises ConfigurationError unless it is a whole number in range.

    NumPy's integers are accepted. True and 3.0 are refused, since they are usually mistakes.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(
            f"{name} is {value!r}",
            expected=f"a whole number {bounds}",
            next_step=f"correct {name} where the sampler, the feed or the ledger is called",
            slug="data-size",
        )
    return number


def ceil_div(amount: int, by: int) -> int:
    """Return amount / by, rounded up; exact for any size."""
    return -(-amount // by)


def length_of(dataset: object) -> int:
    """Return the length of a dataset; raises ConfigurationError if it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__} and has no length",
            expected="a dataset with __len__ and samples by index",
            next_step="for data without a length use elastane.ElasticStream",
            slug="data-size",
        ) from None
