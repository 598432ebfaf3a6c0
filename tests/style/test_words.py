"""The project's words, and what no file of it may hold."""

import re

from style_sources import ROOT, SRC, functions_of, offenders, package_files, short, text_files

SELF = "tests/style/test_words.py"
# Word: what to say in its place.
REPLACED = {
    "generation": "round",
    "generations": "rounds",
    "incarnations of the group": "attempts",
    "todo": "an issue",
    "fixme": "a fix",
}
# Folders that exist only on the machine of whoever writes such a path.
_MACHINE = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users/\w+)/")


def test_one_word_for_each_thing():
    def replaced(path):
        # The key in quotes is Kubernetes' own, on its wire.
        text = path.read_text("utf-8").lower().replace('"generation"', "")
        return {word: say for word, say in REPLACED.items() if re.search(rf"\b{word}\b", text)}

    assert not offenders(_others(), replaced), "say the second of each pair"


def test_no_path_of_a_developers_machine():
    assert not offenders(_others(), lambda path: _MACHINE.search(path.read_text("utf-8")))


def _others():
    return [path for path in text_files() if short(path) != SELF]


_TORCHS_NAMES = (
    "src/elastane/elastic/",
    "src/elastane/comms/works.py",
    "src/elastane/synchrony/pending.py",
)


def test_durations_name_their_unit():
    """A parameter called timeout, delay or interval says in what."""
    bare = re.compile(r"(timeout|delay|interval|deadline|period)$")
    wrong = [
        f"{short(path)}: {node.name}({arg.arg})"
        for path in package_files()
        # There the names are torch's own.
        if not short(path).startswith(_TORCHS_NAMES)
        for node in functions_of(path)
        if not node.name.startswith("_")
        for arg in [*node.args.args, *node.args.kwonlyargs]
        if bare.search(arg.arg)
    ]
    assert not wrong, wrong


def test_the_version_is_one():
    import elastane

    assert f"version: {elastane.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {elastane.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (SRC / "py.typed").exists()
