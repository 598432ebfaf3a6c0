"""`elastane kubernetes ACT`: jobs on Kubernetes, from their definition to their operator.

Each act is a function of the parsed options that returns the exit code; `ACTS` is the table of
them. `kubernetes.manifests` makes the YAML, `_kubernetes_view` the text for people.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from elastane.cli import _kubernetes_checks as checks
from elastane.cli import _kubernetes_render as rendering
from elastane.cli.parser import Act, add_acts

if TYPE_CHECKING:
    from elastane.kubernetes.client import ClusterAccess

NAMESPACE = "elastane-system"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the acts."""
    add_acts(parser, "kubernetes", ACTS)


def main(args: argparse.Namespace) -> int:
    """Run an act."""
    return ACTS[args.act].run(args)


def _configure_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kubeconfig",
        metavar="FILE",
        default="",
        help="(default: KUBECONFIG, otherwise the service account of the pod)",
    )
    add(
        "--context",
        metavar="NAME",
        default="",
        help="context of the kubeconfig (default: the current one)",
    )


def _access(args: argparse.Namespace) -> ClusterAccess:
    from elastane.kubernetes.client import find_access
    from elastane.process import environment

    return find_access(
        environment.snapshot(),
        kubeconfig=args.kubeconfig,
        context=args.context,
        namespace=args.namespace,
    )


# The act that runs the operator.


def _configure_operator(parser: argparse.ArgumentParser) -> None:
    _configure_access(parser)
    add = parser.add_argument
    add(
        "--namespace",
        metavar="NAME",
        default="",
        help="manage jobs in this namespace only (default: all)",
    )
    add(
        "--lease-namespace",
        metavar="NAME",
        default="",
        help="namespace of the operators' leader election lease (default: its own)",
    )
    add(
        "--lease-name",
        metavar="NAME",
        default="",
        help="name of that lease (default: elastane-operator)",
    )
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /healthz, /readyz and /metrics here (default: off)",
    )
    add("--json-logs", action="store_true", help="log one JSON object per line on stderr")
    parser.epilog = "SIGTERM ends it; jobs do not notice"


def _operator(args: argparse.Namespace) -> int:
    import asyncio

    from elastane.kubernetes import operator
    from elastane.observe.logging import flush

    checks.check_namespace("--namespace", args.namespace)
    checks.check_namespace("--lease-namespace", args.lease_namespace)
    if args.lease_name:
        checks.check_object("--lease-name", args.lease_name, "leases")
    checks.check_port("--metrics-port", args.metrics_port)
    access = _access(args)
    settings = operator.OperatorSettings(
        namespace=args.namespace,
        lease_namespace=args.lease_namespace or access.namespace or "default",
        lease_name=args.lease_name or operator.LEASE_NAME,
        identity=operator.identity(),
        metrics_port=args.metrics_port,
    )
    operator.set_up_logs(as_json=args.json_logs)
    try:
        asyncio.run(operator.run(access, settings))
    finally:
        flush()
    return 0


# Acts that print YAML for kubectl apply.


def _configure_crd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without-rules",
        action="store_true",
        help="omit the CEL validation rules, for Kubernetes before 1.25",
    )
    parser.epilog = "elastane kubernetes crd | kubectl apply -f -"


def _crd(args: argparse.Namespace) -> int:
    from elastane.kubernetes.schema import definitions

    print_yaml(definitions(with_rules=not args.without_rules))
    return 0


def _configure_install(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--namespace",
        metavar="NAME",
        default=NAMESPACE,
        help=f"namespace of the operator ({NAMESPACE})",
    )
    add("--image", required=True, help="image with elastane[kubernetes] (see deploy/Dockerfile)")
    add(
        "--watch-namespace",
        metavar="NAME",
        default="",
        help="manage jobs in this namespace only, without rights to others (default: all)",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of operator pods; one is active, and 0 installs all but these",
    )
    _configure_crd(parser)
    parser.epilog = "elastane kubernetes install --image IMAGE | kubectl apply -f -"


def _install(args: argparse.Namespace) -> int:
    from elastane.kubernetes.manifests import Installation, installation

    checks.check_namespace("--namespace", args.namespace)
    checks.check_namespace("--watch-namespace", args.watch_namespace)
    checks.check_image("--image", args.image)
    checks.check_least("--replicas", args.replicas, 0)
    wanted = Installation(
        namespace=args.namespace,
        image=args.image,
        watch_namespace=args.watch_namespace,
        replicas=args.replicas,
        with_rules=not args.without_rules,
    )
    print_yaml(installation(wanted))
    return 0


def _render(args: argparse.Namespace) -> int:
    print_yaml([rendering.job_of(args)])
    return 0


def print_yaml(documents: list[dict[str, Any]]) -> None:
    """Write documents as YAML for kubectl, in the order in which to apply them."""
    from elastane.kubernetes.manifests import as_yaml

    sys.stdout.write(as_yaml(documents))


# Acts that print text for a person.


def _configure_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="name of the ElasticJob")
    _configure_access(parser)
    add = parser.add_argument
    add(
        "-n",
        "--namespace",
        metavar="NAME",
        default="",
        help="namespace (default: that of the context)",
    )
    add("--json", action="store_true", help="print everything as JSON")
    parser.epilog = "exit status: 1 where the job has failed"


def _status(args: argparse.Namespace) -> int:
    import asyncio

    from elastane.cli import _kubernetes_view as view

    checks.check_namespace("--namespace", args.namespace)
    checks.check_object("ElasticJob", args.job, "elasticjobs")
    found = asyncio.run(view.look(_access(args), args.job))
    if args.json:
        print(view.as_json(found))
    else:
        from elastane.observe.box import printable

        print("\n".join(printable(line) for line in view.lines(found)))
    return int(found.has_failed)


def kubectl() -> int:
    """Run the plugin `kubectl elastane`, which is this verb."""
    from elastane.cli.main import main_of

    return main_of("kubernetes", sys.argv[1:], "kubectl elastane")


ACTS = {
    "operator": Act(
        "run the operator, which manages the ElasticJobs of a cluster",
        _operator,
        _configure_operator,
    ),
    "status": Act("show a job: pods, round, step, events", _status, _configure_status),
    "crd": Act(
        "print the CustomResourceDefinitions of ElasticJob and its templates", _crd, _configure_crd
    ),
    "install": Act("print the manifests that install the operator", _install, _configure_install),
    "render": Act("print an ElasticJob made from options", _render, rendering.configure),
}
