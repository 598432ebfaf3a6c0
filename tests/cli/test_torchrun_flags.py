"""Every flag of the installed torchrun exists, in every spelling, with the same meaning."""

import argparse

import pytest

from elastane.errors import UsageError
from elastane.options.parser import parse
from elastane.options.table import BY_DEST, TABLE

torchrun = pytest.importorskip("torch.distributed.run")
ACTIONS = [
    action
    for action in torchrun.get_args_parser()._actions
    if action.option_strings and not isinstance(action, argparse._HelpAction)
]
# Intended differences, which CHANGELOG.md lists.
OTHER_DEFAULT = {"signals_to_handle"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for option in TABLE:
        if option.env:
            monkeypatch.delenv(option.env, raising=False)


def sample(action):
    if action.choices:
        return list(action.choices)[-1]
    return "3"


def theirs(argv):
    return vars(torchrun.get_args_parser().parse_args(argv))


def as_text(value):
    """Return a value of either parser as text. Torchrun's are numbers, lists, None and booleans."""
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, list) else str(value)


def same(argv):
    ours = parse(argv, {})
    for dest, value in theirs(argv).items():
        if dest in ("training_script", "training_script_args"):
            continue
        if dest in OTHER_DEFAULT and dest not in ours.given:
            continue
        expected = as_text(value)
        if dest == "master_port" and value is None:
            expected = "29500"
        assert ours.text(dest) == expected, (argv, dest)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_the_flag_exists_in_every_spelling(action):
    option = BY_DEST[action.dest]
    assert set(action.option_strings) <= set(option.spellings)
    for spelling in action.option_strings:
        value = [] if action.nargs == 0 else [sample(action)]
        same([spelling, *value, "train.py"])


def test_defaults_mean_the_same():
    same(["train.py"])


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_abbreviation_of_torchrun_is_accepted(action):
    long = max(action.option_strings, key=len)
    for end in range(3, len(long)):
        value = [] if action.nargs == 0 else [sample(action)]
        argv = [long[:end], *value, "train.py"]
        try:
            expected = theirs(argv)
        except SystemExit:
            continue  # ambiguous for torchrun
        assert expected["training_script"] == "train.py"
        same(argv)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_the_variable_is_read_where_torchrun_reads_one(action, monkeypatch):
    option = BY_DEST[action.dest]
    monkeypatch.setenv(f"PET_{action.dest.upper()}", "1" if action.nargs == 0 else sample(action))
    expected = as_text(theirs(["train.py"])[action.dest])
    found = parse(["train.py"], {option.env: sample(action)} if option.env else {})
    if action.nargs == 0:
        found = parse(["train.py"], {option.env: "1"})
    if option.env:
        assert found.text(action.dest) == expected
    else:
        assert expected == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["--nnodes=2", "train.py", "--nnodes", "3", "-m", "--standalone"],
        ["--nproc-per-node", "gpu", "-m", "pkg.mod", "--lr", "0.1"],
        ["-r", "0:1", "-t3", "train.py", "a", "--tee", "b"],
        ["--rdzv-conf", "a=1,b=2", "--node_rank=1", "train.py"],
    ],
)
def test_the_script_gets_the_same_arguments(argv):
    expected = theirs(argv)
    ours = parse(argv, {})
    assert ours.script == expected["training_script"]
    assert list(ours.script_args) == expected["training_script_args"]
    same(argv)


def test_values_that_torchrun_refuses_are_refused(capsys):
    for argv in ([], ["--nnodes"], ["--no-such-flag", "train.py"], ["--rdzv", "x", "train.py"]):
        with pytest.raises(SystemExit):
            theirs(argv)
        with pytest.raises(UsageError):
            parse(argv, {})
    capsys.readouterr()
