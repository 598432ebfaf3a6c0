"""Options and environment into one checked `LaunchConfig`.

Everything that can be known to be wrong before a process is started is refused here, with what
to write instead. It looks at the script's and the secrets' files; else it only computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastane.core.limits import Timing
from elastane.core.model import JobSpec
from elastane.errors import ConfigurationError, UsageError
from elastane.launcher import backend, facts, identity
from elastane.launcher.command import read_command, read_logs, read_signals
from elastane.launcher.conf import Conf, read_conf, timing_of
from elastane.launcher.config import LaunchConfig, NodeWish, Rendezvous
from elastane.launcher.options import TABLE
from elastane.launcher.parser import Options
from elastane.launcher.secret import secured


def build(options: Options, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration; UsageError or ConfigurationError for what cannot work."""
    notes = _refuse_later(options)
    conf = read_conf(options.text("rdzv_conf"))
    nodes = read_nnodes(options.text("nnodes"))
    command = read_command(options, environ)
    rendezvous, more = backend.resolve(options, conf, nodes)
    if rendezvous.backend == "standalone":
        nodes = (1, 1)
    static = rendezvous.backend == "static"
    node = _node(options, conf, environ)
    if static:
        node = replace(node, node_rank=node.node_rank or 0)
    job, alone = identity.job_id(options, rendezvous, nodes)
    rendezvous = secured(replace(rendezvous, alone=alone), options, conf, environ)
    notes += [*conf.notes, *more, *_advice(rendezvous, node, environ)]
    return LaunchConfig(
        spec=JobSpec(
            job=job,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            max_restarts=_max_restarts(options),
            identical_workers=environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1",
            static=static,
            timing=_timing(options, conf, environ),
        ),
        node=node,
        rendezvous=rendezvous,
        command=command,
        logs=read_logs(options, environ, node.local_world_size),
        signals=read_signals(options),
        environment=dict(environ),
        notes=tuple(notes),
    )


def read_nnodes(text: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`."""
    parts = text.split(":")
    try:
        low, high = (int(part) for part in (parts if len(parts) > 1 else parts * 2))
    except ValueError:
        low, high = 0, 0
    if not 0 < low <= high:
        raise UsageError(
            f"--nnodes = {text!r}",
            slug="bad-nnodes",
            expected="N or MIN:MAX with 1 <= MIN <= MAX",
            next_step="--nnodes 2 for two nodes, --nnodes 1:4 for one to four",
        )
    return low, high


def read_nproc(text: str, environ: Mapping[str, str]) -> int:
    """Read `--nproc-per-node`: a number, cpu, gpu or auto."""
    if text == "cpu":
        return facts.cpu_count()
    if text == "auto":
        return facts.usable_gpus(environ) or facts.cpu_count()
    if text == "gpu":
        count = facts.gpu_count(environ)
        if count == 0:
            raise ConfigurationError(
                "--nproc-per-node gpu: no GPU is visible on this node",
                slug="no-gpu",
                expected="devices in CUDA_VISIBLE_DEVICES, or /dev/nvidia* files",
                next_step="--nproc-per-node N with the number of workers, or cpu",
            )
        return count
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(
        f"--nproc-per-node = {text!r}",
        slug="bad-option-value",
        expected="a number from 1, auto, cpu or gpu; other devices by their number",
    )


def _refuse_later(options: Options) -> list[str]:
    notes = []
    for option in TABLE:
        if options.values[option.dest] == option.default or option.dest not in options.given:
            continue
        if option.kind == "flag" and not options.flag(option.dest):
            continue
        if option.later:
            raise ConfigurationError(
                f"--{option.name} {options.values[option.dest]} is not in this version",
                slug="not-in-this-version",
                expected=f"no --{option.name}" + (f" and no {option.env}" if option.env else ""),
                next_step=option.later,
            )
        if option.idle:
            notes.append(f"--{option.name} has no effect here: {option.idle}")
    return notes


def _max_restarts(options: Options) -> int:
    count = options.whole("max_restarts")
    if count < 0:
        raise UsageError(
            f"--max-restarts = {count}", slug="bad-option-value", expected="0 or a higher number"
        )
    return count


def _timing(options: Options, conf: Conf, environ: Mapping[str, str]) -> Timing:
    wished = dict(conf.durations)
    shutdown = options.seconds("shutdown_timeout")
    variable = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if shutdown is None and variable:
        try:
            shutdown = float(variable)
        except ValueError:
            raise ConfigurationError(
                f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT = {variable!r}",
                slug="bad-option-value",
                expected="a number of seconds",
            ) from None
    if shutdown is not None:
        wished["shutdown_timeout_s"] = shutdown
    drain = options.seconds("drain_timeout")
    if drain is not None:
        wished["drain_timeout_s"] = drain
    return timing_of(wished)


def _node(options: Options, conf: Conf, environ: Mapping[str, str]) -> NodeWish:
    node_id = options.text("node_id")
    if node_id:
        identity.check_name("--node-id", node_id)
    identity.check_name("--role", options.text("role"))
    return NodeWish(
        node_id=node_id,
        local_world_size=read_nproc(options.text("nproc_per_node"), environ),
        role=options.text("role"),
        node_rank=backend.wished_rank(options, conf),
        local_addr=options.text("local_addr"),
    )


def _advice(rendezvous: Rendezvous, node: NodeWish, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if node.local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(
            f"OMP_NUM_THREADS=1 for each of {node.local_world_size} workers, so that they do not "
            "fight over the CPUs; set it to choose another number"
        )
    # A shared folder holds a secret of its own, for whoever may read the folder.
    if not rendezvous.token and rendezvous.tls is None and rendezvous.backend != "file":
        notes.append(
            "this job has no secret: whoever reaches its coordinator can join it; set "
            "ELASTANE_TOKEN or --token-file to the same on all nodes"
        )
    return notes
