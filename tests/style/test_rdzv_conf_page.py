"""docs/rdzv-conf.md has every key of --rdzv-conf, with the default that the code has, and no other.

The lines that it shows as working are read and checked by the launcher, up to where it would start
something; those that it shows as refused are refused as it says.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex

import pytest
from style_sources import ROOT

from elastane.errors import ElastaneError
from elastane.kubernetes.store.backend import TIMING
from elastane.kubernetes.store.store import REFUSED_S
from elastane.options import rendezvous
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.options.show import as_lines
from elastane.protocol.limits import OUTCOME_KEPT_S, PAIRS, Timing, check
from elastane.stores import registry
from elastane.stores.etcd.settings import CONF_KEYS, read_settings

PAGE = (ROOT / "docs" / "rdzv-conf.md").read_text()
DURATIONS = [name.removesuffix("_s") for name in Timing.__struct_fields__]
KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://kube:6443"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
"""
_FILES = ("train.py", "job.token", "ca.pem", "node.pem", "node.key")


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text, first):
    """The rows below the header whose first cell is `first`, as lists of cells."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            break
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return found


def keyed(title):
    """The cells of a section's keys; one row may name two spellings."""
    return {
        name: cells
        for cells in table(section(title), "key")
        for name in re.findall("`([^`]+)`", cells[0])
    }


def lines_that_work():
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        yield shlex.split(block.replace("\\\n", " "))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files that the page's lines name."""
    for name in _FILES:
        (tmp_path / name).write_text("secret\n")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    monkeypatch.chdir(tmp_path)


def built(words):
    return build(parse([*words, "train.py"], {}), {})


def test_every_key_has_a_row_and_every_row_is_a_key():
    known = {*rendezvous._TORCHRUN, "keep_alive_max_attempt", *DURATIONS}
    assert set(keyed("Durations")) == known
    others = {*rendezvous._OTHER, *rendezvous._IDLE, *registry.known_keys()} - {
        "keep_alive_max_attempt"
    }
    assert set(keyed("Other keys")) == others


@pytest.mark.parametrize("key", [*rendezvous._TORCHRUN, *DURATIONS])
def test_a_duration_has_the_default_of_the_code_and_says_which_one_it_is(key):
    _, default, unit, meaning, *_ = keyed("Durations")[key]
    field = rendezvous._duration_name(key)
    assert (float(default), unit) == (getattr(Timing(), field), "s")
    if key not in DURATIONS:
        assert f"another name for `{field.removesuffix('_s')}`" in meaning
    assert rendezvous.read_conf(f"{key}=7.5").durations[field] == 7.5


def test_keep_alive_attempts_are_told_in_heartbeats():
    _, default, unit, *_ = keyed("Durations")["keep_alive_max_attempt"]
    assert unit == "heartbeats"
    assert int(default) * Timing().heartbeat_s == Timing().silence_s
    assert rendezvous.read_conf("keep_alive_interval=4").durations["silence_s"] == 12


def test_what_contradicts_is_told_as_the_code_checks_it():
    told = table(section("Durations"), "at least")
    code = [[large, f"{factor:g}", small, why] for small, large, factor, why in PAIRS]
    assert [[cell.strip("`").removesuffix("_s") for cell in row] for row in told] == [
        [cell.removesuffix("_s") for cell in row] for row in code
    ]


def test_a_key_of_a_store_is_described_as_its_backend_describes_it():
    for key, cells in keyed("Other keys").items():
        spellings = re.findall("`([^`]+)`", cells[0])
        every = {name for one in spellings for name in registry.backends_of_key(one)}
        if every:
            assert cells[1] == ", ".join(f"`{name}`" for name in sorted(every)), key
        for name in registry.backends_of_key(key):
            [described] = [one for one in registry.backend(name).keys if one.name == key]
            assert cells[3] == described.unit, key
            if described.default != "-":
                assert described.default in cells[2], key
        assert ("with a note" in cells[4]) == (key in rendezvous._IDLE), key
        assert ("with a note" in cells[4]) == bool(rendezvous.read_conf(f"{key}=1").notes), key
    etcd = keyed("Other keys")
    assert read_settings("h", {}).urls[0].startswith(etcd["protocol"][2] + ":")
    assert read_settings("h", {"cacert": "ca.pem"}).urls[0].startswith("https:")
    for spelling in ("cacert", "ca_cert", "cert", "ssl_cert", "key", "ssl_cert_key"):
        alike = [other for other in CONF_KEYS if CONF_KEYS[other] == CONF_KEYS[spelling]]
        assert etcd[spelling] is etcd[alike[0]], "two names of one thing stand in one row"


