"""Command lines of a corpus mean the same as to the installed torchrun, errors included.

DIFFERENCES has the reasons for exceptions. A test fails for an exception without a case.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun_corpus import cases

from elastane.cli import launch
from elastane.cli.launch import legacy
from elastane.errors import ElastaneError
from elastane.options.build import build
from elastane.options.parser import RunParser, add_options, read
from elastane.options.table import BY_DEST, TABLE

pytest.importorskip("torch.distributed.run")
ORACLE = Path(__file__).with_name("torchrun_oracle.py")

# Name: the reason of a difference. The function `difference` decides which cases it covers.
DIFFERENCES = {
    "one-option": "an abbreviation of one option alone is taken in either spelling; torchrun takes "
    "it as ambiguous with the option's other spelling, until Python 3.12.7",
    "script's": "what follows the script is never looked at; torchrun refuses an argument of the "
    "script that would be ambiguous as its own option, such as --log",
    "mixed": "dashes and underscores may be mixed in one name",
    "words": "a flag's variable may say yes, no, true, false, on, off; torchrun crashes",
    "empty": "an empty variable is an unset one; torchrun crashes, or runs without a value; an "
    "empty --logs-specs is none",
    "overridden": "a value that is overridden, by the command line or later on it, is not looked "
    "at; torchrun crashes at the variable and refuses the word",
    "fraction": "--shutdown-timeout may have fractions of a second",
    "endless": "a number of seconds is finite",
    "choice": "a choice is checked when it comes from a variable, too",
    "signals": "SIGUSR1, by which SLURM announces a time limit, drains by default",
    "port": "the default port is in the table; torchrun keeps it elsewhere",
    "ranks": "--local-ranks-filter takes spans, and a comma too many is no error; "
    "--redirects takes local ranks of several digits",
    "one-dash": "-rdzv-id=7 is a mistyped --rdzv-id, not --redirects dzv-id=7",
    "our-own": "an option of elastane's own, in full",
    # Differences of the launch, not of the parser:
    "door": "what cannot work is refused before anything is started, where torchrun's workers or "
    "agents would fail, hang, or train something else than was asked",
    "conf": "--rdzv-conf is read leniently at its ends, strictly in its keys",
}
# Slugs of errors before the launch, which the parser of torchrun does not find.
DOOR = {
    "bad-name",
    "bad-option-value",
    "endpoint-missing",
    "endpoint-syntax",
    "node-rank",
    "rank-list",
    "script-not-a-file",
    "script-not-found",
    "standalone-nodes",
    "static-elastic",
}


class Ours:
    """Our result for a case, in the form of the oracle."""

    def __init__(self, entry, argv, variables):
        self.error = self.slug = ""
        self.is_help = False
        self.options = self.config = None
        environ = {"OMP_NUM_THREADS": "1", **variables}
        try:
            self._read(entry, argv, environ)
        except SystemExit as stop:
            assert stop.code == 0
            self.is_help = True
        except ElastaneError as error:
            assert str(error)
            self.error, self.slug = str(error), error.slug

    def _read(self, entry, argv, environ):
        parser = PARSERS[entry]
        namespace = parser.parse_args(argv)
        options = read(namespace, environ)
        self.options = options
        if entry == "launch":
            options = legacy(options, use_env=hasattr(namespace, "use_env"))
        self.config = build(options, environ)


def _parser(kind):
    parser = kind(prog="elastane run", allow_abbrev=False)
    add_options(parser)
    return parser


PARSERS = {"run": _parser(RunParser), "launch": _parser(launch.LaunchParser)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return each case with the results of torchrun and ours, in a folder that has a script."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.py").touch()
    corpus = cases()
    done = subprocess.run(
        [sys.executable, str(ORACLE)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder)},
        input=json.dumps(corpus),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with pytest.MonkeyPatch.context() as patch, open("/dev/null", "w") as nowhere:
        patch.chdir(folder)
        patch.setattr(sys, "stdout", nowhere)
        ours = [Ours(*case) for case in corpus]
    return list(zip(corpus, json.loads(done.stdout), ours, strict=True))


def our_value(ours, dest):
    kind = BY_DEST[dest].kind
    if kind == "flag":
        return ours.options.flag(dest)
    if kind == "int":
        return ours.options.whole(dest)
    if kind == "float":
        return ours.options.seconds(dest)
    return ours.options.text(dest)


def as_ours(value, dest):
    """Return torchrun's value in our form: it splits lists, and has None for an empty text."""
    if isinstance(value, list):
        return ",".join(item.replace(",", ",,") for item in value)
    return "" if value is None and BY_DEST[dest].kind != "float" else value


def difference(case, theirs, ours):
    """Return the name of the difference that a case shows, or ""."""
    _, _, variables = case
    said = theirs.get("error", "")
    if said and ours.options is not None:
        return _taken_here(case, said, ours)
    if "values" in theirs and ours.options is None:
        if variables.get("PET_START_METHOD") and "--start-method" in ours.error:
            return "choice"
        if re.match(r"no such option: -\w\S+ ", ours.error) and "did you mean --" in ours.error:
            return "one-dash"
        return "endless" if re.search(r"= '(nan|inf)'.*\n.*\n.*seconds", ours.error) else ""
    return ""


