"""docs/torchrun-reference.md has a row for each flag, variable, key and name that users rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest
from style_sources import ROOT

from elastane.errors import UsageError
from elastane.options import parser
from elastane.options.parser import parse
from elastane.options.rendezvous import read_conf
from elastane.options.table import BY_DEST, TABLE

PAGE = (ROOT / "docs" / "torchrun-reference.md").read_text()
GUIDE = (ROOT / "docs" / "torchrun.md").read_text()
_VERDICTS = ("same", "better: ", "refused", "ignored, with a note", "ours")
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
    from elastane.process.worker_environment import RunFacts, WorkerFacts, worker_environment
    from elastane.protocol.model import Assignment, Fence

    assignment = Assignment(
        fence=Fence(1, 0), node_rank=0, nodes=1, rank_base=0, world_size=2, role_rank_base=0,
        role_world_size=2, master_addr="a", master_port=1, agent_store=True, restarts_used=0,
        max_restarts=0, reason="",
    )  # fmt: skip
    run = RunFacts(job="j", node_id="n", role="r", local_world_size=2)
    facts = WorkerFacts(local_rank=0, error_file="e", page_fd=3, process_mark="l")
    given = worker_environment({}, assignment, run, facts)
    told = rows(section("Variables"))
    missing = {n for n in given if n not in told and not n.startswith("ELASTANE_")}
    assert not missing, missing


def test_every_key_of_rdzv_conf_has_a_row():
    from elastane.options import rendezvous
    from elastane.stores.etcd.settings import CONF_KEYS

    keys = {*rendezvous._TORCHRUN, *rendezvous._IDLE, *rendezvous._OTHER, *CONF_KEYS} - set(
        rendezvous._TLS
    )
    told = set(rows(section("rdzv-conf")))
    assert keys == told, keys ^ told
    for name, verdict in rows(section("rdzv-conf")).items():
        if verdict.startswith("ignored, with a note"):
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


# Of launchers that torch did not ship: the options that they define, by their sources.
TORCHELASTIC = [
    *("--nnodes", "--nproc_per_node", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id"),
    *("--rdzv_conf", "--standalone", "--max_restarts", "--monitor_interval", "--start_method"),
    *("--role", "-m", "--module", "--no_python", "--log_dir", "-r", "--redirects", "-t", "--tee"),
    *("--node_rank", "--master_addr", "--master_port", "--use_env"),
]
BAGUA = [*TORCHELASTIC, "--run_path"]
BAGUA += [
    f"--{name.replace('-', '_')}"
    for name in (*parser._VARIABLES, *parser._ADVICE)
    if name != "use-env"  # TorchElastic had it too
]


def taken(option):
    """Parse a line with this option; UsageError where the launcher has none of that name."""
    name = option.lstrip("-").replace("-", "_")
    found = BY_DEST.get(name) or next((o for o in TABLE if o.short and o.short == name), None)
    value = []
    if found is not None and found.kind != "flag":
        value = [found.choices[0] if found.choices else found.default or "1"]
    return parse([option, *value, "train.py"], {})


@pytest.mark.parametrize(
    ("title", "options"), [("TorchElastic", TORCHELASTIC), ("Bagua", BAGUA)], ids=["te", "bagua"]
)
def test_every_option_of_an_older_launcher_has_a_row_that_is_true(title, options):
    told = rows(section(title))
    assert set(told) == set(options), set(told) ^ set(options)
    for option, verdict in told.items():
        if not verdict.startswith("refused: "):
            taken(option)
            continue
        with pytest.raises(UsageError) as caught:
            taken(option)
        assert caught.value.slug == "unknown-option"
        variable = parser._VARIABLES.get(option.lstrip("-").replace("_", "-"), "")
        assert variable in verdict and variable in caught.value.next_step


@pytest.mark.parametrize("title", ["TorchElastic", "Bagua"])
def test_what_is_advised_in_place_of_an_older_default_is_a_command_line(title):
    told = rows(section(title))
    advised = {words for verdict in told.values() for words in re.findall("`(--[^`]+)`", verdict)}
    assert {"--max-restarts 3", "--nproc-per-node auto"} <= advised
    for words in advised - {"--master_addr"}:
        parse([*words.split(), "train.py"], {})
    for option in ("--nproc_per_node", "--max_restarts"):
        default = BY_DEST[option.lstrip("-")].default
        assert f"{default} here" in told[option], f"{option}: {default} by default"


def test_the_calls_of_the_page_are_ones_that_python_and_the_launcher_take():
    import elastane
    from elastane.elastic.launcher import LaunchConfig
    from elastane.functions.request import as_text

    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    calls = {
        ast.unparse(node.func): node
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
    }
    keywords = {word.arg: 1 for word in calls["elastane.launch"].keywords}
    bound = inspect.signature(elastane.launch).bind("fn", (), **keywords)
    as_text(bound.arguments.get("options", {}))
    config = {word.arg: ast.literal_eval(word.value) for word in calls["LaunchConfig"].keywords}
    assert LaunchConfig(**config).max_restarts == 3, "as the page says of its default"
    assert LaunchConfig(1, 1, 1).rdzv_backend == "etcd"


def test_every_link_of_the_two_pages_leads_somewhere():
    for page in (PAGE, GUIDE):
        headings = {
            line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("## ")
        }
        for target in re.findall(r"\]\(([^)]+)\)", page):
            if target.startswith("#"):
                assert target[1:] in headings, target
            else:
                assert (ROOT / "docs" / target.partition("#")[0]).is_file(), target