def test_torchs_defaults_are_those_of_the_installed_torch():
    theirs = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    bounds = theirs.RendezvousTimeout()
    durations, others = keyed("Durations"), keyed("Other keys")
    assert durations["join_timeout"][4].startswith(f"{bounds.join.seconds},")
    assert durations["last_call_timeout"][4].startswith(f"{bounds.last_call.seconds},")
    assert others["close_timeout"][5].startswith(f"{bounds.close.seconds},")
    assert others["heartbeat_timeout"][5].startswith(f"{bounds.heartbeat.seconds},")
    made = inspect.signature(theirs.DynamicRendezvousHandler.from_backend).parameters
    for key in ("keep_alive_interval", "keep_alive_max_attempt"):
        assert durations[key][4] == str(made[key].default)


@pytest.mark.parametrize("cells", table(section("What is refused"), "line"), ids=lambda row: row[0])
def test_what_is_shown_as_refused_is_refused_so(here, cells):
    line, answer, code = cells
    with pytest.raises(ElastaneError) as caught:
        built(shlex.split(line.strip("`")))
    slug = re.match("`([a-z0-9-]+)`", answer)
    assert slug and (caught.value.slug, caught.value.exit_code) == (slug[1], int(code))


@pytest.mark.parametrize("words", list(lines_that_work()), ids=lambda words: " ".join(words)[:60])
def test_a_command_line_of_the_page_works(here, words):
    environ = dict([words.pop(0).split("=", 1)] if words[0].startswith("PET_") else [])
    assert words[:2] == ["elastane", "run"] and words[-1] == "train.py"
    options = parse(words[2:], environ)
    shown = " ".join(as_lines(options, environ))
    assert "cat etcd.password" not in shown, "a password is never shown"
    assert not [note for note in build(options, environ).notes if "no effect" in note]


def test_every_backend_has_a_section_whose_line_means_it(here):
    parts = {part.split("\n")[0]: part for part in PAGE.split("\n### ")[1:]}
    meant = {}
    for title, part in parts.items():
        [block] = re.findall(r"```bash\n(.*?)```", part.split("\n## ")[0], re.DOTALL)
        config = build(parse(shlex.split(block.replace("\\\n", " "))[2:], {}), {})
        meant[title] = config.rendezvous
    names = {name for title in meant for name in re.findall("`([^`]+)`", title)}
    assert names == {*rendezvous.names(), "standalone"}
    assert meant.pop("The sidecar").sidecar
    for title, requested in meant.items():
        assert requested.backend == re.findall("`([^`]+)`", title)[0]
    rows = {name: row for row in table(PAGE, "backend") for name in re.findall("`([^`]+)`", row[0])}
    assert set(rows) == names
    for name in registry.names():
        found = registry.backend(name)
        words = ["yes" if able else "no" for able in (found.tls, found.login)]
        assert rows[name][2] == ", ".join(words), name


def test_the_figures_of_the_text_are_those_of_the_code():
    assert f"for {Timing().isolation_limit_s:g} s ([`isolation_limit`]" in PAGE
    for limit, _, wait in table(section("The isolation limit"), "`isolation_limit`"):
        timing = Timing(isolation_limit_s=float(limit.split(",")[0]))
        assert wait == f"{timing.fence_wait_s:g} s"
        assert not check(timing)
    assert f"its outcome for {OUTCOME_KEPT_S:g} s" in PAGE
    ttl, renew = keyed("Durations")["lease_ttl"][3], keyed("Durations")["lease_renew"][3]
    assert f"its default is {TIMING.lease_ttl_s:g}" in ttl
    assert f"the default of kubernetes is {TIMING.lease_renew_s:g}" in renew
    assert f"was never allowed, and after {REFUSED_S:g} s" in PAGE


def test_a_handler_differs_as_told():
    ours = importlib.import_module("elastane.elastic.rendezvous._configure")
    told = keyed("In a handler")
    assert set(told) == {"store", "silence", "close_timeout"}
    assert float(told["silence"][1]) == ours._SILENCE_S
    assert float(told["close_timeout"][1]) == ours._CLOSE_GRACE_S
    assert set(re.findall("`([^`]+)`", told["store"][3])) >= set(registry.names())
    with pytest.raises(ElastaneError):
        rendezvous.read_conf("store=file")


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        page, _, heading = target.partition("#")
        path = ROOT / "docs" / page if page else ROOT / "docs" / "rdzv-conf.md"
        assert path.is_file(), target
        if heading:
            lines = path.read_text().splitlines()
            headings = [line.lstrip("# ").lower() for line in lines if line[:1] == "#"]
            assert heading in {found.replace(" ", "-") for found in headings}, target
