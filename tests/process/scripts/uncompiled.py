"""Spare a process torch's compiler, which costs it 1.8 s of processor time to import.

The first optimizer or DDP of a process imports `torch._dynamo`, only to keep it from their methods
or to read a default. A script that compiles nothing imports this module instead, before it makes
one. Not for fully_shard(), since DTensor reads more of it. Not for a script that runs the backward
of a DDP and destroys its group without elastane: torch then may hang at exit, which the real
import hides.
"""

import sys
import types


def disable(fn=None, recursive=True, **_):
    """Return the function unchanged, or a decorator that returns it."""
    return fn if fn is not None else lambda decorated: decorated


def _module(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    return sys.modules.setdefault(name, module)


if "torch._dynamo" not in sys.modules:
    _utils = _module("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    _rules = _module("torch._dynamo.trace_rules", clear_lru_cache=lambda: None)
    dynamo = _module("torch._dynamo", disable=disable, utils=_utils, trace_rules=_rules)
    dynamo.graph_break = lambda *_: None
