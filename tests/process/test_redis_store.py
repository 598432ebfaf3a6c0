"""A Redis server that is away, refuses, is a replica, or has lost what it acknowledged."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis_server import RedisServer, need_redis, redis, shared_redis

from elastane.errors import ConfigurationError, LeaseLostError, StoreError
from elastane.stores.protocol import ConflictError
from elastane.stores.redis import RedisStore, read_settings


@pytest.fixture(autouse=True)
def _needs_redis() -> None:
    need_redis()


def store_at(server: RedisServer, timeout_s: float = 5.0, **conf: str) -> RedisStore:
    return RedisStore(read_settings(server.endpoint, conf), timeout_s=timeout_s)


async def restarted(server: RedisServer) -> None:
    """Restart the server, while this process notices that its connections are closed."""
    server.kill()
    await asyncio.to_thread(server.start)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 90.0))


def test_a_server_that_is_down_is_a_store_error_and_the_store_recovers(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)

    async def body() -> None:
        store = store_at(server)
        with pytest.raises(StoreError, match="store-unreachable"):
            await store.compare_and_set("k", b"1", 0)
        server.start()
        entry = await store.compare_and_set("k", b"1", 0)
        server.kill()
        with pytest.raises(StoreError):
            await store.get("k")
        server.start()
        assert await store.get("k") == entry, "an append-only file keeps what was acknowledged"

    try:
        run(body)
    finally:
        server.kill()


def test_a_stopped_server_ends_each_operation_within_its_bound(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path) as server:
            store = store_at(server)
            first = await store.compare_and_set("k", b"1", 0)
            store._timeout_s = 0.3  # a busy server that runs may take longer
            server.send(signal.SIGSTOP)
            with pytest.raises(StoreError, match=r"not known whether the write was done"):
                await store.compare_and_set("k", b"2", first.version)
            with pytest.raises(StoreError, match="store-timeout"):
                await store.get("k")
            server.send(signal.SIGCONT)
            store._timeout_s = 60.0
            # A request sent before the stop may be carried out now, once at most.
            found = await store.get("k")
            assert found is not None and found.value in (b"1", b"2")

    run(body)


def test_a_wrong_password_is_refused_for_good_and_never_shown(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path, "--requirepass", "right") as server:
            for conf in (
                {},
                {"password": "wrong-secret"},
                {"user": "who", "password": "wrong-secret"},
            ):
                with pytest.raises(ConfigurationError) as caught:
                    await store_at(server, **conf).get("k")
                assert caught.value.slug == "redis-auth"
                assert "wrong-secret" not in str(caught.value)
            store = store_at(server, password="right")
            assert (await store.compare_and_set("k", b"1", 0)).value == b"1"

    run(body)


def test_a_user_with_rights_to_the_prefix_only_is_enough(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path) as server:
            server.tell(
                "ACL SETUSER job on >secret ~mine/* +eval +info +hmget +hget +hset +get +set +del"
                " +exists +pexpire +pttl +persist +time +zadd +zrem +zrange +zremrangebyscore"
            )
            conf = {"user": "job", "password": "secret"}
            store = store_at(server, **conf, redis_prefix="mine")
            await store.compare_and_set("j/k", b"1", 0)
            assert await store.lease("j/leadership", b"n", 1.0) is not None
            assert await store.lease("j/leadership", b"other", 1.0) is None
            await store.purge("j")
            assert await store.get("j/k") is None
            with pytest.raises((ConfigurationError, StoreError), match=r"permission|NOPERM|access"):
                await store_at(server, **conf, redis_prefix="other").get("k")

    run(body)


def test_a_lease_outlives_a_clock_that_is_set_back_by_one_ttl_at_most(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path) as server:
            candidate = store_at(server)
            assert await store_at(server).lease("k", b"dead", 0.5) is not None
            # What the server makes of its expiry once its clock is an hour behind.
            server.tell("PEXPIRE elastane/lease/k 3600000")
            begun_s = time.monotonic()
            while await candidate.lease("k", b"next", 0.5) is None:
                assert time.monotonic() - begun_s < 20.0
                await asyncio.sleep(0.02)
            assert time.monotonic() - begun_s >= 0.45, "its holder may count on a whole ttl"

    run(body)


def test_a_replica_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path / "primary") as primary:
            follow = ("--replicaof", "127.0.0.1", str(primary.port))
            with redis(tmp_path / "replica", *follow) as replica:
                with pytest.raises(ConfigurationError, match="is a replica") as caught:
                    await store_at(replica).get("k")
                assert caught.value.slug == "redis-server"

    run(body)


def test_a_primary_that_becomes_a_replica_is_waited_for(tmp_path: Path) -> None:
    async def body() -> None:
        with redis(tmp_path / "other") as other, redis(tmp_path / "primary") as primary:
            store = store_at(primary)
            await store.get("k")
            primary.tell(f"REPLICAOF 127.0.0.1 {other.port}")
            for _ in range(2):
                with pytest.raises(StoreError) as caught:
                    await store.compare_and_set("k", b"1", 0)
                assert not isinstance(caught.value, ConfigurationError)
                await store.close()
            primary.tell("REPLICAOF NO ONE")
            assert await store.compare_and_set("k", b"1", 0)

    run(body)


def test_a_server_that_lost_acknowledged_writes_is_refused_by_all_that_saw_them(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        with redis(tmp_path, durable=False) as server:
            store, reader = store_at(server), store_at(server)
            written = await store.compare_and_set("k", b"1", 0)
            assert await reader.get("k") == written
            await restarted(server)
            newcomer = store_at(server)
            for one in (store, reader):
                with pytest.raises(ConfigurationError) as caught:
                    await one.compare_and_set("k", b"2", written.version)
                assert caught.value.slug == "redis-data-lost"
            again = await newcomer.compare_and_set("k", b"2", 0)
            assert again.version > written.version, "a version is never given twice"

    run(body)


@pytest.mark.parametrize(
    ("options", "durable", "said"),
    [
        ((), True, ""),
        ((), False, "no append-only file"),
        (("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"), True, "may evict"),
        (("--maxmemory", "100mb"), True, ""),
    ],
)
def test_a_server_that_may_lose_the_record_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options, durable: bool, said: str
) -> None:
    async def body() -> None:
        with redis(tmp_path, *options, durable=durable) as server:
            store = store_at(server)
            await store.get("k")
            await store.close()
            await store.get("k")

    with caplog.at_level(logging.WARNING, logger="elastane.redis"):
        run(body)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


def test_a_lease_that_ran_out_while_the_server_was_away_is_renewed_under_its_term(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        with redis(tmp_path) as server:
            holder, other = store_at(server), store_at(server)
            lease = await holder.lease("leadership", b"holder", 1.0)
            assert lease is not None
            term = lease.term
            await restarted(server)
            await asyncio.sleep(lease.remaining_s() + 0.1)  # the ttl itself
            await lease.renew()
            assert (lease.term, lease.held()) == (term, True)
            await asyncio.sleep(1.1)  # the ttl itself
            taken = await other.lease("leadership", b"other", 5.0)
            assert taken is not None and taken.term > term
            with pytest.raises(LeaseLostError):
                await lease.renew()
            await lease.release()
            assert await other.holder("leadership") is not None, "a deposed holder frees nothing"

    run(body)


def test_an_operation_that_is_cancelled_leaves_no_answer_for_the_next() -> None:
    async def body() -> None:
        store = store_at(shared_redis(), redis_prefix="cancelled")
        await store.compare_and_set("k", b"first", 0)
        for _ in range(20):
            running = asyncio.ensure_future(store.get("k"))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert await store.holder("leadership") is None

    run(body)


def test_nothing_is_left_of_a_purged_job_but_the_clock() -> None:
    async def body() -> None:
        server = shared_redis()
        store = store_at(server, redis_prefix="purged")
        for key in ("job/record", "job/token", "job.x/record"):
            await store.compare_and_set(key, b"1", 0)
        assert await store.lease("job/leadership", b"n", 5.0) is not None
        await store.purge("job")
        assert await store.get("job.x/record") is not None
        await store.purge("job.x")
        assert keys_of(server, "purged/*") == {"purged/clock"}

    run(body)


def keys_of(server: RedisServer, pattern: str) -> set[str]:
    words = ["redis-cli", "-p", str(server.port), "KEYS", pattern]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


def test_a_key_of_another_program_is_refused_and_left_alone() -> None:
    async def body() -> None:
        server = shared_redis()
        server.tell("SET taken/entry/k text")
        store = store_at(server, redis_prefix="taken")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await store.compare_and_set("k", b"1", 0)
        assert keys_of(server, "taken/*") == {"taken/entry/k"}

    run(body)


def test_a_conflict_has_the_current_entry() -> None:
    async def body() -> None:
        store = store_at(shared_redis(), redis_prefix="conflict")
        first = await store.compare_and_set("k", b"1", 0)
        with pytest.raises(ConflictError) as caught:
            await store.delete("k", first.version + 1)
        assert caught.value.current == first

    run(body)


def test_tls_reaches_the_server_with_a_certificate_and_without_the_authority_it_is_refused(
    tmp_path: Path,
) -> None:
    make_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "node.pem", "node.key"))
    need_redis()
    server = RedisServer(tmp_path / "data")
    port = str(server.port)
    server.extra = ("--port", "0", "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file")
    server.extra += (key, "--tls-ca-cert-file", ca)

    async def body() -> None:
        url, files = f"rediss://{server.endpoint}", {"cacert": ca, "cert": cert, "key": key}
        store = RedisStore(read_settings(url, files))
        assert await store.compare_and_set("k", b"1", 0)
        with pytest.raises(ConfigurationError) as caught:
            await RedisStore(read_settings(url, {})).get("k")
        assert caught.value.slug == "redis-tls"
        with pytest.raises(StoreError, match="rediss://"):
            await store_at(server).get("k")

    try:
        server.start()
        run(body)
    finally:
        server.kill()


def make_certificates(folder: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"
    )
    openssl("req", *ec, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-out", "node.pem", "-days", "2", "-extfile", "ext"),
    )
