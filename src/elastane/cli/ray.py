"""`elastane ray`: run a job on a Ray cluster, as the program of `ray job submit`."""

from __future__ import annotations

import argparse
import functools
import secrets
from dataclasses import replace
from pathlib import PurePath

from elastane.cli._scheduler_options import add_run_options, own_option, parser_with, value_of
from elastane.errors import UsageError
from elastane.options.parser import Options, RunParser, words_of
from elastane.options.table import BY_DEST

RAY = "Ray: what is reserved on each node"
_option = functools.partial(own_option, RAY)


OPTIONS = (
    _option("gpus-per-node", "0", "GPUs of each node; one worker for each by default", "N", "int"),
    _option("cpus-per-node", "", "CPUs of each node (default: one for each worker)", "N", "int"),
    _option("resources", "", "further resources of Ray: TPU=4,special=1", "NAME=N,..."),
    _option("ray-address", "", "address of the cluster (default: RAY_ADDRESS, this one)", "ADDR"),
)
# What this verb chooses itself, and options that concern one node or another way to meet.
_CHOSEN = ("rdzv_endpoint", "node_id", "node_rank", "local_addr", "master_addr", "master_port")
_NOT_HERE = ("standalone", "show_config", "json", "serve")
_BACKENDS = ("elastane", "c10d")
# Variables of the program that its agents get: options that no flag has, and the secret.
_PASSED = ("ELASTANE_", "TORCH_ELASTIC_", "LOGLEVEL")
# The settings file, which is read here: its values are among the words of the agents.
_READ_HERE, _READ_HERE_VARIABLE = "config", "ELASTANE_CONFIG"
_NOTICES = "ELASTANE_NOTICES"
_EPILOG = """\
examples:
  ray job submit --working-dir . -- {prog} --nnodes 4 --gpus-per-node 8 train.py --lr 0.1
      four nodes, one worker for each GPU
  ray job submit --working-dir . -- {prog} --nnodes 1:4 --max-restarts 100 train.py
      as many nodes as the cluster has, up to four; a lost node does not end the job

Write the options of Ray and of elastane run before the script, in any order; see
docs/schedulers.md."""


Parser = parser_with(OPTIONS)


def configure(parser: RunParser) -> None:
    """Add Ray's options, then those of `elastane run`."""
    add_run_options(parser, _EPILOG)


def main(args: argparse.Namespace) -> int:
    """Run the job to its end."""
    from elastane.cli.run import read_options
    from elastane.options.build import build
    from elastane.process import environment
    from elastane.ray.job import RayRequest, run_job

    environ = environment.snapshot()
    options = _checked(args, read_options(args, environ))
    environ.pop(_READ_HERE_VARIABLE, None)
    need = _need(args, options)
    # The coordinator's configuration. Its endpoint is known once the program is connected.
    here = replace(
        options,
        values={**options.values, "rdzv_endpoint": "localhost:29400"},
        origins={**options.origins, "rdzv_endpoint": options.origin("nnodes")},
    )
    config = build(here, environ)
    # By the environment, where the actor of an agent adds a source of its own.
    if "notices" in options.given:
        environ[_NOTICES] = options.text("notices")
    request = RayRequest(
        config=config,
        words=(*words_of(_without(options, "notices")), options.script, *options.script_args),
        environ={name: text for name, text in environ.items() if name.startswith(_PASSED)},
        need=need,
        address=value_of(args, OPTIONS, "ray_address"),
    )
    return run_job(request)


def _checked(args: argparse.Namespace, options: Options) -> Options:
    """Return the options with the number of workers and the job's name; refuse unfit ones."""
    for dest in (*_CHOSEN, *_NOT_HERE):
        if dest in options.given and not _is_off(options, dest):
            raise UsageError(
                f"--{dest.replace('_', '-')} is for elastane run",
                slug="usage",
                where=str(options.origin(dest)),
                expected="options of Ray and of the job: elastane ray chooses where nodes meet",
                next_step="leave it out",
            )
    if "rdzv_backend" in options.given and options.text("rdzv_backend").lower() not in _BACKENDS:
        raise UsageError(
            f"--rdzv-backend {options.text('rdzv_backend')}",
            slug="usage",
            where=str(options.origin("rdzv_backend")),
            expected="elastane: the program of the job serves the coordinator",
            next_step="leave it out",
        )
    values = {"nproc_per_node": _workers(args, options), "rdzv_backend": _BACKENDS[0]}
    if "rdzv_id" not in options.given:
        values["rdzv_id"] = f"{PurePath(options.script).stem or 'job'}-{secrets.token_hex(4)}"
    origins = {**options.origins, **{name: options.origin(name) for name in values}}
    origins.pop(_READ_HERE, None)
    return replace(options, values={**options.values, **values}, origins=origins)


def _without(options: Options, dest: str) -> Options:
    origins = {name: origin for name, origin in options.origins.items() if name != dest}
    return replace(options, origins=origins)


def _is_off(options: Options, dest: str) -> bool:
    """Whether it is a flag that a variable or the settings file turns off."""
    return BY_DEST[dest].kind == "flag" and not options.flag(dest)


def _workers(args: argparse.Namespace, options: Options) -> str:
    """Return the workers of each node as a number: this machine may have other devices."""
    text = options.text("nproc_per_node")
    gpus, cpus = value_of(args, OPTIONS, "gpus_per_node"), value_of(args, OPTIONS, "cpus_per_node")
    if "nproc_per_node" not in options.given:
        return gpus if gpus != "0" else text
    if text == "gpu" or (text == "auto" and gpus != "0"):
        text = gpus
    elif text in ("cpu", "auto"):
        text = cpus
    if not text.isdigit() or text == "0":
        raise UsageError(
            f"--nproc-per-node {options.text('nproc_per_node')}",
            slug="bad-option-value",
            where=str(options.origin("nproc_per_node")),
            expected="a number, or gpu with --gpus-per-node N, or cpu with --cpus-per-node N",
            next_step="say what Ray is to reserve on each node: --gpus-per-node 8",
        )
    return text


def _need(args: argparse.Namespace, options: Options) -> dict[str, float]:
    """Return what Ray reserves on each node."""
    gpus = _number("gpus-per-node", value_of(args, OPTIONS, "gpus_per_node"))
    cpus = value_of(args, OPTIONS, "cpus_per_node") or options.text("nproc_per_node")
    need = {"CPU": _number("cpus-per-node", cpus)}
    if gpus:
        need["GPU"] = gpus
    for pair in filter(None, value_of(args, OPTIONS, "resources").split(",")):
        name, _, count = pair.partition("=")
        if not name or name in ("CPU", "GPU"):
            raise _bad_number("resources", pair)
        need[name] = _number("resources", count)
    return need


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise _bad_number(name, text)
    return number


def _bad_number(name: str, text: str) -> UsageError:
    expected = "NAME=N,NAME=N without CPU and GPU" if name == "resources" else "a number, 0 or more"
    return UsageError(
        f"--{name} = {text!r}",
        slug="bad-option-value",
        expected=expected,
        next_step=f"see elastane ray --help for --{name}",
    )
