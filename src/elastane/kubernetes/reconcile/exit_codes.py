"""The meaning of an exit code, by the user's rules, the documentation and elastane.

| exit code | restartPolicy ExitCode |
|---|---|
| 0 | the pod succeeded |
| 1 to 127 | permanent: the job fails |
| 128 to 255 | retryable: a new pod, counted |
| 69, `NODE_UNFIT` | retryable, on another node: the agent reported that this one cannot take part |
| 75, `TRY_AGAIN` | retryable: the rendezvous or its store was out of reach |
| 143, `DRAINED` | a new pod, not counted: the agent left on SIGTERM |

The other codes of elastane follow the documentation: 1, since the job's own restart budget is used
up; 2 and 78, since the same command would fail again. The documentation of the original says 128 to
255; its code knew only 130, 137, 138 and 143, and treated 134, 139 and 255 as permanent. With
`launcher: torchrun`, 69 and 75 are a user's own codes, hence permanent, and 143 is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from elastane.errors import ExitCode
from elastane.kubernetes.model.spec import ExitCodeRule, Launcher, RuleAction

RETRYABLE_MIN = 128
_RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?")


def span(code: int | str) -> tuple[int, int] | None:
    """Return the first and last exit code that an entry of a rule names, or None."""
    if isinstance(code, int):
        return (code, code) if 1 <= code <= 255 else None
    found = _RANGE.fullmatch(code)
    if not found:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return (first, last) if 1 <= first <= last <= 255 else None


def wrong_rules(rules: tuple[ExitCodeRule, ...]) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and expectation of each entry that names no exit codes."""
    for i, rule in enumerate(rules):
        for j, code in enumerate(rule.codes):
            if span(code) is None:
                path = f"spec.exitCodeRules[{i}].codes[{j}]"
                yield path, code, 'a number from 1 to 255, or a range as "64-78"'


def ruled(code: int, rules: tuple[ExitCodeRule, ...]) -> RuleAction | None:
    """Return the action of the first rule that names the code, or None."""
    for rule in rules:
        for entry in rule.codes:
            found = span(entry)
            if found and found[0] <= code <= found[1]:
                return rule.action
    return None


def documented(code: int, launcher: Launcher) -> RuleAction:
    """Return the action for an exit code other than 0 without a rule; see the table above."""
    if launcher == "elastane":
        if code in (ExitCode.NODE_UNFIT, ExitCode.TRY_AGAIN):
            return "Retry"
        if code == ExitCode.DRAINED:
            return "Ignore"
    return "Retry" if code >= RETRYABLE_MIN else "Fail"
