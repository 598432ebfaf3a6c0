"""The options of elastane.launch: every flag has an equivalent Python value."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastane.errors import UsageError
from elastane.functions.request import RequestedOptions, as_text, read_request, with_defaults
from elastane.options.parser import parse
from elastane.options.table import TABLE

NOT_OF_FUNCTIONS = {"module", "no_python", "run_path", "show_config", "json"}
OURS = [option for option in TABLE if option.dest not in NOT_OF_FUNCTIONS]
# By kind: a Python value, and what a person types for it.
WRITTEN = {
    "text": ("some", "some"),
    "int": (3, "3"),
    "float": (1.5, "1.5"),
    "flag": (True, "1"),
    "list": ([0, 2], "0,2"),
    "needles": (["a, b", "c"], "a,, b,c"),
    "pairs": ({"join_timeout": 5, "is_host": True}, "join_timeout=5,is_host=True"),
    "path": (Path("some") / "where", "some/where"),
}


@pytest.fixture(autouse=True)
def _no_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Options


@pytest.mark.parametrize("option", OURS, ids=lambda option: option.name)
def test_a_keyword_option_means_the_same_as_its_flag(option, tmp_path):
    (tmp_path / "some").touch()  # a settings file has to be there
    value, typed = WRITTEN.get(option.kind) or (option.choices[-1], option.choices[-1])
    mine = RequestedOptions(as_text({option.dest: value}), "m").options({})
    flag = [f"--{option.name}"] if option.kind == "flag" else [f"--{option.name}={typed}"]
    assert mine == parse([*flag, "m"], {})


def test_every_kind_of_option_is_tried():
    assert {option.kind for option in TABLE} == {*WRITTEN, "choice"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nnodes": 2}, "2"),
        ({"nnodes": (1, 4)}, "1:4"),
        ({"nnodes": "1:4"}, "1:4"),
        ({"standalone": False}, "0"),
        ({"rdzv_conf": "a=1,b=2"}, "a=1,b=2"),
        ({"preload": ()}, ""),
        ({"signals_to_handle": {"SIGTERM"}}, "SIGTERM"),
    ],
    ids=str,
)
def test_the_other_ways_to_write_a_value(options, text):
    assert list(as_text(options).values()) == [text]


def test_a_number_of_numpy_is_a_number():
    numpy = pytest.importorskip("numpy")
    assert as_text({"nproc_per_node": numpy.int64(2)}) == {"nproc_per_node": "2"}


def test_none_leaves_an_option_to_variable_file_and_default():
    assert as_text({"max_restarts": None}) == {}


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("max_restart", "max_restarts"),
        ("nprocs", "nproc"),
        ("rdzv_endpont", "rdzv_endpoint"),
        ("kwarg", "kwargs"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_name(typo, near):
    with pytest.raises(UsageError, match=rf"no option {typo}\b") as caught:
        as_text({typo: 1})
    assert caught.value.expected == f"did you mean {near}?"


@pytest.mark.parametrize("name", sorted(NOT_OF_FUNCTIONS))
def test_script_options_are_refused_for_functions(name):
    with pytest.raises(UsageError, match=f"no option {name}"):
        as_text({name: True})


@pytest.mark.parametrize(
    "options",
    [
        {"log_dir": object()},
        {"rdzv_conf": {"a": "1,2"}},
        {"local_ranks_filter": ["0,1"]},
        {"preload": b"torch"},
        {"role": {"a": 1}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_value_that_no_flag_could_have_is_refused_by_name(options):
    with pytest.raises(UsageError, match=f"^{next(iter(options))} = ") as caught:
        as_text(options)
    assert caught.value.slug == "bad-option-value"


def test_a_value_of_another_kind_is_refused_by_the_launcher():
    with pytest.raises(UsageError, match="max-restarts = 'many'"):
        RequestedOptions(as_text({"max_restarts": "many"}), "m").options({})


def test_argument_beats_variable_beats_file(tmp_path):
    (tmp_path / "elastane.toml").write_text(
        "[run]\nmax-restarts = 1\nnproc-per-node = 3\nrole = 'r'\n"
    )
    environ = {"PET_MAX_RESTARTS": "2", "PET_NPROC_PER_NODE": "5"}
    options = RequestedOptions(as_text({"nproc_per_node": 7}), "m").options(environ)
    found = [options.text(name) for name in ("nproc_per_node", "max_restarts", "role")]
    assert found == ["7", "2", "r"]


def test_without_ambient_settings_only_arguments_count(tmp_path):
    (tmp_path / "elastane.toml").write_text("[run]\nrole = 'r'\n")
    (tmp_path / "mine.toml").write_text("[run]\nrole = 'mine'\n")
    quiet = RequestedOptions(as_text({"nproc_per_node": 7}), "m", ambient=False)
    assert quiet.options({"PET_MAX_RESTARTS": "2"}).given == {"nproc_per_node"}
    named_file = RequestedOptions({"config": "mine.toml"}, "m", ambient=False)
    assert named_file.options({"PET_ROLE": "outer"}).text("role") == "mine"


def test_the_agent_reads_the_request_that_the_caller_wrote(tmp_path):
    wish = RequestedOptions({"nnodes": "2"}, "m", ("a", "b"), ambient=False)
    (tmp_path / "request.json").write_bytes(wish.to_json())
    assert read_request(tmp_path) == wish


# Names of jobs


def job(function="train", environ=None, **options):
    wish = RequestedOptions(as_text(options), "m")
    return with_defaults(wish, function, environ or {}).options(environ or {})


def test_each_job_of_one_node_gets_a_new_name():
    names = {job().text("rdzv_id") for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("train-") for name in names)


def test_a_job_of_one_node_gets_a_private_endpoint():
    options = job()
    assert (options.text("rdzv_backend"), options.text("rdzv_endpoint")) == (
        "elastane",
        "localhost:0",
    )


def test_a_given_endpoint_is_kept():
    assert job(rdzv_endpoint="h:1").text("rdzv_endpoint") == "h:1"
    assert job(standalone=True).text("rdzv_endpoint") == ""
    assert job(environ={"PET_RDZV_ENDPOINT": "h:2"}).text("rdzv_endpoint") == "h:2"


def test_nodes_that_call_alike_find_the_same_name_and_others_another():
    def name(function="train", nnodes="2", endpoint="h:1"):
        return job(function, nnodes=nnodes, rdzv_endpoint=endpoint, rdzv_backend="c10d").text(
            "rdzv_id"
        )

    assert name() == name()
    assert len({name(), name("test"), name(nnodes="3"), name(endpoint="h:2")}) == 4


def test_a_store_that_remembers_jobs_asks_for_a_name():
    assert job(nnodes=2, rdzv_backend="file", rdzv_endpoint="f").text("rdzv_id") == "none"


def test_a_given_name_is_kept():
    options = job(rdzv_id="mine")
    assert (options.text("rdzv_id"), options.text("rdzv_endpoint")) == ("mine", "localhost:0")
    assert job(environ={"PET_RDZV_ID": "mine"}).text("rdzv_id") == "mine"


@pytest.mark.parametrize("function", ["<lambda>", "a/b c", "..", "é", "x" * 300, ""])
def test_every_function_name_makes_a_valid_job_name(function):
    from elastane.options.rendezvous import check_name

    check_name("--rdzv-id", job(function).text("rdzv_id"))


def test_a_node_gets_a_worker_for_each_device_by_default(tmp_path):
    assert job().text("nproc_per_node") == "auto"
    assert job(nproc_per_node=3).text("nproc_per_node") == "3"
    assert job(environ={"PET_NPROC_PER_NODE": "4"}).text("nproc_per_node") == "4"
    (tmp_path / "elastane.toml").write_text("[run]\nnproc-per-node = 5\n")
    assert job().text("nproc_per_node") == "5"