def _taken_here(case, said, ours):
    _, argv, variables = case
    ambiguous = re.search(r"ambiguous option: (\S+) could match (.*)", said)
    if ambiguous:
        one = len({name.replace("_", "-") for name in ambiguous[2].split(", ")}) == 1
        theirs = ambiguous[1] in ours.options.script_args
        return "script's" if theirs else "one-option" if one else ""
    named = re.search(r"unrecognized arguments: --(\S+)", said)
    if named and named[1] in {option.name for option in TABLE if option.ours}:
        return "our-own"
    wrong = re.search(r"argument (--[a-z-]+)/.*: invalid", said)
    if ("'garbage'" in said and len(argv) > 1) or (wrong and argv.count(wrong[1]) > 1):
        return "overridden"
    if "" in variables.values() and "''" in said:
        return "empty"
    found = (name for name, pattern in _SAID.items() if re.search(pattern, said))
    return next(found, "")


_SAID = {
    "mixed": r"unrecognized arguments: --\w+(-\w+_|_\w+-)",
    "words": r"int\(\) with base 10: '(true|yes|no)'",
    "fraction": r"shutdown-timeout.*invalid int value: '(2\.5|1e1)'",
}


def test_accepts_and_refuses_the_same_command_lines_as_torchrun(results):
    seen, wrong = set(), []
    for case, theirs, ours in results:
        name = difference(case, theirs, ours)
        seen.add(name)
        same = ours.is_help == theirs.get("help", False)
        same = same and (ours.options is not None) == ("values" in theirs)
        if not same and not name:
            wrong.append((case, theirs.get("error") or sorted(theirs), ours.error))
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert {"one-option", "mixed", "words", "empty", "overridden", "fraction"} <= seen
    assert {"choice", "endless", "our-own", "script's", "one-dash"} <= seen


def test_every_value_is_the_same(results):
    wrong, seen, compared = [], set(), 0
    for case, theirs, ours in results:
        if "values" not in theirs or ours.options is None:
            continue
        script = (
            theirs["values"].pop("training_script"),
            theirs["values"].pop("training_script_args"),
        )
        theirs["values"].pop("use_env", None)
        if script != (ours.options.script, list(ours.options.script_args)):
            wrong.append((case, script, ours.options.script_args))
        for dest, value in theirs["values"].items():
            compared += 1
            expected = as_ours(value, dest)
            if our_value(ours, dest) != expected:
                name = _other_value(case, dest, value, ours)
                seen.add(name)
                if not name:
                    wrong.append((case, dest, expected, our_value(ours, dest)))
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert compared > 20_000
    assert seen == {"signals", "port", "empty"}


def _other_value(case, dest, value, ours):
    if dest not in ours.options.given:
        if dest == "signals_to_handle" and case[2].get("PET_SIGNALS_TO_HANDLE") is None:
            return "signals"
        if dest == "master_port" and value is None:
            return "port"
        if case[2].get(f"PET_{dest.upper()}") == "":
            return "empty"
    return ""


def test_what_would_be_launched_is_the_same(results):
    wrong, seen, compared = [], set(), 0
    for case, theirs, ours in results:
        if "values" not in theirs or ours.options is None:
            continue
        refused = theirs.get("launch_error", "")
        if refused or ours.config is None:
            name = _other_verdict(case, refused, ours)
            seen.add(name)
            if not name:
                wrong.append((case, refused, ours.error))
            continue
        compared += 1
        found = launched(ours)
        if found != theirs["launch"]:
            wrong.append((case, theirs["launch"], found))
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert compared > 500
    assert seen == {"same", "door", "ranks", "conf", "empty"}


def _other_verdict(case, refused, ours):
    if refused and ours.config is None:
        return "same"
    if not refused:
        return "conf" if ours.slug == "bad-rdzv-conf" else "door" if ours.slug in DOOR else ""
    text = " ".join(case[1])
    if "local_ranks_filter must be" in refused and "local" in text:
        return "ranks"
    if re.match(r"ValueError: \d\S*:\S+ does not match", refused):
        return "ranks"
    if ("--logs" in text and "[]" in refused) or case[2].get("PET_NNODES") == "":
        return "empty"
    return "conf" if "rdzv-conf" in text else ""


def launched(ours):
    config = ours.config
    count = config.node.local_world_size
    nodes = [config.spec.min_nodes, config.spec.max_nodes]
    return {
        "nodes": nodes,
        "nproc": count,
        "max_restarts": config.spec.max_restarts,
        "role": config.node.role,
        "redirects": [int(config.logs.redirects[rank]) for rank in range(count)],
        "tee": [int(config.logs.tee[rank]) for rank in range(count)],
        "console_ranks": sorted(config.logs.console_ranks),
        "command": _words(config.command),
    }


def _words(command):
    lead = {
        "script": [command.python, "-u"],
        "module": [command.python, "-u", "-m"],
        "run-path": ["run_script_path"],
        "exec": [],
    }
    return [*lead[command.kind], command.target, *command.args]


def test_the_corpus_is_large_and_the_list_of_differences_short(results):
    assert len(results) > 1000
    assert len(DIFFERENCES) < 20
