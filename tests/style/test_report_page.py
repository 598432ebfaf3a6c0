"""docs/report.md has every field of the report, with its type, and no other; its example is one."""

from __future__ import annotations

import re
import shlex

import msgspec
import pytest
from style_sources import ROOT

from elastane.errors import ExitCode
from elastane.observe.report import (
    FinalReport,
    ReportedFailure,
    read_report,
    report_of,
    write_report,
)
from elastane.options.parser import parse
from elastane.options.table import BY_DEST
from elastane.protocol.diagnosis import (
    OUTCOME_FAILURE_CHARS_MAX,
    OUTCOME_FAILURES_MAX,
    OUTCOME_FAILURES_WHOLE,
)
from elastane.protocol.limits import FAILURE_TEXT_CHARS_MAX
from elastane.protocol.model import Outcome

PAGE = (ROOT / "docs" / "report.md").read_text()
ERRORS = (ROOT / "docs" / "errors.md").read_text()
EXAMPLE = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0]
_TYPES = {"string": "text", "integer": "int", "boolean": "bool", "array": "list", "null": "null"}


def tables():
    """The page's tables, each as its rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    return [
        [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
        for text in found
    ]


def told(place):
    """Field and type of each row of the first or the second table of fields."""
    table = [table for table in tables() if table[0][0] == "field"][place]
    return {row[0].strip("`"): row[1] for row in table[2:]}


def kind(schema):
    """A type of JSON in the page's words."""
    if "anyOf" in schema:
        return " or ".join(sorted(map(kind, schema["anyOf"]), key="null".__eq__))
    return "object" if "$ref" in schema else _TYPES[schema["type"]]


@pytest.mark.parametrize(("place", "struct"), [(0, FinalReport), (1, ReportedFailure)])
def test_the_fields_of_the_page_are_those_of_the_code_with_their_types(place, struct):
    schema = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]
    code = {name: kind(of) for name, of in schema.items()}
    assert told(place) == code
    assert list(told(place)) == list(struct.__struct_fields__), "in the order of the file"


def test_the_example_is_a_report_and_holds_every_field(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(EXAMPLE)
    report = read_report(str(path))
    assert report.failures and report.root_cause is not None and not report.ok
    raw = msgspec.json.decode(EXAMPLE)
    assert list(raw) == list(FinalReport.__struct_fields__)
    assert list(raw["root_cause"]) == list(ReportedFailure.__struct_fields__)
    same = ("node", "rank", "pid", "exit_code", "time_ns")
    assert all(raw["failures"][0][name] == raw["root_cause"][name] for name in same)
    write_report(str(path), report)
    assert path.read_text() == EXAMPLE, "it is laid out as it is written"


def test_the_exit_codes_of_the_page_are_those_that_end_a_job():
    table = next(table for table in tables() if table[0][0] == "`exit_code`")
    codes = {int(row[0]): re.findall("`([^`]+)`", row[1]) for row in table[2:]}
    assert set(codes) == set(map(int, ExitCode)) - {ExitCode.USAGE}
    assert "2 or 78 for a command line" in PAGE
    headings = re.findall(r"^## (\S+)$", ERRORS, re.MULTILINE)
    for slugs in codes.values():
        assert set(slugs) <= set(headings)


def test_the_bounds_of_the_text_are_those_of_the_code():
    text = " ".join(PAGE.split())
    assert f"has at most {OUTCOME_FAILURES_MAX} failures" in text
    assert f"the first {OUTCOME_FAILURES_WHOLE} with up to {FAILURE_TEXT_CHARS_MAX} char" in text
    assert f"the last {OUTCOME_FAILURE_CHARS_MAX}." in text
    assert FinalReport(job="j", ok=True, exit_code=0, reason="").version == 1
    assert "version of this format: 1." in text


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 143)])
def test_an_end_that_is_no_outcome_of_the_job_has_no_slug(ok, code):
    report = report_of("j", Outcome(ok=ok, reason="r"), code, "")
    assert (report.slug, report.root_cause, report.round, report.failures) == ("", None, None, [])
    table = next(table for table in tables() if table[0][0] == "`exit_code`")
    assert [row[1] for row in table[2:] if row[0] == str(code)] == [""]


def test_its_command_line_and_its_names_are_those_of_the_launcher():
    [block] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    options = parse(shlex.split(block.replace("\\\n", " "))[2:], {})
    assert options.text("report_file") == "report.$(hostname).json"
    option = BY_DEST["report_file"]
    assert option.env and f"`{option.env}`" in PAGE
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(code, "docs/report.md", "exec")
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
