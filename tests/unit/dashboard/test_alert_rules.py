"""Each alert of deploy/job-alerts.yaml fires on its fault, and on no other one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[3] / "deploy" / "job-alerts.yaml"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text("utf-8"))
PREFIX = "elastane_training_"
# Minutes after the start at which alerts are asked for, and the number of samples, one a minute.
AT_MIN, COUNT = 120, 130
# A job that trains well: a step a second, two of ten restarts, and a checkpoint every ten minutes.
WELL = {
    'state{state="training"}': f"1x{COUNT}",
    'state{state="stalled"}': f"0x{COUNT}",
    'state{state="waiting"}': f"0x{COUNT}",
    'state{state="failed"}': f"0x{COUNT}",
    "step": f"0+60x{COUNT}",
    "restarts_total": f"2x{COUNT}",
    "restarts_allowed": f"10x{COUNT}",
    "goodput_ratio": f"0.97x{COUNT}",
    "start_time_seconds": f"0x{COUNT}",
    'recovery_seconds_bucket{kind="worker",le="1.0"}': f"0+1x{COUNT}",
    'recovery_seconds_bucket{kind="worker",le="1800.0"}': f"0+1x{COUNT}",
    'recovery_seconds_bucket{kind="worker",le="+Inf"}': f"0+1x{COUNT}",
    "checkpoint_age_seconds": f"300x{COUNT}",
    "checkpoint_interval_seconds": f"600x{COUNT}",
    'snapshot_age_seconds{survives="node"}': f"20x{COUNT}",
    'snapshot_interval_seconds{survives="node"}': f"30x{COUNT}",
    'checkpoints_total{result="saved"}': f"0+1x{COUNT}",
    'checkpoints_total{result="failed"}': f"1x{COUNT}",
}
IDLE = {'state{state="training"}': f"0x{COUNT}", "step": f"500x{COUNT}"}
FAULTS = {
    "": {},
    "ElastaneJobFailed": {**IDLE, 'state{state="failed"}': f"1x{COUNT}"},
    "ElastaneJobDoesNotTrain": {**IDLE, 'state{state="waiting"}': f"1x{COUNT}"},
    "ElastaneJobStalled": {**IDLE, 'state{state="stalled"}': f"1x{COUNT}"},
    "ElastaneJobMakesNoSteps": {"step": f"500x{COUNT}"},
    "ElastaneRestartsAlmostUsed": {"restarts_total": f"8x{COUNT}"},
    "ElastaneGoodputLow": {"goodput_ratio": f"0.6x{COUNT}"},
    "ElastaneRecoveriesSlow": {
        'recovery_seconds_bucket{kind="worker",le="1.0"}': f"0x{COUNT}",
    },
    "ElastaneCheckpointOld": {
        "checkpoint_age_seconds": f"4000x{COUNT}",
        "checkpoint_interval_seconds": f"3600x{COUNT}",
    },
    "ElastaneCheckpointOverdue": {"checkpoint_age_seconds": f"2600x{COUNT}"},
    "ElastaneSnapshotOverdue": {'snapshot_age_seconds{survives="node"}': f"300x{COUNT}"},
    "ElastaneCheckpointsFail": {'checkpoints_total{result="failed"}': f"0+1x{COUNT}"},
}


def series(name, values):
    """Return a series of the job as promtool reads it; `1x3` is 1, 1, 1, 1."""
    metric, _, labels = name.partition("{")
    labels = f'job_name="job",{labels}' if labels else 'job_name="job"}'
    expanded = values if "+" in values else values.replace("x", "+0x")
    return {"series": f"{PREFIX}{metric}{{{labels}", "values": expanded}


def fired(folder, faults):
    """Assert of jobs with these faults which alerts fire, and that no other one does."""
    tests = []
    for alert, fault in faults.items():
        given = [series(*each) for each in {**WELL, **fault}.items()]
        asked = [
            {"eval_time": f"{AT_MIN}m", "alertname": name, "exp_alerts": []}
            for name in ALERTS
            if name != alert
        ]
        expr = f'count(ALERTS{{alertstate="firing",alertname="{alert}",job_name="job"}})'
        fires = [{"expr": expr, "eval_time": f"{AT_MIN}m", "exp_samples": [{"value": 1}]}]
        tests.append(
            {
                "name": alert or "well",
                "interval": "1m",
                "input_series": given,
                "alert_rule_test": asked,
                "promql_expr_test": fires if alert else [],
            }
        )
    path = folder / "tests.yaml"  # JSON is YAML.
    whole = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path.write_text(json.dumps(whole))
    return subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )


def test_each_alert_has_a_fault():
    assert {*FAULTS} - {""} == {*ALERTS}


def test_each_alert_fires_on_its_fault_and_on_no_other(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Prometheus")
    told = fired(tmp_path, FAULTS)
    assert told.returncode == 0 and "SUCCESS" in told.stdout, told.stdout + told.stderr
    mixed = {"ElastaneJobFailed": FAULTS["ElastaneJobStalled"]}
    assert fired(tmp_path, mixed).returncode != 0, "a wrong alert is found"
