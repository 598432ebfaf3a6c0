"""What `pip install` brings is enough: no module of the first page needs another package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from style_sources import ROOT

# torch imports several packages where they are installed, and goes on without them.
_PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
absent = set(sys.argv[1:])
sys.meta_path.insert(0, Absent())
import torch, elastane
from torch.utils.data import DataLoader
batches = elastane.ElasticBatchSampler(64, global_batch_size=8, seed=0)
loader = DataLoader(range(64), batch_sampler=batches)
net = torch.nn.Linear(1, 1)
with elastane.init() as job:
    job.track(net=net)
    for step, batch in job.steps(loader, until_epoch=1):
        with step:
            pass
assert step.number == 7, step.number
"""


def brought(*names: str) -> set[str]:
    """Return the distributions that these need, and themselves."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(one) for one in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [
            one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


def test_the_worker_library_imports_only_what_its_installation_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [Requirement(one).name for one in project["dependencies"]]
    there = brought("torch", *own) | {"elastane"}
    modules = packages_distributions().items()
    absent = [name for name, by in modules if not there & {canonicalize_name(one) for one in by}]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *absent],
        check=False, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
