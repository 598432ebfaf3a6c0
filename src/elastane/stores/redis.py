"""The store over one Redis server.

Owns the layout of the keys below `<prefix>/` and the scripts that read and change them. A script
runs alone on the server, so each operation is one: a conditional write compares and writes, and a
lease is a key with an expiry (PX) beside the term of its latest holder. Imports redis-py with the
first operation.

Versions and terms come from one number, `<prefix>/clock`: each new one is the server's time in
microseconds, and at least one more than the last. So they grow over deletions, and also where a
server without an append-only file lost some: a number is never given twice while its clock does not
go back. This process remembers the highest number that it has seen. A server that is behind it has
lost acknowledged writes, perhaps the job's record, and is refused for good.

A key expires by the server's time of day. Each candidate shortens a lease that has longer to live
than it was taken for, so a clock that is set back delays the next holder by one ttl at most.

How it fails: StoreError while the server is away, loading, or out of memory. ConfigurationError for
a login or certificate that it refuses, a replica, a cluster, and lost data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from elastane.errors import ConfigurationError, StoreError, missing_extra
from elastane.process.endpoint import parse_endpoint
from elastane.process.tls import public_context
from elastane.protocol.limits import STORE_POLL_S, STORE_TIMEOUT_S
from elastane.stores.protocol import (
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    watch_by_polling,
)
from elastane.stores.registry import ConfKey, StoreBackend, StorePlace

PORT = 6379
PREFIX = "elastane"
# Users with rights of their own (ACL) came with Redis 6.
VERSION_MIN = 6
# How long the server remembers the latest holder of a lease that ran out: within it, that holder
# may renew the lease unless another took it.
TERM_KEPT_S = 86_400.0
_log = logging.getLogger("elastane.redis")
_TEXT_CHARS_MAX = 300
_LOGIN_ERRORS = (
    *("AuthenticationError", "AuthenticationWrongNumberOfArgsError"),
    *("AuthorizationError", "NoPermissionError"),
)

# Before each script. KEYS: the clock, the index of all keys, then those of the script. ARGV[1] is
# the highest number that the caller has seen.
_BEGIN = """
local now = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
if last < tonumber(ARGV[1]) then return {-1, string.format('%.0f', last), ''} end
local function number()
  local next = math.max(now[1] * 1000000 + now[2], last + 1)
  last = next
  redis.call('SET', KEYS[1], string.format('%.0f', next))
  return string.format('%.0f', next)
end
local function list(name, ttl_ms)
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
  redis.call('ZADD', KEYS[2], ttl_ms == '' and '+inf' or now_ms + ttl_ms, name)
end
"""
# KEYS[3]: the entry.
_GET = """
local found = redis.call('HMGET', KEYS[3], 'version', 'value')
return {1, found[1] or '0', found[2] or ''}
"""
# KEYS[3]: the entry. ARGV: expected version, value, ttl in ms or nothing, name in the index.
_SET = """
local found = redis.call('HMGET', KEYS[3], 'version', 'value')
if (found[1] or '0') ~= ARGV[2] then return {0, found[1] or '0', found[2] or ''} end
local version = number()
redis.call('HSET', KEYS[3], 'version', version, 'value', ARGV[3])
if ARGV[4] == '' then redis.call('PERSIST', KEYS[3])
else redis.call('PEXPIRE', KEYS[3], ARGV[4]) end
list(ARGV[5], ARGV[4])
return {1, version, ''}
"""
# KEYS[3]: the entry. ARGV: expected version, name in the index.
_DELETE = """
local found = redis.call('HMGET', KEYS[3], 'version', 'value')
if (found[1] or '0') ~= ARGV[2] then return {0, found[1] or '0', found[2] or ''} end
redis.call('ZREM', KEYS[2], ARGV[3])
return {redis.call('DEL', KEYS[3]), '0', ''}
"""
# KEYS: the lease, the latest term. ARGV: own term (0 to take a free lease), value, ttl in ms, name
# in the index, and for how long the latest term is kept, in ms.
_HOLD = """
local held, term = redis.call('HGET', KEYS[3], 'term'), ARGV[2]
if term == '0' then
  if held then
    local ttl = redis.call('HGET', KEYS[3], 'ttl')
    if redis.call('PTTL', KEYS[3]) > tonumber(ttl) then redis.call('PEXPIRE', KEYS[3], ttl) end
    return {0, held, ''}
  end
  term = number()
