"""Write deploy/constraints.txt: `make constraints`, after the test suite has passed.

The file has the versions that are installed beside this Python, of all that elastane and its extras
need. A user who wants the tested versions installs with `pip install elastane -c constraints.txt`.
torch is only named in a comment: which build fits is a question of the user's machine, and a pin
would replace the one that is there. What only torch needs, such as CUDA's packages, is left out
with it.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
FILE = HERE / "constraints.txt"
# Extras whose packages the test suite runs with. A service's client that is not installed for the
# tests (wandb, mlflow, trackio) has no tested version.
EXTRAS = ("all", "demo")
# What users bring, and the tests run beside elastane: packages of the extra `test`.
BROUGHT = frozenset(
    ("accelerate", "hydra-core", "lightning", "s3fs", "safetensors", "transformers", "webdataset")
)
_LEFT_OUT = frozenset(("torch", "elastane"))


def constraints() -> str:
    """Return the file for the packages that are installed now."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(offered())
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if name in _LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # for another platform
        waiting += _needs(name, {"", *extras})
    lines = [
        "# Versions with which elastane's tests passed: pip install elastane -c constraints.txt",
        f"# Python {platform.python_version()}, torch {version('torch')}, which is yours to choose",
        "# Made by deploy/constraints.py.",
        *(f"{name}=={found[name]}" for name in sorted(found)),
    ]
    return "\n".join(lines) + "\n"


def offered() -> Iterator[Requirement]:
    """Return what elastane, its extras and the frameworks beside it ask for, by pyproject.toml."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    yield from map(Requirement, project["dependencies"])
    waiting = [*EXTRAS]
    while waiting:
        for wanted in map(Requirement, extras[waiting.pop()]):
            if wanted.name == "elastane":
                waiting += wanted.extras
            else:
                yield wanted
    tested = map(Requirement, (*extras["test"], *extras["test-core"]))
    yield from (one for one in tested if one.name in BROUGHT)


def _needs(name: str, extras: set[str]) -> Iterator[Requirement]:
    for wanted in map(Requirement, distribution(name).requires or ()):
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield wanted


if __name__ == "__main__":
    FILE.write_text(constraints(), "utf-8")
