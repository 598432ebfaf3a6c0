# ruff: noqa: E402 - what the module begins with is noted before the first import
"""Prints as JSON all facts that a program can learn about its own process."""

start = list(globals())

import faulthandler
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import traceback

imported_at_start = set(sys.modules)


class Thing:
    """A class of __main__, for pickle."""

    def __init__(self, value):
        self.value = value


def square(thing):
    return Thing(thing.value**2)


def main_module():
    spec = globals()["__spec__"]
    return {
        "keys": start,
        "name": __name__,
        "file": globals().get("__file__"),
        "cached": globals().get("__cached__"),
        "package": globals()["__package__"],
        "doc": __doc__,
        "spec": spec and [spec.name, spec.origin, type(spec.loader).__name__],
        "loader": type(globals()["__loader__"]).__name__,
        "builtins": repr(globals()["__builtins__"]),
        "annotations": globals().get("__annotations__"),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
    }


def raw_of(stream):
    return getattr(stream.buffer, "raw", stream.buffer)  # unbuffered: it is the raw one itself


def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        found[name] = {
            "attributes": [
                stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering,
                stream.write_through, stream.isatty(), stream.newlines, stream.closed,
            ],
            "buffer": [type(stream.buffer).__name__, stream.buffer.name, stream.buffer.mode],
            "raw": [type(raw_of(stream)).__name__, raw_of(stream).name],
            "same": getattr(sys, f"__{name}__") is stream,
            "seekable": stream.seekable(),
        }  # fmt: skip
    return found


def status():
    wanted = ("SigBlk", "SigIgn", "SigCgt", "Threads", "NoNewPrivs", "Seccomp", "Umask", "Name")
    with open("/proc/self/status") as file:
        pairs = [line.split(":", 1) for line in file]
    found = {name: value.strip() for name, value in pairs if name in wanted}
    # A fork has torch's handler of fatal signals, which asks other threads by SIGUSR2.
    caught = int(found["SigCgt"], 16) & ~(1 << signal.SIGUSR2 - 1)
    return found | {"SigCgt": f"{caught:x}"}


def printed(line):
    # Closed, not dropped: a Popen that is dropped before its child has ended keeps its pipe open.
    with os.popen(line) as stream:
        return stream.read()


def process():
    with open("/proc/self/cmdline", "rb") as file:
        line = file.read()
    with open("/proc/self/environ", "rb") as file:
        variables = file.read()
    return {
        "cmdline": os.fsdecode(line),
        "proc environ": sorted(os.fsdecode(variables).split("\0")),
        "imported": sorted({"torch", "numpy", "torch.nn"} & imported_at_start),
        "environ": dict(os.environ),
        "getenv": printed("printenv FROM_TEST") if "FROM_TEST" in os.environ else None,
        "cwd": os.getcwd(),
        "oom": open("/proc/self/oom_score_adj").read(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "fds": sorted(os.listdir("/proc/self/fd"), key=int),
        "handlers": {s.name: repr(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
        "timers": [signal.getitimer(kind) for kind in range(3)],
        "status": status(),
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": [entry for entry in sys.path if "/tmp" not in entry.partition("pytest-of")[0]],
        "flags": list(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()],
        "hooks": [
            sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
            sys.gettrace() is None, sys.getprofile() is None, hasattr(sys, "last_value"),
        ],
        "gc": gc.isenabled(),
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "tempdir": tempfile.gettempdir(),
        "logging": [logging.root.level, repr(logging.root.handlers), logging.root.disabled],
        "young": logging.LogRecord("n", 1, "p", 1, "m", (), None).relativeCreated < 20_000,
        "threads": [repr(threading.current_thread().name), threading.active_count()],
        "main_thread": threading.current_thread() is threading.main_thread(),
    }  # fmt: skip


def packages():
    import torch
    import torch.distributed

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "debug": str(torch.distributed.get_debug_level()),
        "dtype": str(torch.get_default_dtype()),
        "distributed": torch.distributed.is_initialized(),
        "grad": torch.is_grad_enabled(),
        "seeded": torch.manual_seed(7) and torch.rand(3).tolist(),
        "mm": float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()),
    }


def sources():
    try:
        square(3)
    except AttributeError:
        text = traceback.format_exc()
    return {
        "source": inspect.getsource(Thing),
        "file": inspect.getsourcefile(square),
        "pickle": pickle.loads(pickle.dumps(Thing(5))).value,
        "pickled_as": Thing.__module__,
        "traceback": text,
    }


def children():
    found = {
        "name": multiprocessing.current_process().name,
        "parent": repr(multiprocessing.parent_process()),
        "key": len(multiprocessing.current_process().authkey),
        "active": repr(multiprocessing.active_children()),
    }
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = [thing.value for thing in pool.map(square, [Thing(2), Thing(3)])]
    return found


def loader():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=3, num_workers=2)
    return {"batches": [batch[0].tolist() for batch in data]}


PARTS = {
    "process": process, "main": main_module, "streams": streams, "interpreter": interpreter,
    "sources": sources, "packages": packages, "children": children, "loader": loader,
}  # fmt: skip

if __name__ == "__main__":
    wanted = os.environ.get("PROBE", ",".join(PARTS)).split(",")
    print(json.dumps({part: PARTS[part]() for part in wanted}))
