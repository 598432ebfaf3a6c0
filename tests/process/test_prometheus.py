"""A real Prometheus scrapes a job whose workers are killed: its series say what the log says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from jobs import PRELOAD_OPTIMIZER
from ports import free_ports

from elastane.observe.account import account_of
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "says_rank.py"
RULES = Path(__file__).parents[2] / "deploy" / "job-alerts.yaml"
DEADLINE_S = 90.0
INTERVAL = "200ms"
CONFIG = """
global: {{scrape_interval: {every}, scrape_timeout: {every}, evaluation_interval: {every}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: elastane
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Prometheus:
    """The API of a running server."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, query: str) -> dict[str, float]:
        """Return the values of an instant query by their labels, without those of all series."""
        found = self._get("query", {"query": query})["result"]
        common = {"__name__", "job", "instance", "job_name"}
        return {
            ",".join(value for name, value in one["metric"].items() if name not in common): float(
                one["value"][1]
            )
            for one in found
        }

    def alerts(self) -> set[str]:
        """Return the names of the alerts that fire or are pending."""
        return {one["labels"]["alertname"] for one in self._get("alerts", {})["alerts"]}

    def is_ready(self) -> bool:
        """Whether it answers, and its target has been scraped."""
        try:
            return self.ask("up") == {"": 1.0}
        except (httpx.HTTPError, KeyError):
            return False

    def _get(self, what: str, query: dict[str, str]) -> dict:
        return httpx.get(f"{self._api}/{what}", params=query, timeout=DEADLINE_S).json()["data"]


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """Run a server that scrapes this port, and that has the rules of `deploy`."""
    [port] = free_ports(1)
    config = folder / "prometheus.yaml"
    config.write_text(CONFIG.format(every=INTERVAL, rules=RULES, port=target))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as said:
        process = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=said,
            stderr=said,
        )
    try:
        yield Prometheus(port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.soak
def test_series_and_alerts_of_a_job_say_what_its_event_log_says(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus")
    [port] = free_ports(1)
    options = {"nnodes": "1", "nproc_per_node": 3, "max_restarts": 2, "min_workers": 1}
    options |= {"metrics_port": f"127.0.0.1:{port}", "rdzv_conf": {"last_call": 0.1, "gather": 0.2}}
    with (
        LocalCluster(
            [str(SCRIPT), "init"], folder=tmp_path / "c", preload=PRELOAD_OPTIMIZER, **options
        ) as cluster,
        prometheus(tmp_path, port) as server,
    ):
        cluster.start("a")
        wait = cluster.wait
        wait(server.is_ready, "the target is up")
        wait(lambda: server.ask("elastane_training_step"), "steps are counted")
        wait(lambda: server.alerts() == set(), "no alert")
        for kills in (1, 2):
            wait(lambda: len(cluster.nodes[0].workers()) == 3, "the agent names its workers")
            pids = cluster.nodes[0].workers()
            os.kill(pids[kills], signal.SIGKILL)
            gone = {pids[kills]}
            wait(
                lambda gone=gone: len({*cluster.nodes[0].workers()} - gone) == 3,
                "the lost worker is replaced",
            )
        kinds = 'elastane_training_incidents_total{kind="worker"}'
        wait(lambda: server.ask(kinds) == {"worker": 2.0}, "both losses are scraped")
        wait(lambda: server.ask("elastane_training_world_size") == {"": 3.0}, "all workers train")
        # On a busy host a scrape may come too late, and then nothing is known until the next.
        restarts, state = "elastane_training_restarts_total", "elastane_training_state == 1"
        wait(lambda: server.ask(restarts) == {"": 2.0}, "restarts are counted")
        wait(lambda: server.ask(state) == {"training": 1.0}, "the job trains")
        wait(
            lambda: server.ask("elastane_training_recovery_seconds_count > 0") == {"worker": 2.0},
            "both recoveries count once they are surely over",
        )
        steps = cluster.events("progress")[-1].data["steps"]
        wait(
            lambda: server.ask("elastane_training_step").get("", 0) >= steps, "the step is scraped"
        )
        account = account_of(cluster.events())
        assert account is not None
        wall_s = account.wall_s
        everything = "sum by (job_name) (elastane_training_seconds)"
        wait(lambda: server.ask(everything).get("", 0) >= wall_s, "all seconds are scraped")
        seconds: dict[str, float] = {}
        by_cause = "elastane_training_seconds > 0"
        wait(lambda: seconds.update(server.ask(by_cause)) or seconds, "seconds by cause")
        lost = {
            cause: of.seconds
            for cause, of in account.causes().items()
            if cause not in ("productive", "starting")
        }
        assert lost and lost == pytest.approx({cause: seconds[cause] for cause in lost}, abs=0.01)
        wait(lambda: server.alerts() == {"ElastaneRestartsAlmostUsed"}, "one alert fires")
        cluster.nodes[0].stop()
        wait(lambda: server.ask("up") == {"": 0.0}, "the target is down as the agent has ended")
