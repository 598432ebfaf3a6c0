"""Run suites on each Python that this machine has, and print a table of what ran: `make matrix`.

    python tests/shared/matrix.py --torch torch==2.13.0 tests/unit tests/cli

Each Python gets a virtual environment outside of the tree, in ~/.cache/elastane-matrix, which stays
for the next run. A CUDA build of torch has gigabytes and is never installed: where pip would take
one, or none is to be had, the suites run without torch, and files that import it are left out. The
exit status is 1 if a suite failed, if a Python that is there could not be made ready, or if there
is none. A Python that is not on this machine is a row of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TREE = Path(__file__).parents[2]
# Parts of the names of packages that only a CUDA build of torch needs.
_CUDA = re.compile(r"(nvidia|cuda)-")
_CONFLICT = "The conflict is caused by:"
_REASON_CHARS_MAX = 240
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_HEAD = (
    "Python",
    "torch",
    "passed",
    "failed",
    "skipped",
    "files without torch",
    "what was not run",
)


@dataclass
class Row:
    """What ran on one Python."""

    python: str
    torch: str = "-"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    left_out: int = 0
    why: str = ""
    is_bad: bool = field(default=False, repr=False)

    def cells(self) -> list[str]:
        """Return the texts of the row."""
        counts = [str(one) for one in (self.passed, self.failed, self.skipped, self.left_out)]
        return [self.python, self.torch, *counts, self.why or "-"]


class NotReadyError(Exception):
    """An environment cannot be made; the text says why."""


def find_python(version: str) -> str | None:
    """Return an interpreter of this version, from PATH, from uv or from pyenv."""
    for path in _candidates(version):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if _output([path, "-c", _VERSION]).strip() == version:
                return path
    return None


def _candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    if uv := shutil.which("uv"):
        with contextlib.suppress(subprocess.SubprocessError):
            yield _output([uv, "python", "find", version]).strip()
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for folder in sorted(pyenv.glob(f"versions/{version}.*"), reverse=True):
        yield str(folder / "bin/python")


def torch_fault(report: str) -> str:
    """Return why torch is not to be installed, by pip's report of what it would install; or ""."""
    names = [one["metadata"]["name"].lower() for one in json.loads(report)["install"]]
    cuda = [name for name in names if _CUDA.match(name)]
    return f"torch: the wheel for it is a CUDA build, of {len(names)} packages" if cuda else ""


def make_ready(row: Row, python: str, torch: str) -> Path:
    """Make the environment of a Python; return its interpreter. NotReadyError where pip fails."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastane-matrix"
    own = folder / row.python / "bin/python"
    if not own.exists():
        _run([python, "-m", "venv", str(own.parents[1])], "venv")
        _run([own, *_PIP, "--upgrade", "pip"], "pip")
    if _has_torch(own) or not (fault := _fault_of(own, torch)):
        _run([own, *_PIP, *shlex.split(torch)], "torch")
        _run([own, *_PIP, "-e", f"{TREE}[demo,test]"], "packages of the tests")
        row.torch = _output([own, "-c", "import torch; print(torch.__version__)"]).strip()
    else:
        row.why = fault
        _run([own, *_PIP, "-e", f"{TREE}[test-core]"], "packages of the tests")
    return own


# Not --quiet: pip then says that requirements conflict, and not which.
_PIP = ("-m", "pip", "install", "--no-compile", "--disable-pip-version-check")


def _has_torch(own: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([own, "-c", code], check=False).returncode == 0


def _fault_of(own: Path, torch: str) -> str:
    report = own.parents[1] / "torch.json"
    words = [own, *_PIP, "--dry-run", "--report", report, *shlex.split(torch)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        return f"torch: {reason(done.stdout, done.stderr)}"
    return torch_fault(report.read_text())


def run_suites(row: Row, own: Path, suites: Sequence[str], jobs: str) -> None:
    """Run the suites, and count what ran."""
    report, left_out = own.parents[1] / "report.xml", own.parents[1] / "left-out.txt"
    words = [str(own), "-m", "pytest", "-q", "-n", jobs, f"--junit-xml={report}"]
    if row.torch == "-":
        words += ["-p", "without_torch", f"--left-out={left_out}"]
    report.unlink(missing_ok=True)
    left_out.unlink(missing_ok=True)
    rc = subprocess.run([*words, *suites], cwd=TREE, check=False).returncode
    row.is_bad = rc != 0
    if left_out.exists():
        row.left_out = len(set(left_out.read_text().splitlines()))
    if not report.exists():
        row.why = f"pytest ended with {rc}, and without a report"
        return
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    row.failed, row.skipped = count["failures"] + count["errors"], count["skipped"]
    row.passed = count["tests"] - row.failed - row.skipped


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [_HEAD, ("---",) * len(_HEAD), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _run(words: Sequence[str | Path], what: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotReadyError(f"{what}: {reason(done.stdout, done.stderr)}")


def _output(words: Sequence[str | Path]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def reason(out: str, err: str) -> str:
    """Return why pip failed, of bounded length: what conflicts, or the last line of an error."""
    lines = out.partition(_CONFLICT)[2].splitlines()[1:]
    conflict = [line.strip() for line in takewhile(str.strip, lines)]
    if conflict:
        return "; ".join(conflict)[:_REASON_CHARS_MAX]
    lines = [line for line in err.splitlines() if line.strip() and "notice" not in line]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
    return errors[-1][:_REASON_CHARS_MAX]


def main() -> int:
    """Run all that there is; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--torch", required=True, help="what pip is to install as torch")
    parser.add_argument("--versions", default=",".join(VERSIONS), help="3.12,3.13")
    parser.add_argument("--jobs", default="2", help="test processes")
    parser.add_argument("suites", nargs="+", help="paths and options of pytest")
    args, options = parser.parse_known_args()
    rows = []
    for version in args.versions.split(","):
        row = Row(version)
        rows.append(row)
        python = find_python(version)
        if python is None:
            row.why = "this Python is not on the machine"
            continue
        print(f"== Python {version}: {python}", flush=True)
        try:
            run_suites(
                row, make_ready(row, python, args.torch), [*args.suites, *options], args.jobs
            )
        except NotReadyError as error:
            row.why, row.is_bad = str(error), True
    print(f"\n{table(rows)}", end="")
    has_run = any(row.passed for row in rows)
    return int(any(row.is_bad for row in rows) or not has_run)


if __name__ == "__main__":
    sys.exit(main())
