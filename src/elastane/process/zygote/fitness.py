"""Decides whether a forked worker would equal a fresh one; gives the reason if not.

Pure checks. An empty answer means fit; any other is the reason to start the worker by exec. A value
that the interpreter or a library reads once at start cannot be changed by a variable later. So a
worker that needs another value than the zygote has is not forked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elastane.process.process import WorkerCommand

# Read at start by the interpreter, the loader, malloc and the C library's locale.
START_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
# Read at import by the thread pools of OpenMP, MKL and OpenBLAS, by NumPy and by torch.
IMPORT_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "DNNL_",
    "NPY_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_",
)  # fmt: skip
FROZEN_PREFIXES = START_PREFIXES + IMPORT_PREFIXES
# Read when a process group is made, when a device is looked for, or again in the worker. Each
# worker sets the fault handler up again.
THAWED_PREFIXES = (
    "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_", "TORCH_WORKER_", "PYTHONFAULTHANDLER",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip


def is_read_at_import(name: str) -> bool:
    """Return whether torch, or one of its dependencies, reads this variable at import."""
    return name.startswith(IMPORT_PREFIXES) and not name.startswith(THAWED_PREFIXES)


def unfit_environment(zygote: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Return the variable that differs from the zygote's and can no longer be changed."""
    for name in sorted({*zygote, *worker}):
        if not name.startswith(FROZEN_PREFIXES) or name.startswith(THAWED_PREFIXES):
            continue
        if zygote.get(name) != worker.get(name):
            have, want = zygote.get(name, "unset"), worker.get(name, "unset")
            return f"{name} is {want!r} for the worker, but the zygote started with {have!r}"
    return ""


def unfit_folder(zygote_env: Mapping[str, str], zygote_cwd: str, command: WorkerCommand) -> str:
    """Return why the worker's folder changes the meaning of its import path."""
    entries = zygote_env.get("PYTHONPATH", "").split(os.pathsep)
    relative = [entry for entry in entries if entry and not entry.startswith("/")]
    if relative and command.cwd != zygote_cwd:
        return f"PYTHONPATH has the relative entry {relative[0]!r}, and the worker another folder"
    return ""


def unfit_binding(command: WorkerCommand) -> str:
    """Return why a worker that is bound to some CPUs needs its own interpreter.

    Thread pools are sized by the CPUs of the process when torch is imported.
    """
    if command.cpus and "OMP_NUM_THREADS" not in command.env:
        return "it is bound to CPUs, and OMP_NUM_THREADS is not set"
    return ""


def unfit_script(path: str) -> str:
    """Return why `path` is not a plain source file, and so must be left to Python."""
    if not Path(path).is_file():
        return f"{path} is not a file"
    if b"\0" in Path(path).read_bytes():
        return f"{path} is no text: compiled, or an archive"
    return ""


def shadowed(folder: str, origins: Mapping[str, str]) -> str:
    """Return why a module in `folder`, first on the import path, is not the preloaded one.

    `origins`: the preloaded top-level modules that have a file, with that file.
    """
    home = Path(folder or ".").resolve()
    try:
        names = {entry.name for entry in home.iterdir()}
    except OSError:
        return ""
    for module, origin in origins.items():
        if module in names and (home / module / "__init__.py").is_file():
            mine = home / module / "__init__.py"
        elif f"{module}.py" in names:
            mine = home / f"{module}.py"
        else:
            continue
        if Path(origin).resolve() != mine.resolve():
            return f"{mine} hides {origin}, which the zygote has imported"
    return ""
