"""The functions of torch.distributed.run, called as `elastane.run`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch.distributed.run as theirs

from elastane import run as ours
from elastane.elastic.launcher import elastic_launch
from elastane.elastic.multiprocessing.errors import ChildFailedError
from elastane.errors import ConfigurationError, UsageError

LINES = [
    "train.py",
    "train.py --lr 0.1 -x",
    "--standalone --nproc-per-node 3 -m pkg.train a b",
    "--nnodes=1:4 --nproc_per_node=gpu --rdzv-backend c10d --rdzv_endpoint h:1 --rdzv-id j t.py",
    "--nnodes 2 --node-rank 1 --master-addr h --master-port 77 --max-restarts 3 t.py",
    "-r 3 -t 0:1,1:2 --log-dir /tmp/x --local-ranks-filter 0,1 --role r --no-python true --help",
    "--duplicate-stdout-filters a,,b,c --monitor-interval 2 --shutdown-timeout 5 t.py",
    "--signals-to-handle SIGUSR2 --virtual-local-rank --event-log-handler console t.py",
    "--numa-binding node --local-addr 127.0.0.1 --rdzv-conf a=1,b=2 --start-method fork t.py",
]
# Intended difference: one more signal at which agents drain.
OTHER_DEFAULTS = {"signals_to_handle"}
SCRIPT = """\
import os, sys, time
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "a") as out:
    print(os.environ["WORLD_SIZE"], *sys.argv[2:], file=out)
if sys.argv[2:] == ["fail"] and os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(0 if sys.argv[2:] != ["fail"] else 60)
"""
PUBLIC = [
    name
    for name, value in vars(theirs).items()
    if inspect.isfunction(value) and value.__module__ == theirs.__name__ and name[0] != "_"
]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTANE_PRELOAD", "json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(SCRIPT)
    return str(tmp_path / "s.py")


def test_every_function_of_torchrun_exists_with_the_same_parameters():
    assert set(PUBLIC) == set(ours.__all__)
    for name in PUBLIC:
        mine, other = (inspect.signature(getattr(module, name)) for module in (ours, theirs))
        assert list(mine.parameters) == list(other.parameters), name


def test_a_plain_command_line_does_not_import_these_functions():
    code = "import sys, elastane.run; sys.exit('elastane.cli._torchrun' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("line", LINES)
def test_a_namespace_equals_that_of_torchrun(line, monkeypatch):
    monkeypatch.setenv("PET_RDZV_ID", "of-the-variable")
    mine, other = (vars(module.parse_args(line.split())) for module in (ours, theirs))
    skipped = OTHER_DEFAULTS if "signals" not in line else set()
    assert {key: mine[key] for key in other if key not in skipped} == {
        key: value for key, value in other.items() if key not in skipped
    }


@pytest.mark.parametrize("line", [line for line in LINES if "gpu" not in line])
def test_the_launch_configuration_equals_that_of_torchrun(line, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("t.py", "train.py"):
        (tmp_path / name).touch()
    words = line.split()
    # Each by its own parser, and ours also from a namespace of torch's parser.
    for namespace in (ours.parse_args(words), theirs.parse_args(words)):
        config, command, args = ours.config_from_args(namespace)
        args_of_theirs = theirs.parse_args(words)
        args_of_theirs.master_port = args_of_theirs.master_port or 29500  # as their run() does
        other, their_command, their_args = theirs.config_from_args(args_of_theirs)
        assert (command, args) == (their_command, their_args)
        for field in dataclasses.fields(other):
            mine, wanted = getattr(config, field.name), getattr(other, field.name)
            if field.name == "logs_specs":
                assert [int(v) for v in _streams(mine)] == [int(v) for v in _streams(wanted)]
            elif field.name == "numa_options":
                assert mine == wanted
            elif field.name not in OTHER_DEFAULTS | {"rdzv_configs"}:
                assert mine == wanted, field.name
        wanted = {key: str(value) for key, value in other.rdzv_configs.items()}
        assert {key: str(value) for key, value in config.rdzv_configs.items()} == wanted


def _streams(specs):
    chosen = specs._redirects, specs._tee
    return [one.get(0, 0) if isinstance(one, dict) else one for one in chosen]


def test_options_may_be_added_to_the_parser(script, tmp_path):
    parser = ours.get_args_parser()
    parser.add_argument("--mine", default="")
    args = parser.parse_args(["--mine", "x", "--nproc-per-node=2", script, str(tmp_path), "ok"])
    assert args.mine == "x"
    assert ours.run(args) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 ok\n", "2 ok\n"]


def test_run_raises_the_errors_of_torchrun(script, tmp_path):
    args = ours.parse_args(
        ["--nproc-per-node=2", "--max-restarts=1", script, str(tmp_path), "fail"]
    )
    with pytest.raises(ChildFailedError) as caught:
        ours.run(args)
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode) == (1, 7)
    assert (tmp_path / "1").read_text() == "2 fail\n2 fail\n"


def test_elastic_launch_accepts_the_configuration(script, tmp_path):
    args = ours.parse_args(["--standalone", "--nproc-per-node=2", script, str(tmp_path), "ok"])
    args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"  # as torchrun's run() does
    config, command, words = ours.config_from_args(args)
    assert elastic_launch(config=config, entrypoint=command)(*words) == {0: None, 1: None}
    assert (tmp_path / "0").read_text() == "2 ok\n"


@pytest.mark.parametrize(
    ("change", "slug"),
    [({"nnodes": "3:1"}, "bad-nnodes"), ({"nproc_per_node": "many"}, "bad-option-value")],
)
def test_an_invalid_namespace_is_refused_with_a_slug(script, change, slug):
    args = argparse.Namespace(**vars(ours.parse_args([script])) | change)
    with pytest.raises((UsageError, ConfigurationError)) as caught:
        ours.run(args)
    assert caught.value.slug == slug
