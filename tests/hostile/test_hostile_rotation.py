"""The job's secret can be changed while it trains, without the end of any session."""

from __future__ import annotations

import asyncio
import os

import pytest
from attackers import connected
from hostile_support import TOKEN, Victim
from jobs import until

from elastane.errors import ConfigurationError, WireError
from elastane.options.secret import Keyring, read_tokens
from elastane.protocol.log_events import EventKind
from elastane.protocol.wire import ClientHandshake, ServerHandshake, derive_secret

NEW = "a new secret, made today"
JOB = "digits"


def opens(victim, token):
    """Whether a client with `token` gets a session."""

    async def shake():
        hello = ClientHandshake(victim.job.name, derive_secret(victim.job.name, token), b"n" * 32)
        async with connected(victim.port) as (reader, writer):
            writer.write(hello.start())
            while not hello.done:
                try:
                    writer.write(hello.feed(await reader.read(1000)))
                except WireError as error:
                    assert error.slug == "wrong-token"
                    return False
        return True

    return asyncio.run(shake())


def test_a_secret_is_changed_on_one_node_after_the_other_and_the_old_one_opens_nothing(tmp_path):
    with Victim(tmp_path, own_token_of_b=True) as victim:
        job, of_a, of_b = victim.job, victim.token, victim.token_of_b
        before = victim.changes()
        assert opens(victim, TOKEN) and not opens(victim, NEW)

        of_a.write_text(f"{NEW}\n{TOKEN}\n")
        until(lambda: opens(victim, NEW), "the coordinator takes the new secret")
        assert opens(victim, TOKEN), "and the old one for as long as it is in the file"
        again(victim)  # b still has the old one alone

        of_b.write_text(f"{NEW}\n{TOKEN}\n")
        again(victim)
        of_a.write_text(f"{NEW}\n")
        until(lambda: not opens(victim, TOKEN), "the old secret opens nothing any more")
        assert opens(victim, NEW)
        again(victim)
        of_b.write_text(f"{NEW}\n")

        late, old = tmp_path / "late", tmp_path / "old"
        late.write_text(NEW), old.write_text(TOKEN)
        refused = job.start("old", "--token-file", str(old))
        assert refused.wait() == 78 and "[wrong-token]" in refused.words
        job.start("late", "--token-file", str(late))
        job.wait_event(EventKind.NODE_JOINED, "late")
        assert [one for one in victim.changes() if "coordinator-away" not in one] == before


def again(victim):
    """Break b's connection, and wait until b has proved itself again."""
    count = len(victim.job.events(EventKind.NODE_REGISTERED_AGAIN))
    victim.tap.cut()
    victim.job.wait_event(EventKind.NODE_REGISTERED_AGAIN, "b", count + 1)


def test_an_agent_comes_in_with_the_second_line_where_the_first_is_not_known_yet(tmp_path):
    with Victim(tmp_path) as victim:
        ahead = tmp_path / "ahead"
        ahead.write_text(f"{NEW}\n{TOKEN}\n")
        victim.job.start("ahead", "--token-file", str(ahead))
        victim.job.wait_event(EventKind.NODE_JOINED, "ahead")


def shaken(client_secret, *server_secrets):
    first, *others = server_secrets
    agent = ClientHandshake(JOB, client_secret, b"c" * 32)
    coordinator = ServerHandshake(JOB, first, b"s" * 32, tuple(others))
    agent.feed(coordinator.feed(agent.feed(coordinator.feed(agent.start()))))
    return agent, coordinator


def test_each_of_two_secrets_opens_a_session_whose_keys_are_of_that_secret():
    one, other, third = (derive_secret(JOB, name) for name in "abc")
    for secret in (one, other):
        agent, coordinator = shaken(secret, one, other)
        assert agent.done and coordinator.done
        assert agent._keys == coordinator._keys
    with pytest.raises(WireError):
        shaken(third, one, other)


def test_a_missing_torn_or_empty_file_keeps_the_known_secrets(tmp_path):
    path = tmp_path / "token"
    path.write_text("one\n")
    keyring = Keyring(JOB, "one", str(path))

    async def scenario():
        assert not await keyring.reload()
        for spoil in (path.unlink, lambda: path.write_text(""), lambda: path.write_bytes(b"\xff")):
            spoil()
            assert not await keyring.reload()
            assert keyring.secrets() == (derive_secret(JOB, "one"),)
        path.write_text("two\none\n")
        assert await keyring.reload()
        assert keyring.token == "two" and len(keyring.secrets()) == 2

    asyncio.run(scenario())


def test_a_secret_that_came_by_a_pipe_is_read_once(tmp_path):
    """With --token-file <(...) a second read would wait for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keyring = Keyring(JOB, "one", str(path))

    async def scenario():
        async with asyncio.timeout(90):
            assert not await keyring.reload()

    asyncio.run(scenario())
    assert keyring.token == "one"


def test_more_than_two_lines_are_no_secret(tmp_path):
    path = tmp_path / "token"
    path.write_text("one\n\n two \n")
    assert read_tokens(str(path)) == ("one", "two")
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(ConfigurationError) as caught:
        read_tokens(str(path))
    assert caught.value.slug == "token-unreadable" and "3 lines" in caught.value.what
    assert "three" not in str(caught.value)
