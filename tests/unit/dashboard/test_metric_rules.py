"""The metrics of jobs: their values for a view, and their names in docs, rules and dashboard."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from reports import report_of
from shown_job import write_job
from view_events import event, exited, play, settled, started

from elastane.dashboard.metrics import (
    JOB_LABEL,
    KINDS,
    METRICS,
    PREFIX,
    RECOVERY_BUCKETS_S,
    SETTLE_S,
    STATES,
    Durations,
    MeasuredState,
    RunTotals,
    families,
)
from elastane.dashboard.snapshot import SourceFacts, sections_of
from elastane.observe.account import TimeCause, account_of
from elastane.observe.events import read_events
from elastane.protocol.messages import NodeStatus, SafeCopies, StateCopy

ROOT = Path(__file__).parents[3]
PAGE, RULES = ROOT / "docs" / "metrics.md", ROOT / "deploy" / "job-alerts.yaml"
GRAFANA = ROOT / "deploy" / "grafana.json"
LOST = [
    settled(1, "a b", 4, time_s=100.0),
    started("a", 1, 2, round=1, attempt=0, time_s=101.0),
    started("b", 3, 4, round=1, attempt=0, time_s=101.0),
    exited(3, node="b", round=1, time_s=110.0),
    settled(2, "a b", 4, time_s=110.1),
    started("a", 1, 2, round=2, attempt=0, time_s=110.2),
    started("b", 3, 5, round=2, attempt=0, time_s=110.3),
    event("workers-training", "a", round=2, attempt=0, time_s=110.6),
    event("workers-training", "b", round=2, attempt=0, time_s=110.7),
]


def measured(events, now_s=200.0, report=None):
    view, totals = play(*events), RunTotals()
    for one in events:
        totals.note(one)
    totals.add(view.incidents, now_s)
    source = SourceFacts(
        now_s=now_s, key="j", folder="/f", events=len(events), has_agents=True,
        report=report,
    )  # fmt: skip
    sections = sections_of(view, source, account_of(events, now_s))
    return MeasuredState(now_s, sections, totals, report)


def samples(state):
    """Return all samples of one job, by the name and the labels besides the job's."""
    found = {}
    for family in families({"j": state}):
        for one in family.samples:
            labels = dict(one.labels)
            assert labels.pop(JOB_LABEL) == "j"
            key = (one.name.removeprefix(PREFIX), *labels.values())
            assert key not in found
            found[key] = one.value
    return found


def test_a_recovery_is_counted_once_and_lasts_until_the_last_nodes_first_step():
    found = samples(measured(LOST))
    assert found["training_incidents_total", "worker"] == 1
    assert found["training_recovery_seconds_count", "worker"] == 1
    assert found["training_recovery_seconds_sum", "worker"] == pytest.approx(0.7)
    assert found["training_recovery_seconds_bucket", "worker", "0.5"] == 0
    assert found["training_recovery_seconds_bucket", "worker", "1.0"] == 1
    assert found["training_state", "training"] == 1 and found["training_world_size",] == 4


def test_a_recovery_counts_when_no_later_step_of_its_world_can_be_missing():
    soon = samples(measured(LOST, now_s=110.3 + SETTLE_S))
    assert soon["training_incidents_total", "worker"] == 1
    assert soon["training_recovery_seconds_count", "worker"] == 0


def test_all_kinds_are_there_from_the_start_for_prometheus_to_see_the_first_increase():
    found = samples(measured(LOST[:3]))
    assert {name[1] for name in found if name[0] == "training_incidents_total"} == set(KINDS)
    assert {name[1] for name in found if name[0] == "training_state"} == set(STATES)
    assert {name[1] for name in found if name[0] == "training_seconds"} == set(map(str, TimeCause))
    assert found["training_checkpoints_total", "failed"] == 0
    assert found["training_recovery_seconds_bucket", "node", "+Inf"] == 0


def test_the_seconds_of_all_causes_sum_to_the_wall_time():
    found = samples(measured(LOST))
    spent = sum(value for name, value in found.items() if name[0] == "training_seconds")
    assert spent == pytest.approx(200.0 - 100.0, abs=0.1)


