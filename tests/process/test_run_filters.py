"""--duplicate-*-filters, --logs-specs and --event-log-handler work as in torchrun."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from supervise import agent

SPECS = '''
import os
from types import SimpleNamespace


class Flat:
    """Every rank's files in one folder, without torch."""

    def __init__(self, log_dir=None, redirects=None, tee=None, local_ranks_filter=None):
        self.root = log_dir
        self.tee = tee

    @property
    def root_log_dir(self):
        return self.root

    def reify(self, envs):
        os.makedirs(self.root, exist_ok=True)
        path = lambda rank, what: os.path.join(self.root, f"{rank}.{what}")
        for rank, env in envs.items():
            env["FROM_SPECS"] = env["TORCHELASTIC_RUN_ID"]
        return SimpleNamespace(
            stdouts={r: path(r, "out") for r in envs},
            stderrs={r: "" for r in envs},
            tee_stdouts={r: path(r, "out") for r in envs if self.tee[r] & 1},
            tee_stderrs={},
            error_files={r: path(r, "error") for r in envs},
            filtered_stdout=path("all", "filtered"),
            filtered_stderr="",
        )
'''


def test_matching_lines_of_all_ranks_are_in_one_file_of_the_attempt(tmp_path: Path) -> None:
    body = """
    print(f"loss, {RANK} {RESTARTS}")
    print("other")
    tell("said")
    wait_for(f"said.{1 - RANK}.{RESTARTS}")
    raise SystemExit(RESTARTS == 0 and RANK == 0)
    """
    options = ("--nproc-per-node", "2", "--tee", "3", "--max-restarts", "1")
    filters = ("--duplicate-stdout-filters", "loss,,,nothing", "--duplicate-stderr-filters", "x")
    with agent(tmp_path, *options, *filters, body=body) as one:
        assert one.wait() == 0
        for attempt in (0, 1):
            folder = one.job_dir() / f"round_1/attempt_{attempt}"
            lines = (folder / "filtered_stdout.log").read_text().splitlines()
            words = [line.partition("]: ")[2] for line in lines]
            assert f"loss, 1 {attempt}" in words
            assert set(words) <= {f"loss, {rank} {attempt}" for rank in (0, 1)}
            assert (folder / "filtered_stderr.log").read_text() == ""


def test_a_logs_specs_class_decides_where_output_goes(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "flat-1.dist-info").mkdir(parents=True)
    (site / "flat_specs.py").write_text(SPECS)
    (site / "flat-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flat\nVersion: 1\n"
    )
    (site / "flat-1.dist-info/entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = flat_specs:Flat\n"
    )
    body = """
    print("said", RANK, os.environ["FROM_SPECS"] == os.environ["TORCHELASTIC_RUN_ID"])
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("{}")
    """
    options = ("--nproc-per-node", "2", "--logs-specs", "flat", "--tee", "1:1")
    filters = ("--duplicate-stdout-filters", "said")
    with agent(tmp_path, *options, *filters, body=body, PYTHONPATH=str(site)) as one:
        assert one.wait() == 0, one.err
        assert (one.logs / "0.out").read_text() == "said 0 True\n"
        assert (one.logs / "1.out").read_text() == "said 1 True\n"
        assert one.out.endswith("]: said 1 True\n")
        assert "said 0" not in one.out
        assert (one.logs / "all.filtered").read_text().endswith("]: said 1 True\n")
        assert (one.logs / "0.error").exists() and (one.logs / "1.error").exists()
        assert not list(one.job_dir().glob("round_*")), "the plan's own folders are not made"


def test_a_class_that_fails_while_the_job_runs_costs_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "flat-1.dist-info").mkdir(parents=True)
    (site / "flat_specs.py").write_text(SPECS.replace("os.makedirs", "os.no_such_function"))
    (site / "flat-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flat\nVersion: 1\n"
    )
    (site / "flat-1.dist-info/entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = flat_specs:Flat\n"
    )
    options = ("--logs-specs", "flat", "--redirects", "3")
    with agent(tmp_path, *options, body="print('said')", PYTHONPATH=str(site)) as one:
        assert one.wait() == 0
        assert "no_such_function" in one.err
        assert "[logs-specs]" in one.err
        (log,) = one.logs.glob("*/round_1/attempt_0/rank_0/stdout.log")
        assert log.read_text() == "said\n"


def test_events_are_lines_that_torch_reads(tmp_path: Path) -> None:
    events = pytest.importorskip("torch.distributed.elastic.events")
    with agent(tmp_path, "--event-log-handler", "console", body="pass") as one:
        assert one.wait() == 0
        found = [
            events.Event.deserialize(line)
            for line in one.err.splitlines()
            if line.startswith('{"name"')
        ]
        by_name = {event.name: event for event in found}
        done = by_name["torchelastic.worker.status.SUCCEEDED"]
        assert {"elastane.agent-started", "torchelastic.worker.status.START"} <= set(by_name)
        assert done.metadata["run_id"] == one.job_dir().name
        assert json.loads(done.serialize())
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    with agent(quiet, "--event-log-handler", "null", body="pass") as one:
        assert one.wait() == 0
        assert '{"name"' not in one.err
    shutil.rmtree(quiet)
