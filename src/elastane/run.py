"""`python -m elastane.run`, as `python -m torch.distributed.run`: the same as `elastane run`.

To programs that import it, it is torch.distributed.run: parse_args, config_from_args, run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastane.cli.main import main_of

if TYPE_CHECKING:
    from elastane.cli._torchrun import (
        config_from_args,
        determine_local_world_size,
        get_args_parser,
        get_rdzv_endpoint,
        get_use_env,
        parse_args,
        parse_min_max_nnodes,
        run,
        run_script_path,
    )

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, this process's own by default; SystemExit where it does not succeed."""
    code = main_of("run", sys.argv[1:] if args is None else args, "python -m elastane.run")
    if code:
        sys.exit(code)


def __getattr__(name: str) -> Any:
    # `main` uses none of them, and starts sooner without the import.
    if name in __all__:
        return getattr(importlib.import_module("elastane.cli._torchrun"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
