"""The walk-through of docs/kubernetes.md is what happens, command by command, on a real cluster."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from bed.setting import Image
from elastic_jobs import older_server
from walkthrough import files, is_like, played, section, shell

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
TITLE, MORE = "A walk-through", "More of it"


@pytest.fixture
def here(control_plane, cluster, tmp_path):
    """A shell of a person with a kubeconfig, in a cluster of three nodes that has two images."""
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    mine = {"env": {"PATH": path, "OMP_NUM_THREADS": "1"}}
    launcher = [sys.executable, "-m", "elastane", "run"]
    cluster.images["registry.example/elastane:1"] = Image(**mine)
    cluster.images["registry.example/training:1"] = Image(launcher, **mine)
    for name in ("a", "b", "c"):
        cluster.add(name)
    config = tmp_path / "kubeconfig"
    config.write_bytes(control_plane.admin.read_bytes())
    for name, text in files(section(PAGE.read_text(), TITLE)).items():
        (tmp_path / name).write_text(text)
    environ = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": str(config)}
    run, more = shell(tmp_path, environ), " ".join(older_server(control_plane))
    install = "elastane kubernetes install"
    # The server of these tests reads no Protobuf, in which kubectl sends a namespace that it makes.
    space, as_json = "create namespace training", "--dry-run=client -o json | kubectl create -f -"

    def played_here(command: str) -> str:
        command = command.replace(install, f"{install} {more}")
        return run(command.replace(space, f"{space} {as_json}"))

    yield played_here
    clean_up(control_plane)


def clean_up(plane):
    """Leave no operator behind, which would look after other tests' jobs."""
    for what in (
        ("delete", "elasticjobs", "--all", "-n", "training"),
        ("delete", "deployment", "elastane-operator", "-n", "elastane-system"),
        ("delete", "pods", "--all", "-n", "elastane-system", "--grace-period=1"),
        ("delete", "pods", "--all", "-n", "training", "--grace-period=1"),
        ("delete", "namespace", "training"),
    ):
        with contextlib.suppress(AssertionError):  # A part of the page may have removed it.
            plane.kubectl(*what)


def play(run, folder, *titles):
    """Play sections of the page; report lines that differ, and write the new page to the folder."""
    page, wrong = PAGE.read_text(), []
    for title in titles:
        text = section(page, title)
        now, other = played(text, run)
        page = page.replace(text, now)
        wrong += other
    (folder / PAGE.name).write_text(page)
    assert not wrong, "\n".join([*wrong, f"the page as it is now: {folder / PAGE.name}"])


def test_the_walk_through_is_what_happens(here, tmp_path):
    play(here, tmp_path, TITLE)


@pytest.mark.soak
def test_so_is_what_comes_after_it(here, tmp_path):
    play(here, tmp_path, TITLE, MORE)


@pytest.mark.parametrize(
    ("page", "now", "same"),
    [
        ("digits   Running   2   57   12s", "digits  Running  2  1024  3m4s", True),
        ("digits   Running   2   57   12s", "digits  Running  3  57  12s", False),
        ("job/x created", "job/x unchanged", True),
        ("job/x created", "job/x deleted", False),
        ('pod "x" deleted', 'pod "x" deleted from training namespace', True),
        ("a 2026-11-21T20:00:00Z b", "a 2027-01-01T00:00:00Z b", True),
        ("0.5 s", "12.25 s", True),
    ],
)
def test_what_varies_is_passed_over_and_nothing_else(page, now, same):
    assert is_like(page, now) == same


def test_the_page_has_both_parts():
    page = PAGE.read_text()
    assert section(page, TITLE).count("$ kubectl") > 10 < section(page, MORE).count("$ kubectl")
