"""`python -m elastane.cli._under_ray PID WORD...`: the agent that a Ray actor of this pid starts.

The words are those of `elastane run`. The kernel kills the agent with the actor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastane.cli.main import main_of
from elastane.process.kernel import die_with_parent


def main(words: Sequence[str]) -> int:
    """Run the agent of the actor whose pid comes first; return its exit code."""
    die_with_parent(int(words[0]))
    return main_of("run", words[1:], "elastane run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
