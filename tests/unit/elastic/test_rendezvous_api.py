"""Names, values and errors of the rendezvous API, compared with the installed torch's own."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from importlib.metadata import EntryPoint

import pytest
import torch.distributed as dist
from torch.distributed.elastic import rendezvous as torch_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_dynamic
from torch.distributed.elastic.rendezvous import utils as torch_utils

from elastane.elastic import rendezvous as api
from elastane.elastic.rendezvous import dynamic_rendezvous as dynamic
from elastane.elastic.rendezvous import registry, utils
from elastane.elastic.rendezvous.registry import _Plugin, get_rendezvous_handler
from elastane.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from elastane.stores.etcd.settings import read_settings

BOTH = [torch_api, api]
# What torch does with a plug-in in each program that imports torch.distributed.elastic.
LOADED = """
import sys
import elastane.integrations.torchrun
assert callable(elastane.integrations.torchrun.handler())
print(*(name for name in sys.modules if name.partition(".")[0] in ("elastane", "torch")))
"""


def outcome(call, *args, **kwargs):
    """Return the value of a call, or the type of its exception."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error)


def test_the_public_names_are_torchs():
    assert set(api.__all__) == set(torch_api.__all__)
    assert set(dynamic.__all__) == set(torch_dynamic.__all__)


def test_torch_imports_nothing_but_the_plug_in_before_it_makes_a_handler():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {
        "elastane",
        "elastane.version",
        "elastane.integrations",
        "elastane.integrations.torchrun",
    }


def test_the_errors_have_one_base():
    for name in api.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(api, name), api.RendezvousError)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", None, " ", "host", "host:29400", "host:0", "host:65535", "host:65536", "host:", ":1"),
        *("[::1]:5", "[::1]", "::1", "fe80::1:7", "a b", "host:abc", "1.2.3.4:80", "x_y.z-w:1"),
        *("host:123456", "host:-1", "http://x:1", "[]", "[", "ho\nst:1"),
    ],
)
def test_endpoints_are_read_as_torch_reads_them(endpoint):
    ours = outcome(utils.parse_rendezvous_endpoint, endpoint, 29400)
    assert ours == outcome(torch_utils.parse_rendezvous_endpoint, endpoint, 29400)


@pytest.mark.parametrize(
    "text", ["", " ", "a=1", "a=1,b=2", " a = 1 , b=x=y ", "a", "a=", "=1", "a=1,", "a=1,,b=2"]
)
def test_configuration_strings_are_read_as_torch_reads_them(text):
    ours = outcome(utils._parse_rendezvous_config, text)
    assert ours == outcome(torch_utils._parse_rendezvous_config, text)


VALUES = [None, True, False, 0, 1, 2, "1", "0", "True", "F", "yes", "n", "maybe", "", "7", 1.5, "x"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("method", ["get", "get_as_bool", "get_as_int"])
def test_parameters_are_read_as_torch_reads_them(value, method):
    made = [module.RendezvousParameters("b", "e", "r", 1, 2, key=value) for module in BOTH]
    theirs, ours = (outcome(getattr(params, method), "key") for params in made)
    assert (ours, type(ours)) == (theirs, type(theirs))
    assert [getattr(params, method)("absent") for params in made] == [None, None]


@pytest.mark.parametrize(
    "wrong", [("", "e", "r", 1, 2), ("b", "e", "r", 0, 2), ("b", "e", "r", 3, 2)]
)
def test_impossible_parameters_are_refused(wrong):
    for module in BOTH:
        with pytest.raises(ValueError):
            module.RendezvousParameters(*wrong)


@pytest.mark.parametrize("module", BOTH, ids=["torch", "ours"])
def test_a_registry_has_one_creator_for_a_name_and_checks_what_it_makes(module):
    registry = module.RendezvousHandlerRegistry()
    static = module.RendezvousParameters("mine", "h:1", "r", 1, 1, rank=0)

    def creator(params):
        return create_rdzv_handler(params)

    with pytest.raises(ValueError):
        registry.create_handler(static)
    registry.register("mine", creator)
    registry.register("mine", creator)
    with pytest.raises(ValueError):
        registry.register("mine", create_rdzv_handler)
    with pytest.raises(ValueError):
        registry.register("", creator)
    with pytest.raises(RuntimeError):
        registry.create_handler(static)  # it calls itself static


@pytest.mark.parametrize("module", BOTH, ids=["torch", "ours"])
def test_store_info_is_agreed_over_a_store(module):
    store = dist.HashStore()
    first = module.RendezvousStoreInfo.build(0, store, "host", 5)
    assert first == module.RendezvousStoreInfo.build(1, store, "other")
    assert (first.master_addr, first.master_port) == ("host", 5)
    free = module.RendezvousStoreInfo.build(0, dist.HashStore(), "host")
    assert 0 < free.master_port < 65536


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
def test_timeouts_default_as_torchs_and_must_be_positive(name):
    theirs, ours = torch_dynamic.RendezvousTimeout, dynamic.RendezvousTimeout
    assert getattr(ours(), name) == getattr(theirs(), name)
    assert getattr(ours(**{name: timedelta(seconds=7)}), name) == timedelta(seconds=7)
    for bad in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError):
            ours(**{name: bad})


