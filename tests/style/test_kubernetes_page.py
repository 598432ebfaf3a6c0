"""docs/kubernetes*.md say what the code does: the tables of codes, events, metrics, and the bounds.

`deploy/generate.py` writes the tables of fields and rights, and test_kube_deploy.py compares them.
"""

import ast
import re
import typing

import msgspec
import pytest
from style_sources import ROOT, SRC

from elastane.kubernetes.model import JobStatus, names
from elastane.kubernetes.model.spec import REPLICAS_MAX
from elastane.kubernetes.operator.probes import _COUNTERS, _OF_A_JOB
from elastane.kubernetes.reconcile import bounds, status
from elastane.kubernetes.reconcile.exit_codes import documented

PATHS = sorted((ROOT / "docs").glob("kubernetes*.md"))
RECONCILE = sorted((SRC / "kubernetes" / "reconcile").glob("*.py"))


def page():
    return "\n".join(path.read_text("utf-8") for path in PATHS)


# ---- what is held together by names


def table(first):
    """The rows of the table whose header begins with this cell."""
    after = page().split(f"\n| {first} |", 1)[1]
    rows = after.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip().strip("|").split(" | ")] for row in rows]


def words(cell):
    return re.findall("`([^`]+)`", cell)


def test_the_conditions_are_those_that_there_are():
    assert [name for row in table("condition") for name in words(row[0])] == [
        *("Created", "Suspended", "Restarting", "Stalled", "CrashLooping", "Degraded"),
        *("Running", "Succeeded", "Failed"),
    ]
    assert set(status._ORDER) == {name for row in table("condition") for name in words(row[0])}


def reported_reasons():
    """Every reason that is reported by name somewhere in reconcile."""
    for path in RECONCILE:
        for node in ast.walk(ast.parse(path.read_text())):
            is_report = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "report"
            if is_report and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


def test_every_event_has_its_row():
    shown = {name for row in table("event") for name in words(row[0])}
    reasons = set(reported_reasons())
    assert len(reasons) > 10
    assert reasons <= shown
    from elastane.kubernetes.reconcile.pods import Cause

    by_cluster = {f"Pod{cause}" for cause in typing.get_args(Cause)} - {"PodApp", "PodOOM"}
    assert by_cluster <= shown


@pytest.mark.parametrize("launcher", ["elastane", "torchrun"])
def test_exit_codes_mean_what_the_table_says(launcher):
    meaning = {}
    rows = table("exit code")
    for codes, elastane, torchrun in sorted(rows, key=lambda row: " to " not in row[0]):
        first, _, last = codes.partition(" to ")
        said = elastane if launcher == "elastane" or torchrun == "the same" else torchrun
        for code in range(int(first), int(last or first) + 1):
            meaning[code] = said
    for code in range(1, 256):
        told = meaning[code]
        action = "Fail" if told.startswith("permanent") else "Retry"
        action = "Ignore" if "not counted" in told else action
        assert documented(code, launcher) == action, (code, told)


def test_the_metrics_are_those_that_there_are():
    shown = {name for row in table("metric") for name in words(row[0])}
    others = {"elastane_reconcile_seconds", "elastane_operator_leader"}
    others |= {f"elastane_{one}" for one in ("jobs", "pods", "queue_depth", "workers_busy")}
    assert shown == {*_COUNTERS, *_OF_A_JOB} | others


@pytest.mark.parametrize(
    ("text", "value", "factor"),
    [
        ("at most (\\d+) characters", names.NAME_CHARS_MAX, 1),
        ("within ten minutes it waits: (\\d+) s", bounds.BACKOFF_FIRST_S, 1),
        ("up to (\\d+) minutes", bounds.BACKOFF_MAX_S, 60),
        ("PendingFirst`\\).*?(\\d+) s where the template", bounds.GRACE_S, 1),
        ("then it waits (\\d+) s", bounds.ALL_LOST_S, 1),
        ("has at most (\\d+) pods, those in trouble", bounds.WORKERS_TOLD_MAX, 1),
        ("([\\d,]+) pods for a job", REPLICAS_MAX, 1),
    ],
)
def test_bounds_are_those_of_the_code(text, value, factor):
    found = re.search(text, page(), re.DOTALL)
    assert found, text
    assert float(found[1].replace(",", "")) * factor == value


def test_ten_minutes_are_ten_minutes():
    assert bounds.QUICK_S == bounds.STARTLESS_S == 600


def test_the_status_has_what_the_page_says_of_it():
    named = set(re.findall(r"`status\.(\w+)`", page()))
    assert named <= {field.encode_name for field in msgspec.structs.fields(JobStatus)}
    assert len(named) >= 4


def test_what_the_page_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+?)(?:#[\w-]+)?\)", page()):
        assert (PATHS[0].parent / target).exists(), target


def test_what_shows_code_of_the_repository_names_what_exists():
    for name in re.findall(r"deploy/[\w./-]+", page()):
        assert (ROOT / name.rstrip(".")).exists(), name
