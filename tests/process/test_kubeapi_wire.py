"""The client of the Kubernetes API against servers that answer anything at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from wire_server import HANG, STREAM, Thing, api, chunk, plain, served, status, thing

from elastane.kubernetes.client import (
    Api,
    ApiAnswerError,
    ApiBusyError,
    ApiConflictError,
    ApiError,
    ApiForbiddenError,
    ApiGoneError,
    ApiInvalidError,
    ApiNotFoundError,
    ApiUnauthorizedError,
    ApiUnreachableError,
    ClusterAccess,
    Deletion,
    Selector,
    transport,
)
from elastane.kubernetes.client.identity import ClientProof, FixedIdentity, ServiceToken
from elastane.kubernetes.client.resource import NODES, PODS


@served(plain(200, thing()))
async def test_a_request_goes_to_the_path_of_the_object(server):
    async with api(server, identity=FixedIdentity(ClientProof("Bearer t"))) as client:
        assert (await client.get(PODS, "ns", "x", Thing)).metadata["name"] == "x"
        await client.get(NODES, "ns", "n", Thing)
        await client.patch(PODS, "ns", "x", {"status": {"a": None}}, Thing, "status")
    paths = [(asked.method, asked.path) for asked in server.asked]
    assert paths == [
        ("GET", "/api/v1/namespaces/ns/pods/x"),
        ("GET", "/api/v1/nodes/n"),
        ("PATCH", "/api/v1/namespaces/ns/pods/x/status"),
    ]
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer t"}
    assert server.asked[2].headers["content-type"] == "application/merge-patch+json"
    assert json.loads(server.asked[2].body) == {"status": {"a": None}}


@served(plain(201, thing()))
async def test_a_creation_asks_the_server_to_refuse_unknown_fields(server):
    async with api(server) as client:
        await client.create(PODS, "ns", {"metadata": {"name": "x"}}, Thing)
    assert server.asked[0].query == {"fieldValidation": "Strict"}


@served(plain(200, {}))
async def test_a_deletion_has_all_options_in_its_body(server):
    async with api(server) as client:
        how = Deletion(uid="u", version="9", grace_s=0, propagation="Background")
        await client.delete(PODS, "ns", "x", how)
        await client.delete(PODS, "ns", "x")
    assert not server.asked[0].query
    assert json.loads(server.asked[0].body) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u", "resourceVersion": "9"},
        "gracePeriodSeconds": 0,
        "propagationPolicy": "Background",
    }
    assert "gracePeriodSeconds" not in json.loads(server.asked[1].body)


@served(
    plain(200, {"metadata": {"resourceVersion": "5", "continue": "c+/="}, "items": [thing("a")]}),
    plain(200, {"metadata": {"resourceVersion": "5"}, "items": None}),
)
async def test_a_list_is_read_page_by_page_to_its_end(server):
    async with api(server) as client:
        page = await client.list(PODS, "", Thing, Selector(labels="a=b,c", fields="d=e"))
    assert (page.version, [one.metadata["name"] for one in page.items]) == ("5", ["a"])
    assert [asked.path for asked in server.asked] == ["/api/v1/pods"] * 2
    assert server.asked[0].query == {
        "limit": "500",
        "labelSelector": "a=b,c",
        "fieldSelector": "d=e",
    }
    assert server.asked[1].query["continue"] == "c+/="


REFUSALS = [
    (400, "BadRequest", ApiInvalidError),
    (401, "Unauthorized", ApiUnauthorizedError),
    (403, "Forbidden", ApiForbiddenError),
    (404, "NotFound", ApiNotFoundError),
    (409, "Conflict", ApiConflictError),
    (409, "AlreadyExists", ApiConflictError),
    (410, "Expired", ApiGoneError),
    (422, "Invalid", ApiInvalidError),
    (429, "TooManyRequests", ApiBusyError),
    (500, "InternalError", ApiBusyError),
    (504, "Timeout", ApiBusyError),
    (418, "", ApiError),
]


@pytest.mark.parametrize(("code", "reason", "kind"), REFUSALS)
def test_each_refusal_has_its_type_and_says_what_was_asked(code, reason, kind):
    @served(status(code, reason))
    async def check(server):
        async with api(server) as client:
            with pytest.raises(kind) as caught:
                await client.create(PODS, "ns", {"metadata": {"name": "x"}}, Thing)
        error = caught.value
        assert type(error) is kind
        assert (error.status, error.reason, error.message) == (code, reason, "the server's words")
        assert "create pods in namespace ns: the server's words" in error.what
        if isinstance(error, ApiConflictError):
            assert error.exists == (reason == "AlreadyExists")

    check()


GARBAGE = {
    "html": plain(200, "<html>log in</html>"),
    "another shape": plain(200, {"metadata": ["x"]}),
    "nothing": plain(200, ""),
    "no text": plain(200, b'{"metadata": {"a": "\xff"}}'),
    "nested": plain(200, '{"metadata": {"a": ' + "[" * 100_000),
    "redirect": plain(302, "", "Location: http://nowhere.invalid/"),
    "no content": plain(204, ""),
}


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_garbage_is_an_answer_error(name):
    @served(GARBAGE[name])
    async def check(server):
        async with api(server) as client:
            with pytest.raises(ApiAnswerError) as caught:
                await client.get(PODS, "ns", "x", Thing)
        assert caught.value.slug == "kube-answer"
        assert len(server.asked) == 1, "nobody is led elsewhere"

    check()


@pytest.mark.parametrize("body", ["<html>bad gateway</html>", "[1]", '{"code": "x"}', ""])
def test_a_refusal_with_an_unreadable_body_keeps_its_type(body):
    @served(plain(502, body))
    async def check(server):
        async with api(server) as client:
            with pytest.raises(ApiBusyError) as caught:
                await client.get(PODS, "ns", "x", Thing)
        assert caught.value.status == 502

    check()


def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(transport, "ANSWER_BYTES_MAX", 1000)

    @served([STREAM, *[chunk(b"[" * 5000)] * 3, HANG])
    async def check(server):
        async with api(server) as client:
            request = transport.ApiRequest("GET", "/version", "get /version", bytes_max=10_000)
            with pytest.raises(ApiAnswerError, match="more than 10000 bytes"):
                await client._http.ask(request)

    check()


@served([], plain(200, thing()))
async def test_a_read_whose_connection_ends_is_asked_once_more(server):
    async with api(server) as client:
        assert (await client.get(PODS, "ns", "x", Thing)).metadata["name"] == "x"
    assert len(server.asked) == 2


@served([])
async def test_a_write_whose_connection_ends_is_not_sent_again_and_says_that_it_may_be_done(server):
    async with api(server) as client:
        with pytest.raises(ApiUnreachableError) as caught:
            await client.create(PODS, "ns", {"metadata": {"name": "x"}}, Thing)
    assert caught.value.sent
    assert len(server.asked) == 1


@served([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", HANG])
async def test_an_answer_that_stalls_ends_within_the_bound(server):
    async with api(server, timeout_s=0.5) as client:
        with pytest.raises(ApiUnreachableError):
            await client.get(PODS, "ns", "x", Thing)


def test_without_a_server_the_error_says_that_nothing_was_sent():
    async def check():
        nobody = ClusterAccess("http://127.0.0.1:1", FixedIdentity(), namespace="ns", where="here")
        async with Api(nobody) as client:
            with pytest.raises(ApiUnreachableError) as caught:
                await client.create(PODS, "ns", {"metadata": {"name": "x"}}, Thing)
        assert not caught.value.sent
        assert "http://127.0.0.1:1" in caught.value.what

    asyncio.run(check())


@served(plain(429, "later", "Retry-After: 0"), plain(201, thing()))
async def test_a_postponed_request_is_repeated_since_it_was_not_carried_out(server):
    async with api(server) as client:
        await client.create(PODS, "ns", {"metadata": {"name": "x"}}, Thing)
    assert len(server.asked) == 2


def test_a_rejected_token_is_read_again_once(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("old\n")

    @served(plain(200, thing()), status(401, "Unauthorized"), plain(200, thing()))
    async def check(server):
        async with api(server, identity=ServiceToken(path)) as client:
            await client.get(PODS, "ns", "x", Thing)
            path.write_text("new\n")
            await client.get(PODS, "ns", "x", Thing)
            server.answers[:] = [[status(401, "Unauthorized")]]
            with pytest.raises(ApiUnauthorizedError):
                await client.get(PODS, "ns", "x", Thing)
        shown = [asked.headers["authorization"] for asked in server.asked]
        assert shown == [f"Bearer {word}" for word in ("old", "old", "new", "new", "new")]

    check()


def test_many_requests_at_once_read_the_token_once_each_gets_it(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("t")

    @served(plain(200, thing()))
    async def check(server):
        async with api(server, identity=ServiceToken(path)) as client:
            await asyncio.gather(*(client.get(PODS, "ns", "x", Thing) for _ in range(20)))
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer t"}

    check()