def test_static_handlers_need_a_rank_and_a_whole_endpoint():
    for endpoint, conf in (("h:1", {}), ("", {"rank": 0}), ("h", {"rank": 0})):
        with pytest.raises(ValueError):
            create_rdzv_handler(api.RendezvousParameters("static", endpoint, "r", 2, 2, **conf))
    made = create_rdzv_handler(api.RendezvousParameters("static", "h:1", "r", 2, 2, rank=1))
    facts = (made.get_backend(), made.rank, made.world_size, made.use_agent_store, made.shutdown())
    assert facts == ("static", 1, 2, True, True)


class _Entry:
    name, value, loads = "theirs", "package:handler", 0

    def load(self):
        self.loads += 1
        return lambda: lambda params: ("made of", params)


def test_a_plugin_is_loaded_when_its_name_is_asked_for():
    entry = _Entry()
    plugin = _Plugin(entry)
    assert entry.loads == 0
    assert plugin("params") == ("made of", "params")
    assert entry.loads == 1


def test_plugins_of_other_packages_are_registered_and_one_name_is_one_plugin(monkeypatch, caplog):
    fresh = api.RendezvousHandlerRegistry()
    monkeypatch.setattr(registry, "handler_registry", fresh)
    entries = [
        EntryPoint(name, value, "torchrun.handlers")
        for name, value in (("mine", "a:b"), ("mine", "c:d"), ("c10d", "e:f"), ("elastane", "g:h"))
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry._register_default_handlers()
    registry._register_out_of_tree_handlers()
    assert fresh._registry["mine"] == _Plugin(entries[0])
    assert not isinstance(fresh._registry["c10d"], _Plugin)
    assert not isinstance(fresh._registry["elastane"], _Plugin)
    assert "the first is used" in caplog.text
    with pytest.raises(ModuleNotFoundError):
        fresh.create_handler(api.RendezvousParameters("mine", "", "r", 1, 1))


def test_every_builtin_name_is_registered():
    for name in ("elastane", "c10d", "file", "etcd", "etcd-v2", "static"):
        assert name in api.rendezvous_handler_registry._registry
    with pytest.raises(ValueError, match="expected one of c10d, elastane"):
        get_rendezvous_handler(api.RendezvousParameters("nobodys", "", "r", 1, 1))


def handler_of(endpoint: str, nodes: int = 2, backend: str = "elastane", **conf):
    return get_rendezvous_handler(
        api.RendezvousParameters(backend, endpoint, "run", 1, nodes, **conf)
    )


def test_a_handler_has_the_bounds_of_its_configuration():
    made = handler_of("h:1", join_timeout="30", last_call_timeout=9, timeout=900, close_timeout=4)
    assert made.settings.timeout.join == timedelta(seconds=30)
    assert made.settings.timeout.last_call == timedelta(seconds=9)
    assert made.settings.timeout.close == timedelta(seconds=4)
    assert (made.get_backend(), made.get_run_id()) == ("elastane", "run")
    assert handler_of("h:1", timeout=900).settings.timeout.join == timedelta(seconds=600)
    assert handler_of("h:1", timeout=120).settings.timeout.join == timedelta(seconds=120)


@pytest.mark.parametrize(
    ("endpoint", "conf", "slug"),
    [
        ("h:0", {}, "endpoint-syntax"),
        ("a b", {}, "endpoint-syntax"),
        ("h:1", {"join_timeuot": 3}, "bad-rdzv-conf"),
        ("h:1", {"store": "postgres"}, "bad-rdzv-conf"),
        ("h:1", {"tls_cert": "/nowhere"}, "tls-files"),
        ("h:1", {"heartbeat": 5, "silence": 3}, "bad-timing"),
    ],
)
def test_an_unusable_configuration_is_refused_before_the_start(endpoint, conf, slug):
    with pytest.raises(api.RendezvousError, match=slug):
        handler_of(endpoint, **conf)


def test_workers_may_opt_out_of_the_agents_store(monkeypatch):
    made = handler_of("h:1")
    assert made.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not made.use_agent_store


@pytest.mark.parametrize("wrong", [("", 1, 2), ("r", 0, 2), ("r", 3, 2)])
def test_from_backend_refuses_impossible_settings(wrong):
    run_id, low, high = wrong
    for module in (torch_dynamic, dynamic):
        backend = _backend(module)
        with pytest.raises(ValueError):
            module.DynamicRendezvousHandler.from_backend(
                run_id, dist.HashStore(), backend, low, high
            )


def _backend(module):
    class Backend(module.RendezvousBackend):
        name = "test"

        def get_state(self):
            return None

        def set_state(self, state, token=None):
            return state, 1, True

    return Backend()


@pytest.mark.parametrize("join_s", [1, 5, 20])
def test_a_join_timeout_below_torchs_default_last_call_is_taken(join_s):
    params = api.RendezvousParameters("b", "e", "r", 1, 2, join_timeout=join_s)
    handler = dynamic.create_handler(dist.HashStore(), Register(), params)
    timing = handler._membership.config.spec.timing
    assert timing.join_timeout_s == join_s >= timing.last_call_max_s
    assert handler.settings.timeout.join == timedelta(seconds=join_s)


class Register(dynamic.RendezvousBackend):
    name = "register"

    def get_state(self):
        return None

    def set_state(self, state, token=None):
        return state, 1, True


@pytest.mark.parametrize("protocol", ["http", "HTTP", "hTTp", "https", "HTTPS"])
def test_a_protocol_is_read_in_any_case_as_torch_reads_it(protocol):
    [url] = read_settings("host:1", {"protocol": protocol}).urls
    assert url == f"{protocol.lower()}://host:1"
    assert read_settings(f"{protocol}://host:1", {}).urls == (url,)
