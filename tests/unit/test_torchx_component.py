"""The job that the installed TorchX makes from elastane.torchx.run."""

import re
import shlex
import string
from pathlib import Path

import pytest

from elastane.errors import UsageError
from elastane.options.build import build
from elastane.options.parser import parse

pytest.importorskip("torchx", reason="pip install torchx-nightly")

from torchx.specs import macros
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component

from elastane.torchx import run

PAGE = Path(__file__).parents[2] / "docs" / "schedulers.md"
VALUES = macros.Values(img_root="", app_id="job-1", replica_id="1", rank0_env="RANK0_HOST")


def role_of(*args, **options):
    """Return the only role, with TorchX's macros filled in for replica 1."""
    [role] = run(*args, **options).roles
    return VALUES.apply(role)


def command_of(*args, **options):
    role = role_of(*args, **options)
    assert (role.entrypoint, role.args[0], len(role.args)) == ("bash", "-c", 2)
    return role.args[1]


def options_of(tmp_path, monkeypatch, **options):
    """Return the configuration that `elastane run` reads from the command."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command_of(script="train.py", **options).partition("exec elastane run ")[2])
    words = [string.Template(word).safe_substitute(host="h") for word in words]
    return build(parse(words, {}), {})


def test_torchx_finds_the_component_and_still_its_own():
    assert get_component("elastane.torchx.run").fn.__name__ == "run"
    assert get_component("dist.ddp").validation_errors == []


@pytest.mark.parametrize(
    ("j", "nodes", "workers"),
    [("1:4x8", (1, 4), 8), ("2x3", (2, 2), 3), ("2", (1, 1), 2), ("1x2", (1, 1), 2)],
)
def test_the_size_is_of_nodes_and_of_workers_on_each(tmp_path, monkeypatch, j, nodes, workers):
    config = options_of(tmp_path, monkeypatch, j=j)
    assert (config.spec.min_nodes, config.spec.max_nodes) == nodes
    assert config.node.local_world_size == workers
    role = role_of(script="train.py", j=j)
    assert (role.min_replicas, role.num_replicas) == nodes


def test_replicas_meet_on_replica_0_under_names_of_their_own(tmp_path, monkeypatch):
    config = options_of(tmp_path, monkeypatch, j="2x1", rdzv_port=4000)
    meets = config.rendezvous
    assert (meets.backend, meets.host, meets.port) == ("elastane", "h", 4000)
    assert (config.spec.job, config.node.node_id, config.node.node_rank) == (
        "job-1",
        "replica-1",
        1,
    )
    assert role_of(script="train.py", j="2x1", rdzv_port=4000).port_map == {"elastane": 4000}


def test_one_replica_opens_no_port(tmp_path, monkeypatch):
    assert options_of(tmp_path, monkeypatch, j="1x2").rendezvous.backend == "standalone"
    assert role_of(script="train.py", j="1x2").port_map == {}


def test_a_store_takes_the_place_of_replica_0(tmp_path, monkeypatch):
    meets = options_of(
        tmp_path, monkeypatch, j="2x1", rdzv_backend="file", rdzv_endpoint="/shared/a b"
    ).rendezvous
    assert (meets.backend, meets.store) == ("file", "/shared/a b")


def test_options_of_a_job_reach_the_agent_and_the_replica(tmp_path, monkeypatch):
    config = options_of(tmp_path, monkeypatch, j="2x1", in_place=True, max_restarts=7)
    assert (config.spec.in_place, config.spec.max_restarts) == (True, 7)
    mounts = ["type=bind", "src=/data", "dst=/mnt", "readonly"]
    role = role_of(
        script="a/train.py", image="i", env={"PET_TEE": "3"}, cpu=3, gpu=2, memMB=5, mounts=mounts
    )
    assert (role.name, role.image, role.env) == ("train", "i", {"PET_TEE": "3"})
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (3, 2, 5)
    assert [mount.dst_path for mount in role.mounts] == ["/mnt"]


def test_a_module_and_arguments_with_spaces_reach_the_script():
    assert command_of("--a", "b c", m="pkg.train").endswith("-m pkg.train --a 'b c'")


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({}, "usage"),
        ({"script": "a.py", "m": "a"}, "usage"),
        ({"script": "a.py", "j": "2y1"}, "bad-nnodes"),
    ],
)
def test_an_empty_component_is_refused(options, slug):
    with pytest.raises(UsageError) as caught:
        run(**options)
    assert caught.value.slug == slug


def test_torchx_takes_the_commands_of_the_page():
    page = PAGE.read_text("utf-8").replace("\\\n", "")
    commands = re.findall(r"^torchx run .* elastane\.torchx\.run (.*)$", page, re.MULTILINE)
    roles = [materialize_appdef(run, shlex.split(words)).roles[0] for words in commands]
    assert [(role.min_replicas, role.num_replicas) for role in roles] == [(2, 2), (2, 4)]
    assert roles[1].env.keys() == {"ELASTANE_TOKEN", "ELASTANE_MIN_WORKERS"}
