"""A page's walk-through, played: its commands are run, and what they print is compared.

Blocks of ```console hold commands, each after `$ `, and what they printed; blocks of ```yaml that
begin with `# NAME.yaml` are files of that name in the folder of the commands. Numbers of two digits
and more, durations and times are what they are at the moment; all else is compared as it stands. Of
a block of ```console loosely, each line's first word has to be that of a line that was printed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^```(console(?: loosely)?|yaml)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_VARIES = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z"  # a time
    r"|\b(?:\d+d)?(?:\d+h)?(?:\d+m)?\d+s\b|\b\d+m\b"  # a duration
    r"|(?<=-)[0-9a-f]{8}\b"  # of a uid
    r"|\b\d+\.\d+\b|\b\d{2,}\b"
    r"|\b(?:created|configured|unchanged)$"
    r"| {2,}"
)
# As kubectl says it since 1.35.
_SAYS_WHERE = re.compile(r"(?<= deleted) from \S+ namespace$")


@dataclass
class Command:
    """One command of the page, and what it printed there."""

    line: str
    output: list[str] = field(default_factory=list)

    @property
    def argv(self) -> str:
        return self.line.replace("\\\n", " ")


def section(page: str, title: str) -> str:
    """The text of a section of the second level."""
    return page.split(f"\n## {title}\n")[1].split("\n## ", maxsplit=1)[0]


def files(text: str) -> dict[str, str]:
    found = (body for kind, body in _BLOCK.findall(text) if kind == "yaml")
    named = ((re.match(r"# ([\w-]+\.yaml)\n", body), body) for body in found)
    return {name[1]: body for name, body in named if name}


def commands(body: str) -> list[Command]:
    made: list[Command] = []
    lines = iter(body.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            made[-1].output.append(line)
            continue
        whole = line[2:]
        while whole.endswith("\\"):
            whole += "\n" + next(lines)
        made.append(Command(whole))
    return made


def played(text: str, run: Callable[[str], str]) -> tuple[str, list[str]]:
    """The text as it is now, and where that is not what stands on the page."""
    wrong: list[str] = []

    def play(found: re.Match[str]) -> str:
        kind, body = found[1], found[2]
        if kind == "yaml":
            return found[0]
        lines: list[str] = []
        for command in commands(body):
            told = run(command.argv).rstrip("\n").splitlines()
            lines += [f"$ {command.line}", *told]
            differ = differences if kind == "console" else missing
            wrong.extend(differ(command, told))
        return "\n".join([f"```{kind}", *lines, "```", ""])

    return _BLOCK.sub(play, text), wrong


def differences(command: Command, told: list[str]) -> list[str]:
    if len(told) != len(command.output):
        return [f"$ {command.line}: other lines:", *told]
    pairs = zip(command.output, told, strict=True)
    return [f"{page!r} is now {now!r}" for page, now in pairs if not is_like(page, now)]


def missing(command: Command, told: list[str]) -> list[str]:
    firsts = {stable(line).split(" ")[0] for line in told}
    return [
        f"$ {command.line}: {page!r} is not among {told}"
        for page in command.output
        if stable(page).split(" ")[0] not in firsts
    ]


def is_like(page: str, now: str) -> bool:
    """Whether a line is the page's, but for what varies."""
    return stable(page) == stable(now)


def stable(line: str) -> str:
    def put(found: re.Match[str]) -> str:
        if found[0].isspace():
            return " "
        return "created" if found[0] in ("created", "configured", "unchanged") else "#"

    return _VARIES.sub(put, _SAYS_WHERE.sub("", line.strip()))


def shell(folder: Path, environ: dict[str, str]) -> Callable[[str], str]:
    """What runs a command as a person would, and gives both of its outputs."""

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder, env=environ, text=True, timeout=180, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout

    return run
