"""`elastane.elastic` has the public names of torch.distributed.elastic, with the same signatures.

The installed torch is the reference: a name that it gains, loses or changes fails here.
"""

from __future__ import annotations

import enum
import importlib
import inspect

import pytest

MODULES = [
    "agent.server",
    "agent.server.api",
    "agent.server.health_check_server",
    "agent.server.local_elastic_agent",
    "control_plane",
    "events",
    "events.api",
    "events.handlers",
    "metrics",
    "metrics.api",
    "multiprocessing",
    "multiprocessing.api",
    "multiprocessing.errors",
    "multiprocessing.errors.error_handler",
    "multiprocessing.errors.handlers",
    "multiprocessing.redirects",
    "multiprocessing.subprocess_handler",
    "multiprocessing.subprocess_handler.handlers",
    "multiprocessing.subprocess_handler.subprocess_handler",
    "multiprocessing.tail_log",
    "rendezvous",
    "rendezvous.api",
    "rendezvous.c10d_rendezvous_backend",
    "rendezvous.dynamic_rendezvous",
    "rendezvous.etcd_server",
    "rendezvous.registry",
    "rendezvous.static_tcp_rendezvous",
    "rendezvous.utils",
    "timer",
    "timer.api",
    "timer.debug_info_logging",
    "timer.file_based_local_timer",
    "timer.local_timer",
    "utils",
    "utils.api",
    "utils.data",
    "utils.data.cycling_iterator",
    "utils.data.elastic_distributed_sampler",
    "utils.distributed",
    "utils.log_level",
    "utils.logging",
    "utils.process_state",
    "utils.store",
]
PAIRS = [
    *((f"torch.distributed.elastic.{name}", f"elastane.elastic.{name}") for name in MODULES),
    ("torch.distributed.launcher", "elastane.elastic.launcher"),
    ("torch.distributed.launcher.api", "elastane.elastic.launcher.api"),
]
# What is not here, and why.
LEFT_OUT = {
    "rendezvous.dynamic_rendezvous.get_method_name": "a helper of torch's own logging",
}
# Where the signature differs, and why.
DIFFERS = {
    "rendezvous.RendezvousHandler": "it takes parameters, for subclasses without their own start",
    "rendezvous.api.RendezvousHandler": "it takes parameters, for such subclasses",
    "agent.server.WorkerSpec": "rdzv_handler may be left out: one machine",
    "agent.server.api.WorkerSpec": "rdzv_handler may be left out: one machine",
    "agent.server.LocalElasticAgent": "logs_specs may be left out: the console",
    "agent.server.local_elastic_agent.LocalElasticAgent": "logs_specs may be left out",
    "multiprocessing.errors.record": "torch's annotations only",
    "metrics.profile": "the deprecation decorator hides torch's signature",
    "metrics.api.profile": "the deprecation decorator hides torch's signature",
    "metrics.publish_metric": "the deprecation decorator hides torch's signature",
    "metrics.api.publish_metric": "the deprecation decorator hides torch's signature",
}


def public_names(module):
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(module.__name__)
    ]


def parameters(value):
    """Return names, kinds and defaults of parameters; mypy checks the annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind.name, _default(p.default)) for p in signature.parameters.values()]


def _default(value):
    if value is inspect.Parameter.empty:
        return "required"
    if inspect.isfunction(value):
        return "a function"
    return repr(value).replace("<factory>", "factory")


def key(torchs, name):
    return f"{torchs}.{name}".replace("torch.distributed.elastic.", "").replace(
        "torch.distributed.", ""
    )


def members():
    for torchs, ours in PAIRS:
        for name in public_names(importlib.import_module(torchs)):
            yield pytest.param(torchs, ours, name, id=key(torchs, name))


@pytest.mark.parametrize(("torchs", "ours", "name"), list(members()))
def test_the_name_is_there_with_the_same_signature(torchs, ours, name):
    theirs = getattr(importlib.import_module(torchs), name)
    module = importlib.import_module(ours)
    if LEFT_OUT.get(key(torchs, name)):
        assert not hasattr(module, name), "it is there after all: take it off the list"
        return
    assert hasattr(module, name), f"{ours} has no {name}"
    mine = getattr(module, name)
    if inspect.isclass(theirs) and issubclass(theirs, enum.Enum):
        assert {m.name: m.value for m in mine} == {m.name: m.value for m in theirs}
        return
    if key(torchs, name) not in DIFFERS:
        assert parameters(mine) == parameters(theirs)
    if inspect.isclass(theirs):
        _same_class(mine, theirs)


def _same_class(mine, theirs):
    missing = [
        name
        for name in vars(theirs)
        if not name.startswith("_")
        and not hasattr(mine, name)
        and name not in getattr(mine, "__annotations__", {})
        and name not in getattr(theirs, "__slots__", ())
    ]
    assert not missing, f"{mine} lacks {missing}"
    for name, value in vars(theirs).items():
        if not name.startswith("_") and inspect.isfunction(value):
            found = [p[0] for p in parameters(getattr(mine, name))]
            assert found == [p[0] for p in parameters(value)], name
    if issubclass(theirs, BaseException):
        bases = [base.__name__ for base in theirs.__mro__]
        found = [b.__name__ for b in mine.__mro__ if b.__name__ in bases]
        assert list(dict.fromkeys(found)) == bases, "a subclass of torch's has the name twice"


def test_all_modules_are_compared():
    import pkgutil

    import torch.distributed.elastic as reference

    found = {
        info.name.removeprefix("torch.distributed.elastic.")
        for info in pkgutil.walk_packages(reference.__path__, "torch.distributed.elastic.")
    }
    # Packages without names of their own, and those that cannot be imported without python-etcd.
    known = {*MODULES, "agent", "rendezvous.etcd_rendezvous", "rendezvous.etcd_rendezvous_backend"}
    known |= {"rendezvous.etcd_store", "rendezvous._etcd_stub"}
    assert found <= known, found - known
