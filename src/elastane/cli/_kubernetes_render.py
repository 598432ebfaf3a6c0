"""The options of `elastane kubernetes render`, and the ElasticJob that they describe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from elastane.cli import _kubernetes_checks as checks
from elastane.errors import UsageError

if TYPE_CHECKING:
    from elastane.kubernetes.manifests import Volume

GPU = "nvidia.com/gpu"
_HELP = "elastane kubernetes render --help"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--name", required=True, help="name of the job")
    add("-n", "--namespace", default="", metavar="NAME", help="(default: that of the context)")
    add("--image", default="", help="image of the pods; its entry point is a launcher")
    add(
        "--template",
        default="",
        metavar="NAME",
        help="ElasticJobTemplate of the namespace, which has what is not given here",
    )
    add("--replicas", type=int, metavar="N", help="desired number of pods (1)")
    add("--min", type=int, metavar="N", help="pods without which the job waits (--replicas)")
    add("--max", type=int, metavar="N", help="maximum number of pods when scaling (--replicas)")
    add("--nproc-per-node", default="", metavar="N", help="workers in each pod")
    add("--max-restarts", type=int, metavar="N", help="worker failures before the job fails (0)")
    add("--launcher", choices=("elastane", "torchrun"), default="", help="launcher in the image")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="your own etcd (optional)")
    add("--gpus", type=int, default=0, metavar="N", help=f"{GPU} per pod")
    add("--cpu", default="", metavar="N", help="CPUs to request for each pod, such as 4 or 500m")
    add("--memory", default="", metavar="SIZE", help="request and limit, such as 16Gi")
    add("--shm", default="", metavar="SIZE", help="size of /dev/shm, for data loaders")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    add(
        "--volume",
        action="append",
        default=[],
        metavar="PVC:PATH[:ro]",
        help="mount a PersistentVolumeClaim; may be repeated",
    )
    add(
        "--host-path",
        action="append",
        default=[],
        metavar="DIR:PATH[:ro]",
        help="mount a node's folder",
    )
    add("--restart-policy", choices=("ExitCode", "OnFailure", "Never", "Always"), default="")
    add("--backoff-limit", type=int, metavar="N", help="pod failures before the job fails")
    add("--ttl", type=int, metavar="S", help="seconds until a finished job is deleted")
    add(
        "--pod-group",
        choices=("Coscheduling", "Kubernetes", "Volcano"),
        default="",
        help="scheduler that places the pods of the minimum together",
    )
    add("--suspend", action="store_true", help="create no pods until resumed, as Kueue expects")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script and its arguments")
    parser.epilog = "elastane kubernetes render --name x --image y train.py | kubectl apply -f -"


def job_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ElasticJob; UsageError if the options describe none."""
    from elastane.kubernetes.manifests import RequestedJob, job

    _check(args)
    if args.template:
        return _job_of_template(args)
    if not args.image:
        raise UsageError(
            "--image is missing",
            slug="bad-option-value",
            expected="the image of the pods, or --template",
            next_step=_HELP,
        )
    made = job(
        RequestedJob(
            name=args.name,
            namespace=args.namespace,
            image=args.image,
            args=_words(args),
            replicas=1 if args.replicas is None else args.replicas,
            min=args.min,
            max=args.max,
            fields=_fields(args),
            env=tuple(_env(text) for text in args.env),
            volumes=tuple(_volumes(args)),
            limits=_limits(args),
            requests={"cpu": args.cpu} if args.cpu else {},
        )
    )
    if args.restart_policy:
        made["spec"]["replicaSpecs"]["Worker"]["restartPolicy"] = args.restart_policy
    return _checked(made)


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for a value that the API server or a kubelet would refuse later."""
    checks.check_namespace("--namespace", args.namespace)
    if args.template:
        checks.check_object("--template", args.template, "elasticjobtemplates")
    checks.check_image("--image", args.image)
    checks.check_quantity("--cpu", args.cpu, "4 or 500m")
    checks.check_quantity("--memory", args.memory, "16Gi")
    checks.check_quantity("--shm", args.shm, "8Gi")
    checks.check_least("--gpus", args.gpus, 0)
    checks.check_least("--replicas", args.replicas, 0)
    checks.check_least("--min", args.min, 1)
    checks.check_least("--max", args.max, 1)
    if args.min is not None and args.max is not None and args.min > args.max:
        raise checks.wrong_value("--min", str(args.min), f"at most --max, {args.max}", _HELP)


# The options that a job of a template may have; those of the launcher become arguments.
_WITH_TEMPLATE = {
    "act", "args", "env", "image", "max", "max_restarts", "min", "name", "namespace",
    "nproc_per_node", "replicas", "script", "suspend", "template", "verb",
}  # fmt: skip


def _job_of_template(args: argparse.Namespace) -> dict[str, Any]:
    """Return a job that names a template; the operator knows whether it allows what is asked."""
    from elastane.kubernetes.manifests import job_of_template
    from elastane.kubernetes.reconcile.settings import wrong_name

    parser = argparse.ArgumentParser()
    configure(parser)
    for name, value in vars(args).items():
        if name not in _WITH_TEMPLATE and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} with --template",
                slug="bad-option-value",
                expected="of a job of a template: --image, --env, --replicas, --min, --max,"
                " --suspend, and arguments",
                next_step=f"leave {option} to the template",
            )
    if wrong := wrong_name(args.name):
        raise UsageError(
            f"no ElasticJob: {wrong[0]}",
            slug="bad-option-value",
            next_step=_HELP,
        )
    asked = {
        "image": args.image or None,
        "args": list(_words(args)) or None,
        "env": [_env(text) for text in args.env] or None,
        "replicas": args.replicas,
        "minReplicas": args.min,
        "maxReplicas": args.max,
    }
    ref = {"name": args.template} | {key: one for key, one in asked.items() if one is not None}
    return job_of_template(args.name, args.namespace, ref, is_suspended=args.suspend)


def _checked(made: dict[str, Any]) -> dict[str, Any]:
    """Return the job if the operator would accept it; otherwise raise the operator's reason."""
    import msgspec

    from elastane.kubernetes.model import ElasticJob
    from elastane.kubernetes.reconcile.settings import read

    reading = read(msgspec.convert(made, ElasticJob))
    wrong, settings = [*map(str, reading.wrong)], reading.settings
    if settings is not None and settings.asked != settings.desired:
        wrong.append(f"--replicas {settings.asked}: expected {settings.min} to {settings.max}")
    if wrong:
        raise UsageError(
            f"no ElasticJob: {wrong[0]}",
            slug="bad-option-value",
            next_step=_HELP,
        )
    return made


