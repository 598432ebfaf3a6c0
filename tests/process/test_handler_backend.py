"""`elastane run --rdzv-backend NAME` with a handler of another package."""

from __future__ import annotations

import importlib
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_harness import until
from supervise import words_agent, write_script

from elastane.cli import _handler
from elastane.options.parser import parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite_rendezvous.py"
PACKAGE = '''
"""A rendezvous of one node, by torch's own classes; it writes down what is asked of it."""

import json
import os
import torch.distributed.elastic.rendezvous as rdzv
from pathlib import Path
from torch.distributed import HashStore, PrefixStore


class Handler(rdzv.RendezvousHandler):
    def __init__(self, params):
        self.params, self.store, self.rounds = params, HashStore(), 0
        self.note("made", config=params.config, endpoint=params.endpoint, low=params.min_nodes)

    def note(self, what, **more):
        with (Path(os.environ["SUPERVISE_FOLDER"]) / "notes").open("a") as file:
            file.write(json.dumps({"what": what, **more}) + "\\n")

    def get_backend(self):
        return "theirs"

    def next_rendezvous(self):
        kind = getattr(rdzv, self.params.endpoint, None) or globals().get(self.params.endpoint)
        if kind is not None:
            raise kind("of the handler")
        self.rounds += 1
        self.note("met")
        store = PrefixStore(str(self.rounds), self.store)
        return rdzv.RendezvousInfo(store, 0, 1, rdzv.RendezvousStoreInfo("127.0.0.1", 29777))

    def is_closed(self):
        return False

    def set_closed(self):
        self.note("closed")

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return self.params.run_id

    def shutdown(self):
        self.note("shutdown")
        return True


class NoKindOfError(Exception):
    pass


def handler():
    return Handler
'''
BROKEN = """
absent = no_module_of_this_name:handler
nameless = json:no_such_name
"""


@pytest.fixture
def site(tmp_path):
    """A folder with an installed package of handlers, and the variables to find it."""
    folder = tmp_path / "site"
    info = folder / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    offer(folder, "theirs = theirs_rendezvous:handler", PACKAGE)
    return folder


def offer(site, entries, text="", module="theirs_rendezvous"):
    """Let the package offer these handlers, in a module with this text."""
    info = site / "theirs-1.0.dist-info"
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entries}\n")
    (site / f"{module}.py").write_text(text)


@pytest.fixture
def start(tmp_path, site):
    """Start `elastane run` with another package's handler and a script."""
    with ExitStack() as stack:

        def starting(body, *options, backend="theirs", folder=tmp_path, **env):
            folder.mkdir(exist_ok=True)
            words = ("--rdzv-backend", backend, "--nproc-per-node", "2", *options)
            words = (*words, write_script(folder, body), "arg-${local_rank}")
            return stack.enter_context(words_agent(folder, *words, PYTHONPATH=str(site), **env))

        yield starting


def notes(one, what):
    path = one.folder / "notes"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = whole.splitlines()  # The last one may be half written.
    return [note for note in map(json.loads, lines) if note["what"] == what]


