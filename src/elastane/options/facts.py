"""Facts about this host, gathered without importing torch: versions, devices, CPUs.

torch is read as files: its version.py says what it was built for. An unavailable fact is an empty
string or zero, never an exception; the code that needs it fails with its own message.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from elastane.protocol.model import Versions
from elastane.version import __version__

_VERSION_LINE = re.compile(
    r"^(__version__|cuda|hip|xpu)\b[^=]*=\s*['\"]([^'\"]*)['\"]", re.MULTILINE
)
_NVIDIA_DEVICE = re.compile(r"nvidia\d+")
# Enough for importing torch from a cold file system; a bound for a driver that hangs.
ASK_TORCH_TIMEOUT_S = 120.0
_COUNT_CODE = "import sys, torch; print(torch.get_device_module(sys.argv[1]).device_count())"


def versions() -> Versions:
    """Return the versions that all nodes of a job must have in common.

    The accelerator is what torch was built for, and whether a device exists. The driver is left
    out: nodes with different drivers train together, and fleets are updated one by one.
    """
    torch = torch_build()
    accelerator = f"hip {torch['hip']}" if torch.get("hip") else ""
    if torch.get("cuda"):
        accelerator = f"cuda {torch['cuda']}" + ("" if _device_files() else ", no device")
    return Versions(
        elastane=__version__,
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        torch=torch.get("__version__", ""),
        accelerator=accelerator,
    )


def torch_build() -> dict[str, str]:
    """Return `__version__`, `cuda` and `hip` of the torch that workers would import."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
        origin = spec.origin if spec else None
        text = (Path(origin).parent / "version.py").read_text("utf-8") if origin else ""
    except (OSError, ValueError, ImportError):
        return {}
    return dict(_VERSION_LINE.findall(text))


def cpu_count() -> int:
    """Return how many CPUs this process may use, which is also torchrun's count."""
    return len(os.sched_getaffinity(0))


def gpu_count(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Return how many GPUs workers would see: those named visible, else the device files."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _device_files(dev)
    count = 0
    for name in visible.split(","):
        # As the CUDA runtime reads it: everything from the first invalid entry on is hidden.
        if not name.strip() or name.strip().startswith("-"):
            break
        count += 1
    return count


def _device_files(dev: Path = Path("/dev")) -> int:
    try:
        return sum(1 for entry in os.scandir(dev) if _NVIDIA_DEVICE.fullmatch(entry.name))
    except OSError:
        return 0


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs; torch counts them if it was built for AMD's."""
    if torch_build().get("hip"):
        return device_count("cuda", environ) or 0
    return gpu_count(environ)


def usable_gpus(environ: Mapping[str, str]) -> int:
    """Return how many accelerators the installed torch can use; 0 for a CPU build."""
    build = torch_build()
    if build.get("xpu"):
        return device_count("xpu", environ) or 0
    return visible_gpus(environ) if build.get("cuda") or build.get("hip") else 0


def device_count(kind: str, environ: Mapping[str, str]) -> int | None:
    """Ask torch, in another process, for the number of devices of a kind; None: unknown kind."""
    import subprocess

    if not kind.isidentifier():
        return None
    command = [sys.executable, "-c", _COUNT_CODE, kind]
    try:
        printed = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_TORCH_TIMEOUT_S,
            check=False,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(printed[-1]) if printed and printed[-1].isdigit() else None