def _words(args: argparse.Namespace) -> tuple[str, ...]:
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    said = [f"--nproc-per-node={args.nproc_per_node}"] if args.nproc_per_node else []
    if args.max_restarts is not None:
        said.append(f"--max-restarts={args.max_restarts}")
    return (*said, *script)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    said = {
        "rdzvEndpoint": args.rdzv_endpoint or None,
        "launcher": args.launcher or None,
        "backoffLimit": args.backoff_limit,
        "ttlSecondsAfterFinished": args.ttl,
        "schedulingPolicy": {"podGroup": args.pod_group} if args.pod_group else None,
        "suspend": args.suspend or None,
    }
    return {key: value for key, value in said.items() if value is not None}


def _env(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise checks.wrong_value("--env", text, "NAME=VALUE", _HELP)
    return {"name": name, "value": value}


def _volumes(args: argparse.Namespace) -> list[Volume]:
    from elastane.kubernetes.manifests import Volume

    found = []
    if args.shm:
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": args.shm}}
        found.append(Volume("dshm", memory, "/dev/shm"))
    for number, text in enumerate(args.volume):
        claim, path, read_only = _mount("--volume", text)
        checks.check_object("--volume", claim, "persistentvolumeclaims")
        source = {"persistentVolumeClaim": {"claimName": claim}}
        found.append(Volume(f"volume-{number}", source, path, read_only))
    for number, text in enumerate(args.host_path):
        folder, path, read_only = _mount("--host-path", text)
        if not folder.startswith("/"):
            raise checks.wrong_value("--host-path", text, "an absolute folder of the node", _HELP)
        found.append(Volume(f"host-{number}", {"hostPath": {"path": folder}}, path, read_only))
    return found


def _mount(option: str, text: str) -> tuple[str, str, bool]:
    what, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not what or not path.startswith("/") or mode not in ("", "ro"):
        raise checks.wrong_value(option, text, "WHAT:/PATH or WHAT:/PATH:ro", _HELP)
    return what, path, mode == "ro"


def _limits(args: argparse.Namespace) -> dict[str, str]:
    said = {GPU: str(args.gpus) if args.gpus else "", "memory": args.memory}
    return {key: value for key, value in said.items() if value}