elseif held ~= term and (held or redis.call('GET', KEYS[4]) ~= term) then
  return {0, held or redis.call('GET', KEYS[4]) or '0', ''}
end
redis.call('HSET', KEYS[3], 'term', term, 'value', ARGV[3], 'ttl', ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('SET', KEYS[4], term, 'PX', ARGV[6])
list(ARGV[5], ARGV[6])
return {1, term, ''}
"""
# KEYS: the lease, the latest term. ARGV: own term, name in the index.
_RELEASE = """
if redis.call('GET', KEYS[4]) == ARGV[2] then
  redis.call('DEL', KEYS[3], KEYS[4])
  redis.call('ZREM', KEYS[2], ARGV[3])
end
return {1, '0', ''}
"""
# KEYS[3]: the lease.
_HOLDER = """
local found = redis.call('HMGET', KEYS[3], 'term', 'value')
return {1, found[1] or '0', found[2] or ''}
"""
# ARGV: what the server's names begin with, the prefix.
_PURGE = """
for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local kind, key = string.match(name, '^(%a+)/(.*)$')
  if string.sub(key .. '/', 1, #ARGV[3] + 1) == ARGV[3] .. '/' then
    redis.call('DEL', ARGV[2] .. name)
    if kind == 'lease' then redis.call('DEL', ARGV[2] .. 'term/' .. key) end
    redis.call('ZREM', KEYS[2], name)
  end
end
return {1, '0', ''}
"""


@dataclass(frozen=True)
class RedisSettings:
    """The server's address, and this client's credentials."""

    host: str
    port: int
    tls: bool = False
    database: int = 0
    prefix: str = PREFIX
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """The server, for a person."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.tls}://{host}:{self.port}"

    def check_files(self) -> None:
        """Read what TLS connections use; ConfigurationError for files that cannot be read."""
        if self.tls:
            public_context(self.ca, self.cert, self.key, service="Redis", slug="redis-tls")


def read_settings(endpoint: str, conf: Mapping[str, str]) -> RedisSettings:
    """Read `HOST[:PORT]` or a URL, and the keys of `--rdzv-conf`; opens nothing."""
    scheme, found, rest = endpoint.partition("://")
    if not found:
        scheme, rest = ("rediss" if conf.get("cacert") else "redis"), endpoint
    if scheme.lower() not in ("redis", "rediss") or "," in rest:
        raise _bad_endpoint(endpoint, "one server: HOST[:PORT], redis:// or rediss://HOST[:PORT]")
    if "@" in rest:  # Not shown: what stands before it is likely a password.
        raise _bad_endpoint(
            f"{scheme}://***@{rest.rpartition('@')[2]}",
            "HOST:PORT; a login goes into --rdzv-conf user=NAME,password=PASSWORD",
        )
    rest, _, path = rest.partition("/")
    database = conf.get("db") or path or "0"
    if not (database.isascii() and database.isdecimal()):
        raise _bad_conf(f"db = {database!r}", "the number of a database, 0 by default")
    if bool(conf.get("cert")) != bool(conf.get("key")):
        raise _bad_conf("one of cert and key", "both of them, or neither")
    if conf.get("user") and not conf.get("password"):
        raise _bad_conf("user, and no password", "user and password, or password alone")
    tls = scheme.lower() == "rediss"
    if not tls and (conf.get("cacert") or conf.get("cert")):
        raise _bad_conf("certificates, and a plain connection", "rediss://HOST:PORT")
    where = parse_endpoint(rest, default_port=PORT)
    return RedisSettings(
        where.host,
        where.port,
        tls,
        int(database),
        check_key(conf.get("redis_prefix", "").strip("/") or PREFIX),
        *(conf.get(name, "") for name in ("cacert", "cert", "key", "user", "password")),
    )


def _bad_endpoint(shown: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"--rdzv-endpoint {shown}: no Redis server", slug="endpoint-syntax", expected=expected
    )


def _bad_conf(fault: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"--rdzv-conf for redis: {fault}", slug="bad-rdzv-conf", expected=expected
    )


class RedisStore:
    """One process's view of the server, over one connection. Opens nothing before it is used."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        poll_s: float = STORE_POLL_S,
    ) -> None:
        self.urls = (settings.url,)
        self.settings = settings
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._connection: Any = None  # of redis-py
        self._turn = asyncio.Lock()
        self._seen = 0  # the highest version or term that the server gave or showed
        self._was_primary = False

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        _, version, value = await self._run(_GET, [f"entry/{check_key(key)}"], [], write=False)
        return _entry(version, value)

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set."""
        name = f"entry/{check_key(key)}"
        check_value(key, value)
        ttl = _milliseconds(check_ttl(key, ttl_s)) if ttl_s is not None else ""
        done, version, found = await self._run(_SET, [name], [expected_version, value, ttl, name])
        if not done:
            raise ConflictError(key, expected_version, _entry(version, found))
        return Entry(value, version)

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        name = f"entry/{check_key(key)}"
        done, version, found = await self._run(_DELETE, [name], [expected_version, name])
        if not done:
            raise ConflictError(key, expected_version, _entry(version, found))

    async def lease(self, key: str, value: bytes, ttl_s: float) -> RedisLease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        begun_s = boot_clock()
        done, term = await self.hold(key, 0, value, ttl_s)
        return RedisLease(self, key, value, ttl_s, term, begun_s) if done else None

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder."""
        _, term, value = await self._run(_HOLDER, [f"lease/{check_key(key)}"], [], write=False)
        return Holder(value, term) if term else None

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        return watch_by_polling(lambda: self.get(key), after_version, self._poll_s)

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        await self._run(_PURGE, [], [f"{self.settings.prefix}/", check_key(prefix)])

    async def close(self) -> None:
        """See Store.close."""
        await self._disconnect()

    async def hold(self, key: str, term: int, value: bytes, ttl_s: float) -> tuple[bool, int]:
        """Take a lease that is free (`term` 0), or renew one; returns whether, and whose it is."""
        names = [f"lease/{key}", f"term/{key}"]
        ttl = _milliseconds(ttl_s)
        kept = _milliseconds(ttl_s + TERM_KEPT_S)
        done, found, _ = await self._run(_HOLD, names, [term, value, ttl, names[0], kept])
        return bool(done), found

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease."""
        names = [f"lease/{check_key(key)}", f"term/{key}"]
        await self._run(_RELEASE, names, [term, names[0]])

    async def _run(
        self, script: str, names: list[str], values: list[Any], *, write: bool = True
    ) -> tuple[int, int, bytes]:
        """Run a script within the bound; returns whether it did it, a number and a value."""
        prefix = self.settings.prefix
        keys = [f"{prefix}/{name}" for name in ("clock", "index", *names)]
        words = ["EVAL", _BEGIN + script, len(keys), *keys]
        sent = False
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                connection = await self._connected()
                sent = True
                answer = await self._ask(connection, *words, self._seen, *values)
        except TimeoutError:
            raise self._silent(unsure=write and sent) from None
        except (ConfigurationError, StoreError):
            raise
        except Exception as error:  # redis-py's own, which is not imported here
            raise self._error(error, unsure=write and sent) from error
        done, number, value = int(answer[0]), int(answer[1]), bytes(answer[2])
        if done < 0:
            raise self._lost(number)
        self._seen = max(self._seen, number)
        return done, number, value

    async def _ask(self, connection: Any, *words: Any) -> Any:
        try:
            await connection.send_command(*words)
            return await connection.read_response()
        except BaseException as error:
            # An answer that comes later must not be taken for that of the next question.
            if not _is_answer(error):
                await self._disconnect()
            raise

    async def _connected(self) -> Any:
        if self._connection is None or await _is_stale(self._connection):
            await self._disconnect()
            connection = self._connection = _connection(self.settings)
            try:
                await connection.connect()
                await self._inspect(connection)
            except BaseException:
                await self._disconnect()
                raise
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.disconnect(nowait=True)

    async def _inspect(self, connection: Any) -> None:
        """Refuse a server that cannot keep a record, and warn of one that may lose it."""
        try:
            text = await self._ask(connection, "INFO")
        except Exception as error:
            if type(error).__name__ != "NoPermissionError":
                raise
            _log.info("%s: INFO is not allowed: its role and its disk are not checked", self.urls)
            return
        lines = bytes(text).decode(errors="replace").splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        self._check_kind(facts)
        if not self._was_primary:
            self._warn_of_loss(facts)
        self._was_primary = True

    def _check_kind(self, facts: Mapping[str, str]) -> None:
        mode, role = facts.get("redis_mode", "standalone"), facts.get("role", "master")
        version = facts.get("redis_version", "")
        major = version.partition(".")[0]
        if mode != "standalone":
            raise self._unfit(f"is part of a {mode}", "one server that is no part of a cluster")
        if major.isdecimal() and int(major) < VERSION_MIN:
            raise self._unfit(f"is of version {version}", f"Redis {VERSION_MIN} or later")
        if role != "master":
            if not self._was_primary:
                raise self._unfit("is a replica, which is read-only", "the primary")
            raise StoreError(
                f"redis: {self.settings.url} became a replica",
                slug="store-unreachable",
                next_step="nothing, while a failover is under way: it is tried again",
            )

    def _warn_of_loss(self, facts: Mapping[str, str]) -> None:
        if facts.get("aof_enabled") == "0":
            _log.warning(
                "redis: %s has no append-only file: a restart of it can lose the job's record;"
                " set appendonly yes, and appendfsync always",
                self.settings.url,
            )
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
            _log.warning(
                "redis: %s may evict the job's record or its lease (maxmemory-policy %s); set"
                " maxmemory-policy noeviction",
                *(self.settings.url, policy),
            )

    def _unfit(self, what: str, expected: str) -> ConfigurationError:
        return ConfigurationError(
            f"redis: {self.settings.url} {what}",
            slug="redis-server",
            expected=expected,
            next_step=f"redis-cli -h {self.settings.host} -p {self.settings.port} INFO replication",
        )

    def _lost(self, number: int) -> ConfigurationError:
        return ConfigurationError(
            f"redis: {self.settings.url} has lost writes that it had acknowledged: its number is"
            f" {number}, and {self._seen} was seen",
            slug="redis-data-lost",
            expected="the data with which this job began, for as long as it runs",
            next_step="set appendonly yes and appendfsync always, and start the job again with"
            " another --rdzv-id",
        )

    def _silent(self, *, unsure: bool) -> StoreError:
        words = ": it is not known whether the write was done" if unsure else ""
        return StoreError(
            f"redis: {self.settings.url} did not answer within {self._timeout_s:g} s{words}",
            slug="store-timeout",
            next_step=f"redis-cli -h {self.settings.host} -p {self.settings.port} PING",
        )

    def _error(self, error: Exception, *, unsure: bool) -> StoreError | ConfigurationError:
        """Return what an error of redis-py means."""
        kind, url = type(error).__name__, self.settings.url
        text = (str(error) or kind)[:_TEXT_CHARS_MAX]
        if kind in _LOGIN_ERRORS:
            return ConfigurationError(
                f"redis: {url}: {text}",
                slug="redis-auth",
                expected=f"a user that may run EVAL and INFO, on keys ~{self.settings.prefix}/*",
                next_step="--rdzv-conf user=NAME,password=PASSWORD",
            )
        if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
            return ConfigurationError(
                f"redis: {url}: {text}",
                slug="redis-tls",
                expected="a certificate of the authority in --rdzv-conf cacert, for this host name",
            )
        if kind == "BusyLoadingError" or not _is_answer(error):
            words = ": it is not known whether the write was done" if unsure else ""
            return StoreError(
                f"redis: {url}: {text}{words}",
                slug="store-unsure" if unsure else "store-unreachable",
                expected="a Redis server at --rdzv-endpoint; rediss:// where it wants TLS",
                next_step=f"redis-cli -h {self.settings.host} -p {self.settings.port} PING",
            )
        return StoreError(
            f"redis: {url} refused: {text}",
            slug="store-refused",
            next_step="look at the server's log, its memory and its disk",
        )


class RedisLease(HeldLease):
    """A lease of a RedisStore; the store makes it. The term stays until another holder takes it."""

    def __init__(
        self, store: RedisStore, key: str, value: bytes, ttl_s: float, term: int, begun_s: float
    ) -> None:
        super().__init__(key, ttl_s, boot_clock, term=term, begun_s=begun_s)
        self._store = store
        self._value = value

    async def renew(self) -> None:
        """See Lease.renew."""
        if self._lost:
            raise self.deposed("others'", f"server {self._store.urls[0]}")
        begun_s = boot_clock()
        done, found = await self._store.hold(self._key, self._term, self._value, self._ttl_s)
        if not done:
            raise self.deposed(f"term {found}", f"server {self._store.urls[0]}")
        self.count_from(begun_s)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.end_lease(self._key, self._term)


def _connection(settings: RedisSettings) -> Any:
    """Return a connection of redis-py, which opens at its first request. It never retries one."""
    try:
        module: Any = import_module("redis.asyncio.connection")
    except ImportError:
        raise missing_extra(
            "--rdzv-backend redis needs the package redis, which is not installed", "redis"
        ) from None
    common = {
        "host": settings.host,
        "port": settings.port,
        "db": settings.database,
        "username": settings.user or None,
        "password": settings.password or None,
        "socket_timeout": None,  # the bound is that of the operation
        "socket_connect_timeout": None,
        "protocol": 2,
    }
    if not settings.tls:
        return module.Connection(**common)
    settings.check_files()  # redis-py does not say which file is meant
    return module.SSLConnection(
        **common,
        ssl_ca_certs=settings.ca or None,
        ssl_certfile=settings.cert or None,
        ssl_keyfile=settings.key or None,
        ssl_check_hostname=True,
    )


async def _is_stale(connection: Any) -> bool:
    """Return whether the server closed a connection that was idle, or sent what was not asked."""
    # redis-py 8 renamed it.
    has_input = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return not connection.is_connected or bool(await has_input())
    except Exception:
        return True


def _is_answer(error: BaseException) -> bool:
    """Return whether the server said this, after which the connection can be used again."""
    return any(one.__name__ == "ResponseError" for one in type(error).__mro__)


def _entry(version: int, value: bytes) -> Entry | None:
    return Entry(value, version) if version else None


def _milliseconds(duration_s: float) -> int:
    return math.ceil(duration_s * 1000)


def _check(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    read_settings(place.endpoint, place.conf).check_files()
    return place


BACKEND = StoreBackend(
    name="redis",
    make=lambda place: RedisStore(read_settings(place.endpoint, place.conf)),
    endpoint="one Redis server, HOST:PORT or rediss://HOST:PORT",
    example=f"HOST:{PORT}",
    check=_check,
    keys=(
        ConfKey("user", "name for the login"),
        ConfKey("password", "its password"),
        ConfKey("cacert", "the authority of the server's certificate", unit="PEM file"),
        ConfKey("cert", "our certificate as its client", unit="PEM file"),
        ConfKey("key", "its private key", unit="PEM file"),
        ConfKey("db", "the number of the database", "0", "number"),
        ConfKey("redis_prefix", "what the names of all keys begin with", PREFIX),
    ),
    default_port=PORT,
    tls=True,
    login=True,
)
