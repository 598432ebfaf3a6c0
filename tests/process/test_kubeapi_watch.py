"""Watches of the Kubernetes API over servers that send anything, or nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from wire_server import END, HANG, STREAM, Thing, api, chunk, line, plain, served, status, thing

from elastane.kubernetes.client import (
    ApiAnswerError,
    ApiGoneError,
    ApiUnreachableError,
    transport,
)
from elastane.kubernetes.client import api as client_api
from elastane.kubernetes.client.identity import FixedIdentity
from elastane.kubernetes.client.resource import CONFIGMAPS


def changed(change, version, name="x"):
    return line(type=change, object=thing(name, version))


async def taken(server, count, *, watch_s=30.0):
    async with api(server) as client:
        watch = client.watch(CONFIGMAPS, "ns", Thing, "5", watch_s=watch_s)
        try:
            first = await anext(watch)
            assert (first.change, first.version) == ("BOOKMARK", "5"), "the server answers"
            return [await anext(watch) for _ in range(count)]
        finally:
            await watch.aclose()


SPLIT = json.dumps({"type": "MODIFIED", "object": thing("x", "7")}).encode()


@served(
    [
        STREAM,
        changed("ADDED", "6"),
        chunk(SPLIT[:20]),
        chunk(SPLIT[20:] + b"\n\n" + SPLIT.replace(b'"7"', b'"8"') + b"\n"),
        line(type="BOOKMARK", object={"kind": "ConfigMap", "metadata": {"resourceVersion": "50"}}),
        changed("DELETED", "51"),
        END,
    ],
    [STREAM, changed("ADDED", "60"), HANG],
)
async def test_a_watch_resumes_from_the_last_event_after_the_server_ended_it(server):
    seen = await taken(server, 7)
    assert [(one.change, one.version) for one in seen] == [
        ("ADDED", "6"),
        ("MODIFIED", "7"),
        ("MODIFIED", "8"),
        ("BOOKMARK", "50"),
        ("DELETED", "51"),
        ("BOOKMARK", "51"),
        ("ADDED", "60"),
    ]
    assert seen[3].object is None and seen[0].object.metadata["name"] == "x"
    assert [asked.query["resourceVersion"] for asked in server.asked] == ["5", "51"]
    assert server.asked[0].query["allowWatchBookmarks"] == "true"
    assert 27 <= int(server.asked[0].query["timeoutSeconds"]) <= 30


@pytest.mark.parametrize("as_event", [True, False])
def test_a_version_that_is_too_old_is_gone(as_event):
    told = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    event = [STREAM, line(type="ERROR", object=told), HANG]

    @served(event if as_event else plain(410, told))
    async def check(server):
        with pytest.raises(ApiGoneError) as caught:
            await taken(server, 1)
        assert caught.value.reason == "Expired"
        assert "watch configmaps" in caught.value.what

    check()


EVENTS = {
    "no json": chunk(b"hello\n"),
    "no event": chunk(b'{"type": "MOVED", "object": {}}\n'),
    "no version": line(type="ADDED", object={"metadata": 3}),
    "no object": line(type="ADDED", object=None),
    "an error of no code": line(type="ERROR", object={"kind": "Status"}),
    "a line without end": chunk(b"x" * 3000),
}


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_a_line_that_is_not_an_event_is_an_answer_error(name, monkeypatch):
    @served([STREAM, EVENTS[name], EVENTS[name], HANG])
    async def check(server):
        async with api(server) as client:
            request = transport.ApiRequest("GET", "/x", "list x", bytes_max=5000)
            watch = client_api.follow(client._http, request, Thing, "5", 30.0)
            assert (await anext(watch)).change == "BOOKMARK"
            with pytest.raises(ApiAnswerError):
                await anext(watch)

    check()


@served([STREAM, changed("ADDED", "6")], plain(200, thing()))
async def test_a_watch_whose_connection_breaks_says_so(server):
    server.answers[0].append(b"zz\r\n")  # no length of a chunk
    with pytest.raises(ApiUnreachableError):
        await taken(server, 2)


def test_a_watch_over_which_nothing_comes_is_taken_for_broken(monkeypatch):
    monkeypatch.setattr(client_api, "SILENCE_MARGIN_S", 0.2)

    @served([STREAM, HANG])
    async def check(server):
        with pytest.raises(ApiUnreachableError):
            await taken(server, 1, watch_s=0.3)

    check()


@served(status(401, "Unauthorized"), [STREAM, changed("ADDED", "6"), HANG])
async def test_a_watch_with_an_old_token_is_begun_again_with_a_new_one(server):
    class Renewed(FixedIdentity):
        def renew(self):
            return True

    async with api(server, identity=Renewed()) as client:
        watch = client.watch(CONFIGMAPS, "ns", Thing, "5")
        assert [(await anext(watch)).version for _ in range(2)] == ["5", "6"]
        await watch.aclose()
    assert len(server.asked) == 2


def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_pause(monkeypatch):
    pauses = []

    async def sleep(pause_s, sleep=asyncio.sleep):
        pauses.append(pause_s)
        await sleep(0)

    @served([STREAM, END])
    async def check(server):
        async with api(server) as client:
            watch = client.watch(CONFIGMAPS, "ns", Thing, "5")
            while len(server.asked) < 9:
                assert (await anext(watch)).change == "BOOKMARK"
            await watch.aclose()

    monkeypatch.setattr(client_api.asyncio, "sleep", sleep)
    check()
    grown = [pause_s for pause_s in pauses if pause_s >= client_api.PAUSE_S]
    assert grown[:7] == sorted(grown[:7]) and grown[-1] == client_api.PAUSE_MAX_S


@served(
    plain(200, thing("x", "10")),
    [STREAM, changed("DELETED", "11"), END],
    status(410, "Expired"),
    status(404, "NotFound"),
    [STREAM, changed("ADDED", "10"), changed("DELETED", "11"), changed("ADDED", "12"), HANG],
)
async def test_a_followed_object_never_goes_back_to_an_older_version(server):
    async with api(server) as client:
        follow = client_api.follow_one(client, CONFIGMAPS, "ns", "x", Thing)
        seen = [await anext(follow) for _ in range(4)]
        await follow.aclose()
    versions = [one and one.metadata["resourceVersion"] for one in seen]
    assert versions == ["10", None, None, "12"]
