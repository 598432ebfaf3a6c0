"""The functions of torch.distributed.run, for programs that call torchrun instead of typing it.

Owns an ordinary argparse parser, to which such programs add options, and the launch from its
namespace. How it fails: argparse's SystemExit for a command line, the launcher's UsageError and
ConfigurationError for values, ChildFailedError for workers.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastane.cli._handler import argv_of, config_of, is_wanted
from elastane.errors import ConfigurationError
from elastane.functions.request import RequestedOptions, as_text
from elastane.options.build import read_nnodes, read_nproc
from elastane.options.rendezvous import is_builtin
from elastane.options.table import BY_DEST, TABLE, Option
from elastane.process import environment
from elastane.process.streams.plan import parse_needles
from elastane.process.worker_environment import LOCAL_RANK_MACRO

if TYPE_CHECKING:
    from elastane.elastic.launcher.api import LaunchConfig

# Options that are an empty text in torchrun's namespace if not given; all others are None.
_EMPTY_TEXTS = ("rdzv_endpoint", "rdzv_conf", "local_ranks_filter")
# These options say how the script is run.
_HOW = ("module", "no_python", "run_path")
_FLAG_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def get_args_parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's options and ours, with defaults from their variables."""
    environ = environment.snapshot()
    parser = argparse.ArgumentParser(description="elastane's launcher of elastic jobs")
    for option in TABLE:
        _add(parser, option, environ.get(option.env, "") if option.env else "")
    parser.add_argument("training_script", type=str, help="what is run by each worker")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Return the namespace of a command line; None: of this process's own."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return MIN and MAX of `MIN:MAX`, or of one number; UsageError for anything else."""
    return read_nnodes(nnodes)


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers that a number, cpu, gpu or auto means here."""
    return read_nproc(nproc_per_node, environment.snapshot())


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return the endpoint; for the static backend it may be the master's address."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{_port(args)}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Return whether workers get LOCAL_RANK only, and not --local-rank."""
    return bool(getattr(args, "use_env", True))


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter, as its main program."""
    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def config_from_args(
    args: argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return the arguments of `elastic_launch`: configuration, command, its arguments."""
    environ = environment.snapshot()
    options = _request(args).options(environ)
    config, argv = config_of(options, environ), argv_of(options, environ)
    config.rdzv_endpoint = get_rdzv_endpoint(args)
    if config.rdzv_backend == "static":
        config.rdzv_configs["rank"] = args.node_rank
    return config, argv[0], argv[1:]


def run(args: argparse.Namespace) -> None:
    """Launch, and return when all workers of the job are done.

    Raises ChildFailedError if workers failed more often than allowed.
    """
    from elastane.elastic.launcher.api import CalledJob, launch_agent

    environ = environment.snapshot()
    request = _request(args)
    options = request.options(environ)
    if not is_builtin(options.text("rdzv_backend")) and is_wanted(options):
        config, command, words = config_from_args(args)
        launch_agent(config, command, list(words))
    else:
        allowed = int(options.text("max_restarts"))
        name = os.fspath(args.training_script)
        CalledJob(request, {}, environ, name, 0, options.text("role"), allowed).run()


def _add(parser: argparse.ArgumentParser, option: Option, variable: str) -> None:
    names = dict.fromkeys((f"--{option.name}", f"--{option.dest}"))
    spelled = [f"-{option.short}", *names] if option.short else [*names]
    text = option.help.replace("%", "%%")
    default = _typed(option, variable or option.default)
    if option.kind == "flag":
        parser.add_argument(*spelled, action="store_true", default=default, help=text)
        return
    if option.dest == "master_port" and not variable:
        default = None
    parser.add_argument(
        *spelled,
        type=lambda value: _typed(option, value),
        default=default,
        choices=option.choices or None,
        help=text,
    )


def _typed(option: Option, text: str) -> Any:
    """Return a value with its type in torchrun's namespace; argparse reports a ValueError."""
    if option.kind == "flag":
        known = _FLAG_WORDS.get(text.strip().lower())
        return bool(int(text)) if known is None else known
    if option.kind == "needles":
        return list(parse_needles(text))
    if not text:
        return "" if option.dest in _EMPTY_TEXTS else None
    if option.kind == "int":
        return int(text)
    if option.kind == "float":
        number = float(text)
        whole = option.dest == "shutdown_timeout" and number.is_integer()
        return int(number) if whole else number
    return text


def _request(args: argparse.Namespace) -> RequestedOptions:
    """Return the request in a namespace of our parser, of torch's, or made by hand.

    A value at its default counts as not given, so that a settings file can set it.
    """
    found: Mapping[str, Any] = vars(args)
    script = found.get("training_script")
    if not script:
        raise ConfigurationError(
            "the namespace names no training_script",
            slug="usage",
            expected="what parse_args() returns",
        )
    given = [dest for dest in BY_DEST if _is_set(dest, found.get(dest))]
    values = as_text({dest: found[dest] for dest in given if dest not in _HOW})
    values |= dict.fromkeys((dest for dest in given if dest in _HOW), "1")
    words = tuple(map(str, found.get("training_script_args") or ()))
    if not get_use_env(args):
        words = (f"--local-rank={LOCAL_RANK_MACRO}", *words)
    return RequestedOptions(values, os.fspath(script), words)


def _is_set(dest: str, value: Any) -> bool:
    return value not in (None, "", [], _typed(BY_DEST[dest], BY_DEST[dest].default))


def _port(args: argparse.Namespace) -> int:
    return int(args.master_port or BY_DEST["master_port"].default)
