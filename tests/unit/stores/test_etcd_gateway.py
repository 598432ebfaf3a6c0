"""Requests to several etcd servers: which is asked next, and when a write is unsure."""

import asyncio
import json
import sys

import httpx
import pytest

from elastane.errors import ConfigurationError, StoreError
from elastane.stores.etcd.gateway import ANSWER_BYTES_MAX, Gateway
from elastane.stores.etcd.settings import EtcdSettings
from elastane.stores.etcd.wire import GatewaySession, KeyRange, Token
from elastane.stores.registry import make_store

DEADLINE_S = 30.0


class Servers:
    """Servers a, b and c; each gives its scripted answers."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []
        self.logins = []

    async def __call__(self, request):
        name = request.url.host
        self.asked.append(name)
        answer = self.answers.get(name, (200, b"{}"))
        if isinstance(answer, list):
            answer = answer.pop(0)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        status, content = answer
        return httpx.Response(status, content=content, headers={"X-Etcd-Index": "7"})

    def gateway(self, timeout_s=DEADLINE_S, **settings):
        urls = tuple(f"http://{name}:2379" for name in "abc")
        gateway = Gateway(EtcdSettings(urls=urls, **settings), timeout_s=timeout_s)
        gateway._client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return gateway

    def ask(self, *, write=False, times=1, timeout_s=DEADLINE_S):
        async def all_of_it():
            gateway = self.gateway(timeout_s)
            for _ in range(times):
                answer = await gateway.ask("POST", "/v3/kv/txn", write=write)
            return answer

        return asyncio.run(all_of_it())


def trouble(status, text):
    return status, json.dumps({"error": text, "code": 14}).encode()


def fault(servers, **how):
    with pytest.raises(StoreError) as caught:
        servers.ask(**how)
    return caught.value


REFUSED = httpx.ConnectError("connection refused")
BROKEN = httpx.ReadError("connection reset")
NO_LEADER = trouble(503, "etcdserver: no leader")
CLOSING = trouble(503, "transport is closing")
TIMED_OUT = trouble(500, "etcdserver: request timed out")
CLOSED = trouble(408, "grpc: the client connection is closing")
STOPPED = trouble(503, "etcdserver: server stopped")
STOPPED_V2 = (
    500,
    b'{"errorCode":300,"message":"Raft Internal Error","cause":"etcdserver: server stopped"}',
)


def test_a_server_that_answers_is_kept():
    servers = Servers(a=REFUSED)
    answer = servers.ask(times=3)
    assert (answer.status, answer.index) == (200, 7)
    assert servers.asked == ["a", "b", "b", "b"]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    "there", [REFUSED, httpx.ConnectTimeout(""), httpx.PoolTimeout(""), NO_LEADER]
)
def test_a_request_that_no_server_accepted_goes_to_the_next(there, write):
    servers = Servers(a=there, b=there)
    assert servers.ask(write=write).status == 200
    assert servers.asked == ["a", "b", "c"]


@pytest.mark.parametrize(
    "there", [BROKEN, httpx.RemoteProtocolError("cut off"), TIMED_OUT, CLOSING, CLOSED, STOPPED,
              STOPPED_V2, trouble(503, "etcdserver: leader changed")],
)  # fmt: skip
def test_a_write_that_a_server_may_have_seen_is_never_sent_again(there):
    servers = Servers(a=there)
    assert fault(servers, write=True).slug == "store-unsure"
    assert servers.asked == ["a"]


@pytest.mark.parametrize("there", [BROKEN, TIMED_OUT, CLOSING, CLOSED, STOPPED, STOPPED_V2])
def test_a_read_goes_on_to_a_server_that_answers(there):
    servers = Servers(a=there, b=there)
    assert servers.ask().status == 200
    assert servers.asked == ["a", "b", "c"]


@pytest.mark.parametrize("there", [BROKEN, TIMED_OUT, CLOSING])
def test_after_an_unsure_write_another_server_is_asked(there):
    servers = Servers(a=[there])

    async def twice():
        gateway = servers.gateway()
        with pytest.raises(StoreError):
            await gateway.ask("POST", "/v3/kv/txn", write=True)
        return await gateway.ask("POST", "/v3/kv/txn", write=True)

    assert asyncio.run(twice()).status == 200
    assert servers.asked == ["a", "b"]


@pytest.mark.parametrize("status", [400, 404, 500])
def test_an_answer_that_is_an_error_of_ours_is_an_answer(status):
    servers = Servers(a=trouble(status, "etcdserver: key is not provided"))
    assert servers.ask(write=True).status == status
    assert servers.asked == ["a"]


def test_each_server_is_asked_twice_and_then_none_can_be_reached():
    servers = Servers(a=REFUSED, b=REFUSED, c=REFUSED)
    error = fault(servers)
    assert error.slug == "store-unreachable"
    assert "http://c:2379: connection refused" in error.what
    assert servers.asked == ["a", "b", "c"] * 2


@pytest.mark.parametrize(("write", "slug"), [(False, "store-unreachable"), (True, "store-unsure")])
def test_servers_that_are_silent_are_waited_for_within_the_bound(write, slug):
    servers = Servers(a=None, b=None, c=None)
    assert fault(servers, write=write, timeout_s=0.05).slug == slug


def test_an_answer_without_end_is_cut_off():
    servers = Servers(a=(200, b"x" * (ANSWER_BYTES_MAX + 1)))
    assert servers.ask().url.startswith("http://b:")
    servers = Servers(a=(200, b"x" * (ANSWER_BYTES_MAX + 1)))
    assert fault(servers, write=True).slug == "store-unsure"


class LoggingIn(Servers):
    """A server with users, which drops their tokens once."""

    def __init__(self, forgets, says="etcdserver: invalid auth token"):
        super().__init__(a=self.serve)
        self.forgets, self.says = forgets, says

    def serve(self, request):
        if request.url.path.endswith("/auth/authenticate"):
            self.logins.append(json.loads(request.content)["name"])
            return 200, json.dumps({"token": f"t{len(self.logins)}"}).encode()
        token = request.headers.get("Authorization")
        if token is None:
            return 200, b"{}"  # Which paths it has may be asked by anybody.
        if token in self.forgets:
            return trouble(401, self.says)
        return 200, json.dumps({"kvs": [], "count": "0"}).encode()

    def call(self):
        session = GatewaySession(self.gateway(user="job", password="p"))
        return asyncio.run(session.call("/kv/range", {}, KeyRange))


@pytest.mark.parametrize(
    "says", ["etcdserver: invalid auth token", "etcdserver: revision of auth store is old"]
)
def test_a_login_that_is_over_is_made_again_once(says):
    server = LoggingIn({"t1"}, says)
    server.call()
    assert server.logins == ["job", "job"]


def test_a_login_that_does_not_last_is_refused_as_the_users():
    server = LoggingIn({"t1", "t2", "t3"})
    with pytest.raises(ConfigurationError) as caught:
        server.call()
    assert caught.value.slug == "etcd-auth"
    assert server.logins == ["job", "job"]


def test_a_user_without_the_right_gets_an_error_without_another_login():
    server = LoggingIn({"t1"}, "etcdserver: permission denied")
    with pytest.raises(ConfigurationError, match="permission denied"):
        server.call()
    assert server.logins == ["job"]


def test_a_server_of_3_3_is_asked_under_its_own_paths():
    def serve(request):
        return (404, b"") if request.url.path.startswith("/v3/") else (200, b"{}")

    async def root():
        session = GatewaySession(Servers(a=serve).gateway())
        await session.call("/kv/range", {}, KeyRange)
        return session.root

    assert asyncio.run(root()) == "/v3beta"


@pytest.mark.parametrize(
    ("answer", "kind", "slug"),
    [
        ((404, b""), ConfigurationError, "etcd-version"),
        ((200, b"<html>a proxy's page</html>"), StoreError, "store-refused"),
        (trouble(400, "etcdserver: duplicate key"), StoreError, "store-refused"),
    ],
)
def test_a_server_that_is_no_etcd_is_distinguished_from_one_that_refuses(answer, kind, slug):
    async def call():
        await GatewaySession(Servers(a=answer).gateway()).call("/kv/range", {}, Token)

    with pytest.raises(kind) as caught:
        asyncio.run(call())
    assert caught.value.slug == slug


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_without_httpx_the_error_names_the_extra_that_has_it(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    store = make_store(backend, "127.0.0.1:1", {})
    with pytest.raises(ConfigurationError) as told:
        asyncio.run(store.get("job"))
    assert told.value.slug == "extra-missing"
    assert told.value.next_step == "pip install 'elastane[etcd]'"
