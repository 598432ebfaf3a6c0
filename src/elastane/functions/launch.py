"""`elastane.launch`: a function on many workers, from a notebook or a script.

    def train(lr): ...
    values = elastane.launch(train, (0.1,), nproc=4, max_restarts=3)

Owns the public function and its behaviour towards the caller: output, Ctrl-C, values, errors.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastane.functions.failure import error_of
from elastane.functions.job import run_function
from elastane.functions.payload import FunctionCall, pack
from elastane.functions.request import RequestedOptions, as_text, with_defaults
from elastane.functions.signals import (
    SignalReceived,
    handled_by_loop,
    raise_on,
    with_default_handler,
)
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
    """Call `fn(*args, **kwargs)` in `nproc` workers, and return their results by rank.

    The workers are those of `elastane run`, with its environment, restarts and logs. `options` are
    its flags by name (`max_restarts=3`, `rdzv_endpoint="host:29400"`, `log_dir=...`). Variables and
    elastane.toml set the others; within a worker they are ignored, as they were meant for the
    launch that started it. `nproc` may be auto (the default), cpu or gpu. With several nodes, each
    makes the same call and gets the values of its own workers.

    A function defined in a notebook or in the main program goes to the workers by value, with the
    definitions that it uses. Any other function goes by its module's name. Its output appears where
    this program prints. Blocks until the end, also while an event loop runs.

    Raises FunctionFailedError (a WorkerFailedError) with the root cause's traceback after more than
    `max_restarts` failures. Raises UsageError and ConfigurationError for impossible options or
    objects that cannot be pickled, and RendezvousError if the nodes did not meet. Ctrl-C, or any
    end of this program, ends the job. Source: accelerate's notebook_launcher, which forks the
    notebook.
    """
    if not callable(fn):
        raise TypeError(f"elastane.launch(): {fn!r} is no function")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"elastane.launch(): args = {args!r}: expected a tuple, as in (x,)")
    call = FunctionCall(fn, tuple(args), dict(kwargs or {}))
    environ = environment.snapshot()
    values = as_text({"nproc_per_node": nproc, "nnodes": nnodes, **options})
    request = RequestedOptions(values, MODULE, ambient=_IN_A_WORKER not in environ)
    files, request = pack(call), with_defaults(request, call.name, environ)
    try:
        with (
            raise_on(with_default_handler(signal.SIGTERM, signal.SIGHUP), SignalReceived),
            raise_on(handled_by_loop(signal.SIGINT), lambda _: KeyboardInterrupt()),
        ):
            ended = run_function(request, files, environ, call.name)
    except SignalReceived as end:
        os.kill(os.getpid(), end.sigval)  # the signal's default action
        raise
    if ended.code != 0:
        raise error_of(call.name, ended.report, ended.code)
    return ended.values
