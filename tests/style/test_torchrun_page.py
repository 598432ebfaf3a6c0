"""docs/torchrun.md has a row for each flag, variable, key and name that users rely on."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from style_sources import ROOT

from elastane.launcher.conf import read_conf
from elastane.launcher.options import TABLE

PAGE = (ROOT / "docs" / "torchrun.md").read_text()
_VERDICTS = ("same", "better: ", "refused", "taken with a note", "ours")
FLAGS = (
    "from torch.distributed.run import get_args_parser\n"
    "print(*[a.option_strings[0] for a in get_args_parser()._actions if a.option_strings])"
)


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text):
    """First cells, each with its verdict; a cell may name several things."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 2:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found[name] = cells[1].rstrip(" |")
    return found


def api_rows():
    for part in section("Names").split("\n### ")[1:]:
        theirs, ours = re.findall(r"`([^`]+)`", part.splitlines()[0])
        for name, verdict in rows(part).items():
            yield pytest.param(theirs, ours, name, verdict, id=f"{theirs}.{name}")


def test_every_flag_of_torchrun_has_a_row_and_every_row_is_a_flag():
    done = subprocess.run(
        [sys.executable, "-c", FLAGS], capture_output=True, text=True, timeout=60, check=True
    )
    theirs = set(done.stdout.split()) - {"-h"}
    told = set(rows(section("Flags")))
    assert theirs <= told, theirs - told
    ours = {f"--{option.name}" for option in TABLE if not option.ours}
    assert ours <= told, ours - told
    known = theirs | ours | {"--use-env", *(f"-{o.short}" for o in TABLE if o.short)}
    assert told <= known, told - known


def test_every_variable_of_a_worker_has_a_row():
    from elastane.agent.environment import RunFacts, WorkerFacts, worker_environment
    from elastane.core.model import Assignment, Fence

    assignment = Assignment(
        fence=Fence(1, 0), node_rank=0, nodes=1, rank_base=0, world_size=2, role_rank_base=0,
        role_world_size=2, master_addr="a", master_port=1, agent_store=True, restarts_used=0,
        max_restarts=0, reason="",
    )  # fmt: skip
    run = RunFacts(job="j", node_id="n", role="r", local_world_size=2)
    facts = WorkerFacts(local_rank=0, error_file="e", page_fd=3, leash="l")
    given = worker_environment({}, assignment, run, facts)
    told = rows(section("Variables"))
    missing = {n for n in given if n not in told and not n.startswith("ELASTANE_")}
    assert not missing, missing


def test_every_key_of_rdzv_conf_has_a_row():
    from elastane.launcher import conf
    from elastane.stores.etcd.settings import CONF_KEYS

    keys = {*conf._TORCHRUN, *conf._IDLE, *conf._OTHER, *CONF_KEYS} - set(conf._TLS)
    told = set(rows(section("rdzv-conf")))
    assert keys == told, keys ^ told
    for name, verdict in rows(section("rdzv-conf")).items():
        if verdict.startswith("taken with a note"):
            assert read_conf(f"{name}=1").notes


@pytest.mark.parametrize(("theirs", "ours", "name", "verdict"), list(api_rows()))
def test_a_name_of_the_page_is_there(theirs, ours, name, verdict):
    assert hasattr(importlib.import_module(theirs), name), "torch has no such name (any more)"
    assert hasattr(importlib.import_module(ours), name)
    assert verdict == "same" or verdict.startswith("better: ")


def test_every_public_name_of_torch_has_a_row():
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "elastic"))
    try:
        from test_signatures import PAIRS, public_names
    finally:
        sys.path.pop(0)
    told = {(param.values[0], param.values[2]) for param in api_rows()}
    missing = {
        (theirs, name)
        for theirs, _ in PAIRS
        for name in public_names(importlib.import_module(theirs))
        if name != "get_method_name"
    } - told
    assert not missing, missing


def test_every_verdict_is_one_of_the_three_or_says_what_is_ours():
    for title in ("Flags", "Variables", "rdzv-conf"):
        for name, verdict in rows(section(title)).items():
            assert verdict.startswith(_VERDICTS), f"{name}: {verdict}"
