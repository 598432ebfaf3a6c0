"""The pages of the site that are written from the code: each command line, and the Python API.

A page is Markdown. The page of a command has the text of `--help`, with an anchor for each option.
The page of an API module lists the exported names, and mkdocstrings adds their signatures and
docstrings. The build fails if a listed name is not in the code.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from commands import Argument, Command, commands

import elastane

SRC = Path(__file__).parent.parent / "src"
COMMANDS = "reference/commands"
API = "reference/api"
# Modules that export what users import, with the title of their page. A module without `__all__`
# names what its page shows.
MODULES: dict[str, tuple[str, ...]] = {
    "elastane": (),
    "elastane.errors": (),
    "elastane.data.sources": (),
    "elastane.data.shards": ("ElasticShards",),
    "elastane.data.feed": ("Feed",),
    "elastane.lightning": (),
    "elastane.transformers": (),
    "elastane.accelerate": (),
    "elastane.testing": (),
    "elastane.torchx": (),
    "elastane.storage": (),
    "elastane.stores": (),
    "elastane.stores.register": ("RegisterStore",),
    "elastane.observe.events": ("LoggedEvent", "EventReader", "read_events", "follow"),
    "elastane.observe.report": ("FinalReport", "ReportedFailure", "read_report"),
}
_SPECIAL = re.compile(r"([\\`*_<>\[\]|#$~^])")


@cache
def pages() -> dict[str, str]:
    """Return the generated pages by their place in the site."""
    found = commands()
    made = {f"{COMMANDS}/index.md": _index_of_commands(found)}
    made |= {page_of(command): _page_of_command(command) for command in found}
    made[f"{API}/index.md"] = _index_of_modules()
    made |= {f"{API}/{module}.md": _page_of_module(module) for module in MODULES}
    return made


def page_of(command: Command) -> str:
    """Return the place of a verb's page."""
    return f"{COMMANDS}/{command.name.split()[-1]}.md"


def exported(module: str) -> list[str]:
    """Return the names that a module's page shows, read from its source without importing it."""
    if MODULES[module]:
        return list(MODULES[module])
    tree = ast.parse(source_of(module).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            return [name for name in names if f"{module}.{name}" not in MODULES and name[0] != "_"]
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def source_of(module: str) -> Path:
    """Return the file of a module or a package."""
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _home(module: str, name: str) -> str:
    """Return where a name is documented: its own module, where another has the name's own name."""
    return elastane._HOMES[name] if source_of(f"{module}.{name}").exists() else module


def _index_of_commands(found: list[Command]) -> str:
    rows = [f"| [`{one.name}`]({page_of(one).split('/')[-1]}) | {one.meaning} |" for one in found]
    return "\n".join(
        [
            "# Command line",
            "",
            "Each page has what `--help` prints. `man elastane` has the same where the wheel's "
            "`share/man` is on the manual's path.",
            "",
            "| command | what it does |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _page_of_command(command: Command) -> str:
    lines = [f"# {command.name}", "", f"{_sentence(command.meaning)}", ""]
    lines += _body(command, "##")
    for act in command.acts:
        lines += [f"## {act.name.split()[-1]}", "", f"{_sentence(act.meaning)}", ""]
        lines += _body(act, "###")
    return "\n".join(lines)


def _body(command: Command, level: str) -> list[str]:
    lines = ["```text", command.usage, "```", ""]
    for title, arguments in command.groups:
        lines += [f"{level} {_titled(title)}", ""]
        for argument in arguments:
            lines += [*_definition(command, argument), ""]
    if command.examples:
        lines += ["```text", command.examples, "```", ""]
    return lines


def _definition(command: Command, argument: Argument) -> list[str]:
    anchor = "-".join([*command.name.split()[1:], argument.spellings[-1].strip("-.").lower()])
    variable = f" Variable: `{argument.variable}`." if argument.variable else ""
    meaning = _SPECIAL.sub(r"\\\1", _sentence(argument.meaning))
    return [f"`{argument.written}`{{ #{anchor.rstrip('-')} }}", f":   {meaning}{variable}"]


def _titled(title: str) -> str:
    return title if title.startswith("elastane") else title[0].upper() + title[1:]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}" if text else ""


def _index_of_modules() -> str:
    rows = [
        f"| [`{module}`]({module}.md) | {', '.join(f'`{name}`' for name in exported(module))} |"
        for module in MODULES
    ]
    return "\n".join(
        [
            "# Python API",
            "",
            "What a training script, a test, a framework or a store of your own imports. Names "
            "that are not listed may change in any version. `elastane.elastic` has the names of "
            "torch.distributed.elastic; [its reference](../../torchrun-reference.md#names) says "
            "where they differ.",
            "",
            "| module | names |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _page_of_module(module: str) -> str:
    lines = [
        f"# {module}",
        "",
        f"::: {module}",
        "    options:",
        "      members: false",
        "      show_root_heading: false",
        "",
    ]
    for name in exported(module):
        lines += [f"::: {_home(module, name)}.{name}", "    options:", "      heading_level: 2", ""]
    return "\n".join(lines)
