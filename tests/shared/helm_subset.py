"""The part of Helm's template language that the charts of deploy/helm use, and nothing beyond it.

What it does not know it refuses, so a chart that uses more of the language fails its tests instead
of being rendered wrongly: actions `if`, `else`, `end`, `with` and comments, the trimming of spaces,
paths from `.` and `$`, strings, whole numbers, pipelines, parentheses, and FUNCTIONS. A path that
the values do not have is an error, which is stricter than Helm.

    render_chart(folder, release="x", namespace="y", values={...}) -> documents
"""

import copy
import re
from pathlib import Path

import yaml

_ACTION = re.compile(r"(\s*)\{\{(-?)(.*?)(-?)\}\}(\s*)", re.DOTALL)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|-?\d+|\$?(?:\.\w+)+|[.$]|\w+|[|()])')


class UnknownTemplateError(Exception):
    """The template uses what this does not know, or is wrong."""


def is_empty(value):
    """Go's idea of what is false."""
    return value is None or value is False or value in (0, "", {}, [])


def to_yaml(value):
    return (
        yaml.safe_dump(value, default_flow_style=False, sort_keys=True)
        .removesuffix("...\n")
        .rstrip("\n")
    )


def _indent(count, text):
    return "\n".join(" " * count + line for line in str(text).split("\n"))


def _quote(value):
    text = _said(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _printf(form, *values):
    if form.count("%") != form.count("%v") or form.count("%v") != len(values):
        raise UnknownTemplateError(f"printf {form!r}")
    return form.replace("%v", "{}").format(*map(_said, values))


FUNCTIONS = {
    "toYaml": to_yaml,
    "nindent": lambda count, text: "\n" + _indent(count, text),
    "indent": _indent,
    "quote": _quote,
    "int": int,
    "default": lambda other, value: other if is_empty(value) else value,
    "not": is_empty,
    "ne": lambda one, other: one != other,
    "or": lambda *values: next((one for one in values if not is_empty(one)), values[-1]),
    "printf": _printf,
}


def _said(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    if value is None:
        return ""
    raise UnknownTemplateError(f"a {type(value).__name__} would be printed in Go's way: {value!r}")


class _Template:
    """One file: its text cut into pieces, and where each action ends."""

    def __init__(self, name, text, root):
        self.name, self.root = name, root
        self.pieces = _pieces(text)

    def render(self):
        out, at = self._block(0, self.root, write=True)
        if at != len(self.pieces):
            raise UnknownTemplateError(f"{self.name}: {self.pieces[at]} without its beginning")
        return "".join(out)

    def _block(self, at, dot, *, write):
        """Render up to the `else` or `end` that closes the block, and return where that is."""
        out = []
        while at < len(self.pieces):
            kind, text = self.pieces[at]
            if kind == "text":
                out.append(text)
                at += 1
            elif text.split()[:1] in (["else"], ["end"]):
                return out, at
            elif text.split()[:1] in (["if"], ["with"]):
                made, at = self._choice(at, dot, write=write)
                out += made
            else:
                if write:
                    out.append(_said(self._value(text, dot)))
                at += 1
        return out, at

    def _choice(self, at, dot, *, write):
        word, _, condition = self.pieces[at][1].partition(" ")
        value = self._value(condition, dot) if write else None
        holds = write and not is_empty(value)
        inner = value if word == "with" else dot
        first, at = self._block(at + 1, inner, write=holds)
        second = []
        if self._word(at) == "else":
            second, at = self._block(at + 1, dot, write=write and not holds)
        if self._word(at) != "end":
            raise UnknownTemplateError(f"{self.name}: {word} {condition} without its end")
        return (first if holds else second if write else []), at + 1

    def _word(self, at):
        return self.pieces[at][1] if at < len(self.pieces) else ""

    def _value(self, text, dot):
        tokens, place = [], 0
        while place < len(text.rstrip()):
            found = _TOKEN.match(text, place)
            if not found:
                raise UnknownTemplateError(f"{self.name}: {text!r} at {text[place:]!r}")
            tokens.append(found[1])
            place = found.end()
        value = self._pipeline(tokens, dot)
        if tokens:
            raise UnknownTemplateError(f"{self.name}: {text!r}: {tokens} is too much")
        return value

    def _pipeline(self, tokens, dot):
        value = self._command(tokens, dot, ())
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            value = self._command(tokens, dot, (value,))
        return value

    def _command(self, tokens, dot, piped):
        if not tokens:
            raise UnknownTemplateError(f"{self.name}: an empty action")
        word = tokens.pop(0)
        arguments = []
        if word in FUNCTIONS or word == ".Files.Get":
            while tokens and tokens[0] not in ("|", ")"):
                arguments.append(self._term(tokens.pop(0), tokens, dot))
            if word == ".Files.Get":
                return self.root["Files"][arguments[0]]
            return FUNCTIONS[word](*arguments, *piped)
        if piped:
            raise UnknownTemplateError(f"{self.name}: function {word}")
        return self._term(word, tokens, dot)

    def _term(self, word, tokens, dot):
        if word == "(":
            value = self._pipeline(tokens, dot)
            if not tokens or tokens.pop(0) != ")":
                raise UnknownTemplateError(f"{self.name}: a parenthesis is open")
            return value
        if word.startswith('"'):
            return word[1:-1].encode().decode("unicode_escape")
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if not word.startswith((".", "$")):
            raise UnknownTemplateError(f"{self.name}: function or variable {word}")
        value = self.root if word.startswith("$") else dot
        for part in word.lstrip("$").split(".")[1:]:
            if part:
                if not isinstance(value, dict) or part not in value:
                    raise UnknownTemplateError(f"{self.name}: {word} is in no value")
                value = value[part]
        return value


def _pieces(text):
    made, place = [], 0
    for found in _ACTION.finditer(text):
        before, trims, action, trims_after, after = found.groups()
        made.append(("text", text[place : found.start()] + ("" if trims else before)))
        if not (action.strip().startswith("/*") and action.strip().endswith("*/")):
            made.append(("action", action.strip()))
        made.append(("text", "" if trims_after else after))
        place = found.end()
    made.append(("text", text[place:]))
    if any("{{" in text or "}}" in text for kind, text in made if kind == "text"):
        raise UnknownTemplateError("an action that is not closed")
    return made


def merged(values, over):
    """As Helm lays a user's values over a chart's: objects are merged, all else is replaced."""
    made = copy.deepcopy(values)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merged(made[key], value) if both else value
    return made


def values_of(folder, over=None):
    return merged(yaml.safe_load((Path(folder) / "values.yaml").read_text()), over or {})


def render_chart(folder, release, namespace, values=None):
    """Return the documents that a chart makes of values laid over its own, without its crds."""
    root = _root(Path(folder), release, namespace, values)
    documents = []
    for path in sorted((Path(folder) / "templates").glob("*.yaml")):
        text = _Template(path.name, path.read_text(), root).render()
        documents += [one for one in yaml.safe_load_all(text) if one is not None]
    return documents


def render_notes(folder, release, namespace, values=None):
    """Return what a chart says after its installation."""
    path = Path(folder) / "templates" / "NOTES.txt"
    root = _root(Path(folder), release, namespace, values)
    return _Template(path.name, path.read_text(), root).render()


def _root(folder, release, namespace, values):
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    files = sorted((folder / "files").glob("*")) if (folder / "files").exists() else []
    return {
        "Values": values_of(folder, values),
        "Release": {"Name": release, "Namespace": namespace},
        "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
        "Files": {f"files/{one.name}": one.read_text() for one in files},
    }


def render_text(text, **root):
    return _Template("text", text, root).render()
