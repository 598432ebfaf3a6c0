"""Turns options and environment into one checked `AgentConfig`.

Every mistake that can be found before a process starts is refused here, with what to write instead.
It looks at the script's file and the secret's files; apart from that it only computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastane.errors import ConfigurationError, UsageError
from elastane.options import facts
from elastane.options.config import AgentConfig, RendezvousConfig, RequestedNode
from elastane.options.parser import Options, nearest
from elastane.options.rendezvous import (
    Conf,
    check_name,
    job_id,
    read_conf,
    requested_rank,
    resolve,
    timing_of,
)
from elastane.options.secret import secured
from elastane.options.show import notes_of
from elastane.options.workers import (
    read_command,
    read_logs,
    read_metrics,
    read_notices,
    read_serve,
    read_signals,
    read_supervision,
    repeated_signals,
    variable_notes,
)
from elastane.protocol.limits import TOPOLOGY_CHARS_MAX, Timing
from elastane.protocol.model import JobSpec
from elastane.stores import registry


def build(options: Options, environ: Mapping[str, str]) -> AgentConfig:
    """Return the configuration; UsageError or ConfigurationError for one that cannot work."""
    _check_monitor_interval(options)
    notes = notes_of(options, environ)
    conf = read_conf(options.text("rdzv_conf"))
    nodes = read_nnodes(options.text("nnodes"))
    command = read_command(options, environ)
    signals = read_signals(options)
    rendezvous, backend_notes = resolve(options, conf, nodes, environ)
    if rendezvous.backend == "standalone" or rendezvous.sidecar:
        nodes = (1, 1)
    static = rendezvous.backend == "static"
    node = _node(options, conf, environ)
    if static:
        node = replace(node, node_rank=node.node_rank or 0)
    job, alone = job_id(options, rendezvous, nodes)
    rendezvous = secured(replace(rendezvous, alone=alone), options, conf, environ)
    notes += [
        *conf.notes,
        *backend_notes,
        *_advice(rendezvous, node, environ),
        *variable_notes(environ),
    ]
    spec = JobSpec(
        job=job,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        max_restarts=_at_least_0(options, "max_restarts"),
        min_workers=_min_workers(options, nodes[1] * node.local_world_size),
        in_place=options.flag("in_place"),
        identical_workers=environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1",
        static=static,
        timing=_timing(options, conf, environ, rendezvous.backend),
    )
    notes += _advice_in_place(spec, node)
    return AgentConfig(
        spec=spec,
        node=node,
        rendezvous=rendezvous,
        command=command,
        logs=read_logs(options, environ, node.local_world_size),
        signals=signals,
        environment=dict(environ),
        notes=tuple(notes),
        supervision=read_supervision(options, environ, node.local_world_size),
        report_file=options.text("report_file"),
        repeated_signals=repeated_signals(signals, environ),
        notices=read_notices(options),
        serve=read_serve(options),
        metrics=read_metrics(options),
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
    """Read `--nproc-per-node`: a number, cpu, auto, gpu or the name of another kind of device."""
    if text == "cpu":
        return facts.cpu_count()
    if text == "auto":
        return facts.usable_gpus(environ) or facts.cpu_count()
    try:
        count = int(text)
    except ValueError:
        return _device_count(text, environ)
    if count < 1:
        raise _bad_nproc(text, "a number from 1, auto, cpu, or devices: gpu, xpu, ...")
    return count


def _device_count(kind: str, environ: Mapping[str, str]) -> int:
    gpu = kind == "gpu"
    count = facts.visible_gpus(environ) if gpu else facts.device_count(kind, environ)
    if count is None:
        near = nearest(kind, ("auto", "cpu", "gpu", "xpu"))
        hint = f"did you mean {near}? " if near else ""
        raise _bad_nproc(kind, hint + "a number from 1, auto, cpu, or devices: gpu, xpu, ...")
    if count == 0:
        raise ConfigurationError(
            f"--nproc-per-node {kind}: no such device is visible on this node",
            slug="no-gpu",
            expected="for gpu: devices in CUDA_VISIBLE_DEVICES, or /dev/nvidia* files"
            if gpu
            else "a device that torch can use",
            next_step="--nproc-per-node N with the number of workers, or cpu",
        )
    return count


def _bad_nproc(text: str, expected: str) -> UsageError:
    return UsageError(
        f"--nproc-per-node = {text!r}",
        slug="bad-option-value",
        expected=expected,
        next_step="--nproc-per-node 4 for four workers, auto for one on each GPU",
    )


def _check_monitor_interval(options: Options) -> None:
    interval_s = options.seconds("monitor_interval")
    if interval_s is not None and interval_s <= 0:
        raise options.bad("monitor_interval", "more than 0")


def _min_workers(options: Options, most: int) -> int:
    count = _at_least_0(options, "min_workers")
    if count > most:
        raise UsageError(
            f"--min-workers = {count}",
            slug="bad-option-value",
            expected=f"at most {most}, which is what all nodes have",
            next_step="allow more nodes with --nnodes MIN:MAX, or ask for fewer workers",
        )
    return count


def _at_least_0(options: Options, dest: str) -> int:
    count = options.whole(dest)
    if count < 0:
        name = f"--{dest.replace('_', '-')}"
        raise UsageError(
            f"{name} = {count}",
            slug="bad-option-value",
            expected="0 or a higher number",
            next_step=f"{name} 0, or leave it out",
        )
    return count


def _timing(options: Options, conf: Conf, environ: Mapping[str, str], backend_name: str) -> Timing:
    requested = dict(conf.durations)
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
        requested["shutdown_timeout_s"] = shutdown
    drain = options.seconds("drain_timeout")
    if drain is not None:
        requested["drain_timeout_s"] = drain
    is_store = registry.is_store(backend_name)
    return timing_of(requested, registry.backend(backend_name).timing if is_store else None)


def _node(options: Options, conf: Conf, environ: Mapping[str, str]) -> RequestedNode:
    node_id = options.text("node_id")
    if node_id:
        check_name("--node-id", node_id)
    check_name("--role", options.text("role"))
    return RequestedNode(
        node_id=node_id,
        local_world_size=read_nproc(options.text("nproc_per_node"), environ),
        role=options.text("role"),
        node_rank=requested_rank(options, conf),
        local_addr=options.text("local_addr"),
        topology=_topology(options.text("topology")),
    )


def _topology(text: str) -> str:
    """Return the levels of a node's place without empty ones, as of a label that is not set."""
    topology = "/".join(filter(None, map(str.strip, text.split("/"))))
    if not topology.isprintable() or len(topology) > TOPOLOGY_CHARS_MAX:
        raise ConfigurationError(
            f"--topology = {text!r}",
            slug="bad-name",
            expected=f"at most {TOPOLOGY_CHARS_MAX} printable characters, such as zone/rack/host",
            next_step="name the parts of the network, the largest first, or leave --topology out",
        )
    return topology


def _advice_in_place(spec: JobSpec, node: RequestedNode) -> list[str]:
    """Return a note for a job in place whose workers are all needed: each loss restarts all."""
    is_fixed = spec.min_nodes == spec.max_nodes and not spec.min_workers
    if not (spec.in_place and is_fixed) or spec.max_nodes * node.local_world_size == 1:
        return []
    return [
        "--in-place without --min-workers: all workers are needed, so the loss of one restarts all;"
        " --min-workers 1 lets the others continue"
    ]


def _advice(
    rendezvous: RendezvousConfig, node: RequestedNode, environ: Mapping[str, str]
) -> list[str]:
    notes = []
    if node.local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(
            f"OMP_NUM_THREADS=1 for each of {node.local_world_size} workers, so that they do not "
            "fight over the CPUs; set it to choose another number"
        )
    # A store holds its own secret, which every reader of the store has.
    if not rendezvous.token and rendezvous.tls is None and not rendezvous.store:
        notes.append(
            "this job has no secret: any process that reaches its coordinator can join it; set "
            "ELASTANE_TOKEN or --token-file to the same on all nodes"
        )
    return notes