ALL = (
    "--nnodes 1:3 --nproc-per-node 2 --max-restarts 4 --monitor-interval 0.5 --role r --rdzv-id i"
    " --rdzv-endpoint h:1 --rdzv-conf a=1,timeout=5 --local-addr x --event-log-handler console"
    " --signals-to-handle SIGTERM,SIGINT --duplicate-stdout-filters a,b --virtual-local-rank"
    " --duplicate-stderr-filters c --shutdown-timeout 3 --redirects 3 --tee 1:1"
    " --local-ranks-filter 0 --numa-binding node --log-dir logs script.py --x 1"
)
LINES = [ALL, "script.py", "-m mod a --b", "--no-python true a", "--run-path script.py a"]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_the_launch_that_torchrun_makes_of_it(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("script.py").touch()
    words = ["--rdzv-backend", "theirs", *line.split()]
    torchrun = importlib.import_module("torch.distributed.run")
    reference, command, args = torchrun.config_from_args(torchrun.parse_args(words))
    options = parse(words, {})
    mine = _handler.config_of(options, {})
    if "--run-path" not in line:
        assert _handler.argv_of(options, {}) == [command, *args]
    for name in vars(reference):
        assert comparable(mine, name) == comparable(reference, name), name


def comparable(config, name):
    value = getattr(config, name)
    if name == "logs_specs":
        ranks = range(config.nproc_per_node)
        streams = [
            [int(given.get(rank, 0) if isinstance(given, dict) else given) for rank in ranks]
            for given in (value._redirects, value._tee)
        ]
        named = "torchelastic_" not in value.root_log_dir  # else a new folder for each
        return streams, named, value._local_ranks_filter
    if name == "signals_to_handle":
        return value.removesuffix(",SIGUSR1")  # ours by default: batch systems send it
    if name.startswith("duplicate_"):
        return value or []
    return value


TELLING = "import json, sys; tell('env', json.dumps({**os.environ, 'ARG': sys.argv[1]}))"


def test_a_job_runs_over_torchs_kind_of_handler(start):
    one = start(
        TELLING + "; print('said', RANK)",
        *("--rdzv-endpoint", "there:1", "--rdzv-id", "mine", "--rdzv-conf", "a=1, b = x"),
        *("--log-dir", "logs", "--redirects", "3", "--report-file", "report.json"),
        OUTER="x",
    )
    assert one.wait() == 0, one.err
    envs = [json.loads(one.told(f"env.{rank}.0")) for rank in range(2)]
    for rank, env in enumerate(envs):
        assert (env["RANK"], env["LOCAL_RANK"], env["ARG"]) == (str(rank), str(rank), f"arg-{rank}")
        assert (env["WORLD_SIZE"], env["MASTER_PORT"], env["OUTER"]) == ("2", "29777", "x")
        assert env["TORCHELASTIC_RUN_ID"] == "mine"
    (made,) = notes(one, "made")
    assert (made["endpoint"], made["low"]) == ("there:1", 1)
    assert {"a": "1", "b": "x"}.items() <= made["config"].items()
    assert (len(notes(one, "met")), len(notes(one, "shutdown"))) == (1, 1)
    said = sorted(path.read_text() for path in one.logs.rglob("stdout.log"))
    assert said == ["said 0\n", "said 1\n"]
    report = json.loads((one.folder / "report.json").read_text())
    assert (report["job"], report["ok"], report["exit_code"]) == ("mine", True, 0)
    assert one.err == ""


def test_a_killed_worker_restarts_all_of_them(start):
    one = start("tell('pid', os.getpid())\nif RESTARTS == 0: hang()", "--max-restarts", "1")
    os.kill(int(one.told("pid.1.0")), signal.SIGKILL)
    assert one.wait() == 0, one.err
    assert int(one.told("pid.0.1")) != int(one.told("pid.0.0"))
    assert len(notes(one, "met")) == 2
    one.gone()


FAILING = """
import elastane

@elastane.record
def main():
    if RANK == 1:
        raise ValueError("of mine")
    hang()

main()
"""


@pytest.mark.soak
def test_a_failure_has_its_exit_code_box_report_and_error_file(start, tmp_path):
    one = start(
        TELLING + FAILING,
        *("--max-restarts", "0", "--rdzv-id", "mine", "--log-dir", "logs"),
        ELASTANE_REPORT_FILE=str(tmp_path / "report.json"),
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "own.json"),
        ELASTANE_TOKEN="secret",
    )
    assert one.wait() == 1
    box = " ".join(one.err.partition("╔")[2].replace("║", " ").split())
    assert "The job failed: no restarts are allowed (--max-restarts 0) [worker-failed]" in box
    assert "root cause worker of rank 1 (local rank 1, pid" in box
    assert "ValueError: of mine" in box and "exit code 1" in box
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["exit_code"], report["slug"]) == (False, 1, "worker-failed")
    root = report["root_cause"]
    assert (root["rank"], root["exit_code"], len(report["failures"])) == (1, 1, 1)
    assert "ValueError: of mine" in root["message"]
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["message"]["message"] == "ValueError: of mine"
    for rank in range(2):
        env = json.loads(one.told(f"env.{rank}.0"))
        assert not env.get("ELASTANE_REPORT_FILE") and not env.get("ELASTANE_TOKEN")
        assert env["TORCHELASTIC_ERROR_FILE"] != str(tmp_path / "own.json")
    assert len(notes(one, "shutdown")) == 1
    one.gone()


@pytest.mark.soak
def test_a_used_up_budget_is_reported(start):
    one = start("raise SystemExit(3)", "--max-restarts", "1")
    assert one.wait() == 1
    assert "all 1 restarts of this node are used (--max-restarts)" in one.err
    assert "exit code 3" in one.err and len(notes(one, "met")) == 2


