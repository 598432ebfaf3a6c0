"""deploy/constraints.txt: versions that pip takes, of all that elastane offers but torch."""

import sys
from importlib.metadata import version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from style_sources import ROOT

sys.path.insert(0, str(ROOT / "deploy"))
try:
    import constraints
finally:
    sys.path.pop(0)

PINS = {
    one.name: one
    for one in map(Requirement, (
        line for line in constraints.FILE.read_text().splitlines() if not line.startswith("#")
    ))
}  # fmt: skip


def test_each_line_is_one_version_that_an_index_has():
    for name, pin in PINS.items():
        [wanted] = pin.specifier
        assert wanted.operator == "==", pin
        assert "+" not in wanted.version and not wanted.version.endswith(".*"), pin
        assert name == canonicalize_name(name) and not pin.extras and pin.marker is None, pin


def test_what_elastane_offers_has_a_version_in_its_bounds():
    for wanted in constraints.offered():
        if wanted.name == "torch":
            continue
        [pin] = PINS[canonicalize_name(wanted.name)].specifier
        assert pin.version in wanted.specifier, f"{wanted} and {pin}: make constraints"


def test_no_version_chooses_a_build_of_torch():
    build = ("torch", "triton", "nvidia-", "cuda-", "pytorch-triton", "elastane")
    assert not [name for name in PINS if name in build or name.startswith(("nvidia-", "cuda-"))]


def test_the_command_writes_what_is_installed_here_but_torch():
    written = dict(
        line.split("==") for line in constraints.constraints().splitlines() if line[0] != "#"
    )
    offered = {canonicalize_name(wanted.name) for wanted in constraints.offered()}
    assert offered - {"torch"} <= set(written)
    assert "torch" not in written
    assert written["msgspec"] == version("msgspec")
