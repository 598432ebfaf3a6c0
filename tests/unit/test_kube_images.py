"""The images' recipes, checked without building them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_there_are_two_images():
    assert [path.name for path in RECIPES] == ["Dockerfile", "Dockerfile.training"]


@pytest.mark.parametrize("path", ALL)
def test_every_step_is_one_and_begins_with_a_named_base(path):
    assert {word for word, _ in steps(path)} <= KNOWN
    bases = [rest.split()[0] for rest in of(path, "FROM")]
    defaults = dict(rest.split("=", 1) for rest in of(path, "ARG"))
    for base in bases:
        name = defaults[base[2:-1]] if base.startswith("${") else base
        assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", name), name
        version = tuple(map(int, re.search(r"python:(\d+)\.(\d+)", name).groups()))
        assert version >= (3, 11)
        told = f"Programming Language :: Python :: {version[0]}.{version[1]}"
        assert told in PROJECT["classifiers"]


@pytest.mark.parametrize("path", ALL)
def test_copied_files_exist_and_are_in_the_build_context(path):
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


def test_the_operators_image_has_a_user_and_the_command_of_its_deployment():
    (path,) = [one for one in RECIPES if one.name == "Dockerfile"]
    (deployment,) = [
        one
        for one in installation(Installation(namespace="x", image="y"))
        if one["kind"] == "Deployment"
    ]
    spec = deployment["spec"]["template"]["spec"]
    user = of(path, "USER")[-1].partition(":")[0]
    assert int(user) > 0, "runAsNonRoot needs a number"
    assert spec["securityContext"]["runAsNonRoot"] and "runAsUser" not in spec["securityContext"]
    container = spec["containers"][0]
    assert container["command"] == json.loads(of(path, "ENTRYPOINT")[0])
    assert set(json.loads(of(path, "CMD")[0])) <= set(container["args"])


def closure(names):
    """Return the distributions that pip installs for these requirements, by name."""
    found, waiting = {}, [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found[key] = metadata.distribution(wanted.name)
        for text in found[key].requires or ():
            needed = Requirement(text)
            extras = wanted.extras or {""}
            if not needed.marker or any(needed.marker.evaluate({"extra": one}) for one in extras):
                waiting.append(needed)
    return {name: one for (name, _), one in found.items() if name != "elastane"}


def clean_environment(folder, names):
    """Return a folder of links to exactly the packages that pip would install."""
    for one in closure(names).values():
        tops = {Path(file).parts[0] for file in one.files or () if ".." not in Path(file).parts}
        for top in tops - {"__pycache__"}:
            source = Path(one.locate_file(top))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    (folder / "elastane").symlink_to(ROOT / "src" / "elastane")
    return folder


def installed_by(path):
    """Return the requirements in the pip commands of a recipe."""
    text = " ".join(of(path, "RUN"))
    (extras,) = re.findall(r"\.\[([\w,]+)\]", text)
    return [f"elastane[{extras}]", *(["torch"] if "${TORCH}" in text else [])]


RUN = {
    "Dockerfile": ["elastane.kubernetes.operator", "elastane.cli.kubernetes"],
    # What the walk-through and the samples of examples/kubernetes run.
    "Dockerfile.training": [
        "elastane.examples.digits_in_place",
        "elastane.kubernetes.store.store",
        "elastane.checkpoint.checkpointer",
        "train_in_place",
        # Imported late by digits_in_place.
        "sklearn.datasets",
    ],
}


@pytest.mark.torch
@pytest.mark.parametrize("path", ALL)
def test_an_image_has_what_its_programs_import(path, tmp_path):
    """In an environment of the packages that its recipe installs, and no others."""
    folder = clean_environment(tmp_path, installed_by(path))
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT / 'examples/imagenet')!r}]\n"
    code += "\n".join(f"import {name}" for name in RUN[path.name])
    words = [sys.executable, "-S", "-E", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_operator_runs_without_what_its_image_leaves_out():
    [step] = of(ROOT / "deploy" / "Dockerfile", "RUN")
    left_out = [
        name.replace("-py", "").replace("-", "_") for name in step.split("--yes")[1].split()
    ]
    assert "numpy" in left_out
    code = (
        "import importlib, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({left_out}))\n"
        "import elastane.kubernetes as room\n"
        "for one in pkgutil.walk_packages(room.__path__, 'elastane.kubernetes.'):\n"
        "    importlib.import_module(one.name)\n"
        "from elastane.cli.main import main\n"
        "sys.exit(main(['kubernetes', 'operator']))\n"
    )
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert "[kube-no-cluster]" in done.stderr, done.stderr
