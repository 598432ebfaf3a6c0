"""The agent's settings for its workers, from options and variables."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from elastane.errors import ConfigurationError, UsageError
from elastane.options import workers
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.process.process import WorkerCommand
from elastane.process.streams.plan import StreamChoice
from elastane.process.zygote.fitness import unfit_binding


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def run(*argv, **environ):
        return build(parse([*argv, "train.py"], environ), environ)

    return run


def test_by_default_no_supervision_is_set(make):
    found = make("--nproc-per-node", "2", TORCHELASTIC_ENABLE_FILE_TIMER="0").supervision
    assert (found.cpus, found.virtual_local_rank, found.watches_timers) == ((), False, False)
    assert (found.health_port, found.stuck_s, found.event_handler) == (None, 0.0, "null")


def test_a_virtual_local_rank_is_checked_before_anything_starts(make):
    words = ("--virtual-local-rank", "--nproc-per-node", "2")
    assert make(*words, CUDA_VISIBLE_DEVICES="4,5").supervision.virtual_local_rank
    with pytest.raises(ConfigurationError, match="local rank 1"):
        make(*words, CUDA_VISIBLE_DEVICES="4")


@pytest.mark.parametrize("mode", ["node", "socket", "core-complex"])
def test_numa_binding_gives_each_worker_cpus_that_this_process_may_use(make, mode):
    import os

    bound = make("--numa-binding", mode, "--nproc-per-node", "2").supervision.cpus
    assert len(bound) == 2
    assert all(cpus and cpus <= os.sched_getaffinity(0) for cpus in bound)


@pytest.mark.parametrize(
    ("cpus", "env", "fits"),
    [({1}, {}, False), ({1}, {"OMP_NUM_THREADS": "2"}, True), ((), {}, True)],
)
def test_a_bound_worker_with_miscounted_threads_is_not_forked(cpus, env, fits):
    command = WorkerCommand("script", "x", (), env, "/", 0, 1, 2, {}, frozenset(cpus))
    assert (unfit_binding(command) == "") == fits


def test_an_unknown_event_handler_is_refused_with_the_nearest(make):
    assert make("--event-log-handler", "console").supervision.event_handler == "console"
    with pytest.raises(UsageError, match="consle") as caught:
        make("--event-log-handler", "consle")
    assert "did you mean console?" in caught.value.expected


def test_senseless_variables_have_no_effect_and_get_a_note(make):
    config = make(
        TORCHELASTIC_HEALTH_CHECK_PORT="http",
        TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="soon",
    )
    assert (config.supervision.health_port, config.supervision.stuck_s) == (None, 0.0)
    assert len([note for note in config.notes if "TORCHELASTIC_" in note]) == 2
    config = make(
        TORCHELASTIC_HEALTH_CHECK_PORT="8080",
        TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="2.5",
        TORCHELASTIC_ENABLE_FILE_TIMER="1",
        TORCHELASTIC_TIMER_FILE="/t",
    )
    assert (config.supervision.health_port, config.supervision.stuck_s) == (8080, 2.5)
    assert config.supervision.watches_timers
    assert config.supervision.timer_file == "/t"
    assert not config.notes
    assert make(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="-3").supervision.stuck_s == 0.0


def test_filters_are_planned_for_each_stream(make):
    needles = make("--duplicate-stdout-filters", "a,,b,c").logs.needles
    assert needles == {StreamChoice.OUT: ("a,b", "c"), StreamChoice.ERR: ()}


# A class that decides where output goes


@pytest.fixture
def installed(monkeypatch):
    def install(**classes):
        module = type(sys)("made_up_specs")
        vars(module).update(classes)
        monkeypatch.setitem(sys.modules, "made_up_specs", module)
        points = EntryPoints(
            EntryPoint(name, f"made_up_specs:{name}", workers.GROUP) for name in classes
        )
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)

    return install


def test_an_unknown_class_is_refused_with_those_that_are_installed(make, installed):
    installed(tidy=object, untidy=object)
    with pytest.raises(ConfigurationError, match="--logs-specs tidyy") as caught:
        make("--logs-specs", "tidyy")
    assert "one of tidy, untidy; did you mean tidy?" in caught.value.expected
    installed()
    with pytest.raises(ConfigurationError) as caught:
        make("--logs-specs", "tidy")
    assert "none is installed" in caught.value.expected


def test_torchs_own_class_decides_where_output_goes(make, installed, tmp_path):
    multiprocessing = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    installed(default=multiprocessing.DefaultLogsSpecs)
    words = ("--log-dir", str(tmp_path), "-r", "0:1", "-t", "1:2", "--nproc-per-node", "2")
    choose = make("--logs-specs", "default", *words).supervision.choose_files
    env = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}
    files = choose({0: env, 1: env})
    (folder,) = tmp_path.glob("job_*/attempt_1")
    assert files.workers[0].paths == {
        StreamChoice.OUT: str(folder / "0/stdout.log"),
        StreamChoice.ERR: "",
    }
    assert files.workers[1].paths == {
        StreamChoice.OUT: "",
        StreamChoice.ERR: str(folder / "1/stderr.log"),
    }
    assert (files.workers[0].tees, files.workers[1].tees) == (StreamChoice.NONE, StreamChoice.ERR)
    assert files.workers[1].error_file == str(folder / "1/error.json")
    assert files.filtered[StreamChoice.OUT] == str(folder / "filtered_stdout.log")
    assert env.keys() == {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    nowhere = make("--logs-specs", "default", "--log-dir", "/dev/null").supervision.choose_files
    assert nowhere({0: env}).workers[0].error_file == ""


def test_an_error_of_the_logs_specs_class_keeps_its_message(make, installed):
    class Fails:
        def __init__(self, **options):
            raise KeyError("no home")

    class LeavesOut:
        def __init__(self, **options):
            self.options = options

        def reify(self, envs):
            envs[0]["EXTRA"] = 5
            names = ("stderrs", "tee_stdouts", "tee_stderrs", "error_files")
            return type("Dest", (), {"stdouts": {0: "/x"}, **{name: {0: ""} for name in names}})

    installed(fails=Fails, leaves=LeavesOut)
    with pytest.raises(ConfigurationError, match="cannot be made: KeyError: 'no home'"):
        make("--logs-specs", "fails")
    choose = make("--logs-specs", "leaves").supervision.choose_files
    with pytest.raises(ConfigurationError, match="does not say where output goes: KeyError: 1"):
        choose({0: {}, 1: {}})
