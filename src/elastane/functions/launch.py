"""`elastane.launch`: a function on many workers, from a notebook or a script.

    def train(lr): ...
    values = elastane.launch(train, (0.1,), nproc=4, max_restarts=3)

Owns the public function and how it meets its caller: output, Ctrl-C, values, errors.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastane.functions.failure import error_of
from elastane.functions.job import run_function
from elastane.functions.payload import FunctionCall, pack
from elastane.functions.signals import SignalReceived, at_default, raised, unheard
from elastane.functions.wish import RequestedOptions, as_text, named
from elastane.process import environment
from elastane.worker.call import MODULE

_IN_A_WORKER = "TORCHELASTIC_RUN_ID"


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int | str | None = None,
    nnodes: int | str | tuple[int, int] | None = None,
    **options: Any,
) -> dict[int, Any]:
    """Call `fn(*args, **kwargs)` in `nproc` workers, and return what they returned, by rank.

    The workers are those of `elastane run`: their environment, restarts, logs; `options` are its
    flags by name (`max_restarts=3`, `rdzv_endpoint="host:29400"`, `log_dir=...`), and so are what
    variables and elastane.toml say where nothing is said here. `nproc` may be auto (the default),
    cpu or gpu. With several nodes, each calls this alike, and gets the values of its own workers.
    Within a worker, what variables and files say was meant for the launch that made it.

    The function goes to the workers by value where it is defined in a notebook or in the program
    itself, so it may use what is defined there; else by its module's name. What it prints appears
    where this program prints. Blocks until the end, also in a program whose event loop runs.

    Raises FunctionFailedError (a WorkerFailedError), with the root cause's traceback, where it
    failed more often than `max_restarts`; UsageError and ConfigurationError for options that
    cannot be, or for what cannot be pickled; RendezvousError where the nodes did not meet.
    Ctrl-C, or this program's end in any way, ends everything. Source: accelerate's
    notebook_launcher, which forks the notebook.
    """
    if not callable(fn):
        raise TypeError(f"elastane.launch(): {fn!r} is no function")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"elastane.launch(): args = {args!r}: expected a tuple, as in (x,)")
    call = FunctionCall(fn, tuple(args), dict(kwargs or {}))
    environ = environment.snapshot()
    values = as_text({"nproc_per_node": nproc, "nnodes": nnodes, **options})
    wish = RequestedOptions(values, MODULE, ambient=_IN_A_WORKER not in environ)
    files, wish = pack(call), named(wish, call.name, environ)
    try:
        with (
            raised(at_default(signal.SIGTERM, signal.SIGHUP), SignalReceived),
            raised(unheard(signal.SIGINT), lambda _: KeyboardInterrupt()),
        ):
            ended = run_function(wish, files, environ, call.name)
    except SignalReceived as end:
        os.kill(os.getpid(), end.sigval)  # what it would have done by itself
        raise
    if ended.code != 0:
        raise error_of(call.name, ended.report, ended.code)
    return ended.values