def test_stragglers_are_counted_by_reason():
    slow = event("straggler", "b", rank=2, why="loader", round=2, attempt=0, time_s=150.0)
    found = samples(measured([*LOST, slow]))
    counts = {name[1]: value for name, value in found.items() if name[0] == "training_stragglers"}
    assert counts == {"loader": 1, "cpu-share": 0, "compute": 0, "other": 0}


def test_unknown_values_have_no_sample():
    names = {name[0] for name in samples(measured(LOST[:3]))}
    unknown = {
        "training_step", "training_checkpoint_step", "training_checkpoint_time_seconds",
        "training_nodes_min", "training_standby_nodes", "training_end_time_seconds",
        "node_heartbeat_age_seconds", "node_step",
    }  # fmt: skip
    assert not names & unknown


def test_the_age_of_copies_counts_from_the_beginning_of_their_save():
    saves = [
        event("checkpoint-saved", "a", step=n, seconds=2.0, age_s=5.0, time_s=110.0 + 10 * n)
        for n in range(1, 5)
    ]
    safe = SafeCopies(
        worker=StateCopy(step=48, age_s=0.5, took_s=0.1, every_s=1.0),
        node=StateCopy(step=45, age_s=3.5, took_s=2.5),
    )
    report = msgspec.structs.replace(report_of("j"), safe=safe)
    best = [
        event("checkpoint-saved", "a", step=n, location="/best", time_s=112.0 + 10 * n)
        for n in range(1, 4)
    ]
    saves[0].data["saves"] = 4  # Of four saves within ten seconds the last is logged.
    in_order = sorted([*LOST, *saves, *best], key=lambda one: one.time_s)
    found = samples(measured(in_order, report=report))
    assert found["training_checkpoint_age_seconds",] == 200.0 - 150.0 + 5.0
    assert found["training_checkpoint_duration_seconds",] == 2.0
    assert found["training_checkpoints_total", "saved"] == 3 + 4 + 3
    assert found["training_checkpoint_interval_seconds",] == 10.0, "of saves to its own place"
    ages = {name[1]: found["training_snapshot_age_seconds", name[1]] for name in found
            if name[0] == "training_snapshot_step"}  # fmt: skip
    assert ages == {"worker": pytest.approx(0.5), "node": pytest.approx(3.5)}
    assert found["training_snapshot_duration_seconds", "node"] == 2.5
    assert found["training_snapshot_interval_seconds", "worker"] == 1.0
    assert ("training_snapshot_interval_seconds", "node") not in found
    over = event("job-ended", ok=True, exit_code=0, time_s=190.0)
    ended = samples(measured([*LOST, *saves, over]))
    assert ("training_checkpoint_age_seconds",) not in ended


def test_a_coordinator_reports_waiting_workers_and_each_nodes_last_message():
    def node(name, rank, **more):
        facts = {"host": "h", "state": "joined", "local_world_size": 2, "heard_s": 1.5}
        return NodeStatus(node_id=name, node_rank=rank, **{**facts, **more})

    nodes = (node("a", 0, progress=7, steps_per_s=2.0), node("b", 1), node("c", None))
    report = msgspec.structs.replace(report_of("j"), min_nodes=1, max_nodes=2, nodes=nodes)
    found = samples(measured(LOST, report=report))
    assert found["training_standby_nodes",] == 1 and found["training_nodes_allowed",] == 2
    assert found["node_heartbeat_age_seconds", "b"] == 1.5
    assert found["node_step", "a"] == 7 and found["node_steps_per_second", "a"] == 2.0


def test_totals_count_what_the_view_no_longer_keeps():
    totals, history = RunTotals(), play(*LOST).incidents
    totals.add(history, 200.0)
    totals.add(history, 201.0)
    assert totals.found["worker"] == 1 and sum(totals.recoveries["worker"].counts) == 1
    for number in range(5000):
        totals.note(event("checkpoint-saved", step=number))
    assert totals.checkpoints["saved"] == 5000


