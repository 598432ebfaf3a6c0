"""docs/kubernetes*.md say what the code does: its tables of fields, rights, codes, events, metrics.

The tables of fields and rights are made of the code; `python tests/style/test_kubernetes_page.py`
prints them as they are now.
"""

import ast
import re
import typing

import msgspec
import pytest
from style_sources import ROOT, SRC

from elastane.kubernetes.manifests import JOB_RIGHTS, NODE_RIGHTS, RIGHTS
from elastane.kubernetes.model import JobStatus, names
from elastane.kubernetes.model.spec import (
    REPLICAS_MAX,
    ElasticJobSpec,
    ExitCodeRule,
    NodeQuarantine,
    RunPolicy,
    SchedulingPolicy,
    WorkersSpec,
)
from elastane.kubernetes.operator.probes import _COUNTERS, _OF_A_JOB
from elastane.kubernetes.reconcile import bounds, status
from elastane.kubernetes.reconcile.exit_codes import documented
from elastane.kubernetes.schema import schema_of

PATHS = sorted((ROOT / "docs").glob("kubernetes*.md"))
NESTED = {
    "schedulingPolicy": SchedulingPolicy,
    "nodeQuarantine": NodeQuarantine,
    "exitCodeRules[]": ExitCodeRule,
}
RECONCILE = sorted((SRC / "kubernetes" / "reconcile").glob("*.py"))


def page():
    return "\n".join(path.read_text("utf-8") for path in PATHS)


# ---- the tables that are made


def fields_table():
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    policy = {field.encode_name for field in msgspec.structs.fields(RunPolicy)}
    ordered = sorted(msgspec.structs.fields(ElasticJobSpec), key=lambda f: f.encode_name in policy)
    for field in ordered:
        name = field.encode_name
        if name == "replicaSpecs":
            rows += _rows(WorkersSpec, "replicaSpecs.Worker.")
            continue
        shown = f"`{name}`" + (" *" if name in policy else "")
        rows.append(_row(shown, schema_of(ElasticJobSpec)["properties"][name]))
        for key, kind in NESTED.items():
            if key.removesuffix("[]") == name:
                rows += _rows(kind, f"{key}.")
    return "\n".join(rows)


def _rows(kind, prefix):
    properties = schema_of(kind)["properties"]
    return [_row(f"`{prefix}{name}`", schema) for name, schema in properties.items()]


def _row(name, schema):
    default = schema.get("default", "")
    shown = "" if default == "" or isinstance(default, list) else f"`{default}`"
    # Of a structure the field says more than its type does.
    meaning = schema.get("description", "").replace("|", "\\|")
    return f"| {name} | {_type(schema)} | {shown} | {meaning} |"


def _type(schema):
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "number or text"
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema["type"] == "integer":
        top = f" to {high}" if high is not None and high < 1_000_000 else " and more"
        return f"{low}{top}" if low is not None else "number"
    kinds = {"string": "text", "boolean": "true, false", "array": "list", "object": "object"}
    return kinds[schema["type"]]


def rights_table(rights=(*RIGHTS, *NODE_RIGHTS)):
    rows = ["| API group | resources | verbs | what for |", "|---|---|---|---|"]
    for group, resources, verbs, why in rights:
        shown = ", ".join(f"`{one}`" for one in resources)
        rows.append(f"| {group or 'core'} | {shown} | {', '.join(verbs)} | {why} |")
    return "\n".join(rows)


def jobs_rights_table():
    return rights_table(JOB_RIGHTS)


@pytest.mark.parametrize("made", [fields_table, rights_table, jobs_rights_table])
def test_the_tables_are_those_of_the_code(made):
    assert made() in page(), f"{made()}\n\npython tests/style/test_kubernetes_page.py"


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


def told_reasons():
    """Every reason that is told by name somewhere in reconcile."""
    for path in RECONCILE:
        for node in ast.walk(ast.parse(path.read_text())):
            is_tell = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "tell"
            if is_tell and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


def test_every_event_has_its_row():
    shown = {name for row in table("event") for name in words(row[0])}
    reasons = set(told_reasons())
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


if __name__ == "__main__":
    print(fields_table(), rights_table(), jobs_rights_table(), sep="\n\n")
