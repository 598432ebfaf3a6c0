"""The images' recipes, as far as they can be judged without building them."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from elastane.cli.main import VERBS
from elastane.kubernetes.manifests import Installation, installation

ROOT = Path(__file__).parents[2]
RECIPES = [
    path for path in sorted((ROOT / "deploy").glob("Dockerfile*")) if path.suffix != ".dockerignore"
]
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(path):
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def of(path, word):
    return [rest for one, rest in steps(path) if one == word]


def named(path):
    return pytest.param(path, id=path.name)


ALL = [named(path) for path in RECIPES]


def test_there_are_two():
    assert [path.name for path in RECIPES] == ["Dockerfile", "Dockerfile.training"]


@pytest.mark.parametrize("path", ALL)
def test_every_step_is_one_and_begins_with_a_named_base(path):
    assert {word for word, _ in steps(path)} <= KNOWN
    bases = [rest.split()[0] for rest in of(path, "FROM")]
    defaults = dict(rest.split("=", 1) for rest in of(path, "ARG"))
    for base in bases:
        name = defaults["BASE"] if base == "${BASE}" else base
        assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", name), name
        version = tuple(map(int, re.search(r"python:(\d+)\.(\d+)", name).groups()))
        assert version >= (3, 11)
        told = f"Programming Language :: Python :: {version[0]}.{version[1]}"
        assert told in PROJECT["classifiers"]


@pytest.mark.parametrize("path", ALL)
def test_what_is_copied_is_there_and_reaches_the_build(path):
    allowed = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    assert allowed[0] == "*"
    for rest in of(path, "COPY"):
        words = [word for word in rest.split() if not word.startswith("--")]
        if "--from=" in rest:
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source


@pytest.mark.parametrize("path", ALL)
def test_its_commands_are_commands_and_install_what_exists(path):
    for rest in of(path, "RUN"):
        subprocess.run(["sh", "-n", "-c", rest], check=True)
        for extras in re.findall(r"\.\[([\w,]+)\]", rest):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert any(".[" in rest and "kubernetes" in rest for rest in of(path, "RUN"))


@pytest.mark.parametrize("path", ALL)
def test_its_entry_point_is_a_command_of_ours(path):
    words = [word for rest in of(path, "ENTRYPOINT") + of(path, "CMD") for word in json.loads(rest)]
    assert words[0] in PROJECT["scripts"]
    assert words[1] in VERBS


def test_the_operators_image_starts_as_the_user_and_with_the_command_of_its_deployment():
    (path,) = [one for one in RECIPES if one.name == "Dockerfile"]
    (deployment,) = [
        one
        for one in installation(Installation(namespace="x", image="y"))
        if one["kind"] == "Deployment"
    ]
    spec = deployment["spec"]["template"]["spec"]
    user, _, group = of(path, "USER")[-1].partition(":")
    rights = spec["securityContext"]
    assert (int(user), int(group)) == (rights["runAsUser"], rights["runAsGroup"])
    container = spec["containers"][0]
    assert container["command"] == json.loads(of(path, "ENTRYPOINT")[0])
    assert set(json.loads(of(path, "CMD")[0])) <= set(container["args"])


def test_the_operator_runs_with_what_its_image_has():
    """With nothing but the packages that the extra names, and theirs."""
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["kubernetes"]
    names = {re.match(r"[\w-]+", one)[0].lower() for one in wanted}
    assert names >= {"msgspec", "httpx", "pyyaml"}
    code = "import elastane.kubernetes.operator, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "xxhash", "fsspec", "lightning", "pytest"}