def test_a_duration_is_in_the_bucket_that_it_does_not_exceed():
    one = Durations()
    for seconds in (0.0, RECOVERY_BUCKETS_S[0], 0.15, 1e9):
        one.add(seconds)
    found = dict(one.buckets())
    assert found["0.1"] == 2 and found["0.2"] == 3 and found["1800.0"] == 3 and found["+Inf"] == 4


def test_the_text_of_a_whole_job_is_read_by_prometheus_own_parser(tmp_path):
    from prometheus_client import generate_latest

    events = [*read_events(write_job(tmp_path, now_s=1e9))]
    state = measured(events, now_s=1e9)

    class Registry:
        def collect(self):
            return families({"j": state, 'a "job"\n\\': state})

    text = generate_latest(Registry()).decode()
    found = {one.name for one in text_string_to_metric_families(text)}
    assert found == {PREFIX + rule.name for rule in METRICS}
    if promtool := shutil.which("promtool"):
        told = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (told.returncode, told.stdout + told.stderr) == (0, "")


def test_a_stall_counts_once_and_has_a_recovery_if_a_worker_fails_in_it():
    named = event("culprit", "a", round=1, attempt=0, time_s=109.0, still_s=4.0, ranks="3",
                  **{"class": "busy"})  # fmt: skip
    found = samples(measured([*LOST[:3], named, *LOST[3:]]))
    assert found["training_incidents_total", "stall"] == 1
    assert found["training_incidents_total", "worker"] == 0
    assert found["training_recovery_seconds_count", "stall"] == 1
    assert found["training_recovery_seconds_sum", "stall"] == pytest.approx(5.7)
    alone = samples(measured([*LOST[:3], named]))
    assert alone["training_recovery_seconds_count", "stall"] == 0


def names_in(text):
    """Return the metrics that a text names, without the suffixes of histograms."""
    found = set(re.findall(rf"\b{PREFIX}(?:training|node)_\w+", text))
    return {re.sub(r"_(total|bucket)$", "", name.removeprefix(PREFIX)) for name in found}


def test_the_page_lists_each_metric_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", PAGE.read_text("utf-8"), re.M)
    assert rows == [
        (
            PREFIX + rule.name + "_total" * (rule.kind == "counter"),
            rule.kind,
            ", ".join(f"`{label}`" for label in rule.labels),
            rule.what,
        )
        for rule in METRICS
    ]


@pytest.mark.parametrize("path", [PAGE, RULES, GRAFANA], ids=["page", "rules", "dashboard"])
def test_each_metric_in_a_query_exists(path):
    known = {rule.name for rule in METRICS}
    asked = names_in(path.read_text("utf-8"))
    assert asked and asked <= known, asked - known


VALUES = {"state": STATES, "kind": KINDS, "result": ("saved", "failed")}


def test_rules_and_dashboard_ask_for_labels_and_values_that_exist():
    labels = {PREFIX + rule.name: {*rule.labels, JOB_LABEL, "le"} for rule in METRICS}
    for path in (RULES, GRAFANA):
        text = path.read_text("utf-8").replace('\\"', '"')
        for name, within in re.findall(rf"({PREFIX}\w+?)(?:_total|_bucket)?\{{([^}}]*)\}}", text):
            for label, _, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', within):
                assert label in labels[name], (name, label)
                if label in VALUES and name != f"{PREFIX}node_workers":
                    assert {*value.split("|")} <= {*VALUES[label]}, (name, label, value)
        for by in re.findall(r"by \(([^)]*)\)", text):
            assert {*by.split(", ")} <= set.union(*labels.values()), by


def test_prometheus_accepts_the_rules():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, of Prometheus")
    told = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    count = RULES.read_text().count("- alert:")
    assert told.returncode == 0 and f"SUCCESS: {count} rules found" in told.stdout, told.stderr


def test_the_dashboard_asks_for_the_job_that_was_chosen():
    board = json.loads(GRAFANA.read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 12 and all(f'{JOB_LABEL}=~"$job"' in query for query in queries)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
