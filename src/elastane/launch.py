"""`python -m elastane.launch`, as `python -m torch.distributed.launch`.

It is named like the function `elastane.launch`, which the package resolves itself: this file is
for `python -m`. An import by mistake puts the module where the function was, so the module
can be called as the function can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from elastane.cli.main import main_of


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        from elastane.functions.launch import launch

        return launch(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main_of("launch", sys.argv[1:], "python -m elastane.launch"))
sys.modules[__name__].__class__ = _Callable