def test_a_signal_ends_only_this_node(start):
    one = start("trap()\ntell('up')\nhang()", "--shutdown-timeout", "1")
    for rank in range(2):
        one.told(f"up.{rank}.0")
    one.send(signal.SIGTERM)
    assert one.wait() == 143
    assert "got SIGTERM" in one.err and "Traceback" not in one.err
    assert not notes(one, "shutdown"), "the rendezvous stays open for the others"
    one.gone()


@pytest.mark.soak
def test_a_killed_launcher_leaves_no_worker(start):
    one = start("tell('up')\nhang()")
    for rank in range(2):
        one.told(f"up.{rank}.0")
    one.family()
    one.send(signal.SIGKILL)
    one.gone()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("RendezvousTimeoutError", 75),
        pytest.param("RendezvousClosedError", 78, marks=pytest.mark.soak),
        pytest.param("RendezvousGracefulExitError", 0, marks=pytest.mark.soak),
    ],
)
def test_each_end_of_a_rendezvous_has_its_exit_code(start, error, code):
    one = start("", "--rdzv-endpoint", error)
    assert one.wait() == code
    assert "Traceback" not in one.err
    assert ("of the handler" in " ".join(one.err.split())) == (code != 0)


@pytest.mark.soak
def test_an_unknown_error_of_a_handler_is_shown_with_its_traceback(start):
    one = start("", "--rdzv-endpoint", "NoKindOfError")
    assert one.wait() == 1
    assert "theirs_rendezvous.py" in one.err and "NoKindOfError: of the handler" in one.err


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("absent", "ModuleNotFoundError: No module named 'no_module_of_this_name'"),
        pytest.param(
            "nameless",
            "AttributeError: module 'json' has no attribute 'no_such_name'",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_handler_that_cannot_be_loaded_is_named_with_the_reason(start, site, backend, said):
    offer(site, BROKEN)
    one = start("tell('ran')", backend=backend)
    assert one.wait() == 78
    assert f"--rdzv-backend {backend}: its handler cannot be loaded: {said}" in one.err
    assert "[rdzv-handler]" in one.err and "Traceback" not in one.err
    assert "entry point" in one.err and "torchrun.handlers" in one.err
    assert not list(one.folder.glob("ran.*"))


@pytest.mark.parametrize(
    ("backend", "near", "options"),
    [
        ("thiers", "theirs", ()),
        ("etdc", "etcd", ("--standalone",)),
        ("elastene", "elastane", ()),
    ],
)
def test_a_name_that_no_package_offers_gets_a_suggestion(start, backend, near, options):
    one = start("", *options, backend=backend)
    assert one.wait() == 2
    assert f"no such --rdzv-backend: {backend}" in one.err
    assert f"did you mean {near}?" in one.err
    assert "theirs" in one.err.partition("one of ")[2], "what packages offer is listed"
    assert "torchrun.handlers" in one.err


def test_the_documented_custom_backend_runs_a_job_of_two_nodes(start, site, tmp_path):
    """docs/custom-rendezvous.md: a failure restarts both, and they end together."""
    offer(site, "sqlite = sqlite_rendezvous:handler", EXAMPLE.read_text(), "sqlite_rendezvous")
    body = """
        tell("pid", os.getpid())
        if RESTARTS == 0:
            hang()
        wait_for("finish")
    """
    where = ("--rdzv-endpoint", str(tmp_path / "rendezvous.db"), "--nnodes", "2")
    conf = ("--rdzv-conf", "last_call_timeout=1", "--rdzv-id", "job-1", "--max-restarts", "1")
    nodes = [start(body, *where, *conf, backend="sqlite", folder=tmp_path / name) for name in "ab"]

    def pids(restarts):
        found = [path for one in nodes for path in one.folder.glob(f"pid.*.{restarts}")]
        return {path.suffixes[0]: int(path.read_text()) for path in found}

    def has(restarts):
        ended = [one.err for one in nodes if one.process.poll() is not None]
        assert not ended, "\n".join(ended)
        return len(pids(restarts)) == 4

    until(lambda: has(0), "four workers in one world")
    os.kill(pids(0)[".3"], signal.SIGKILL)
    until(lambda: has(1), "all were started again")
    for one in nodes:
        (one.folder / "finish").touch()
    assert [one.wait() for one in nodes] == [0, 0], nodes[0].err + nodes[1].err
