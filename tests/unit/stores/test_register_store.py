"""The store over one faulty register; other tests are in the conformance suite."""

from __future__ import annotations

import asyncio
import pickle
import threading

import msgspec
import pytest

from elastane.errors import ConfigurationError, StoreError
from elastane.stores.protocol import STORE_VALUE_BYTES_MAX, ConflictError
from elastane.stores.register import REGISTER_BYTES_MAX, RegisterStore


class Register:
    """One value; the answers to `losing` writes are lost, and `racing` writes come too late."""

    def __init__(self, found=None):
        self.found = found
        self.losing = self.racing = self.writes = self.breaking = 0

    def get_state(self):
        return self.found

    def set_state(self, state, token=None):
        if self.racing:
            self.racing -= 1
            self.found = (self.found[0], self.found[1] + 1)
            return (*self.found, False)
        if (self.found[1] if self.found else None) != token:
            return (*self.found, False)
        self.found, self.writes = (state, (token or 0) + 1), self.writes + 1
        if self.breaking:
            self.breaking -= 1
            raise ConnectionError("the answer was lost")
        if self.losing:
            self.losing -= 1
            return (*self.found, False)
        return (*self.found, True)


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_write_with_a_lost_answer_counts_once():
    register = Register()
    register.losing = 1
    store = RegisterStore(register, "r")
    entry = run(store.compare_and_set("k", b"1", 0))
    assert (register.writes, run(store.get("k"))) == (1, entry)


def test_a_write_after_which_the_register_breaks_is_unsure_and_a_read_is_not():
    register = Register()
    register.breaking = 1
    store = RegisterStore(register, "r")
    with pytest.raises(StoreError) as unsure:
        run(store.compare_and_set("k", b"1", 0))
    assert (unsure.value.slug, run(store.get("k")).value) == ("store-unsure", b"1")
    register.get_state = None
    with pytest.raises(StoreError) as unreachable:
        run(store.get("k"))
    assert unreachable.value.slug == "store-unreachable"


def test_a_lost_race_is_run_again_and_a_lost_key_is_a_conflict():
    register = Register()
    store = RegisterStore(register, "r")
    first = run(store.compare_and_set("k", b"1", 0))
    register.racing = 3
    second = run(store.compare_and_set("k", b"2", first.version))
    assert second.version > first.version
    with pytest.raises(ConflictError):
        run(store.compare_and_set("k", b"3", first.version))


def test_nothing_is_written_where_nothing_changes():
    register = Register()
    store = RegisterStore(register, "r")
    run(store.compare_and_set("k", b"1", 0))
    lease = run(store.lease("leadership", b"me", 5.0))
    run(lease.release())
    writes = register.writes
    run(lease.release())
    run(store.purge("nothing"))
    assert run(store.holder("leadership")) is None
    assert register.writes == writes


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"garbage",
        pickle.dumps({"round": 1}),
        msgspec.msgpack.encode({"type": "elastane-register-2"}),
        b"x" * (REGISTER_BYTES_MAX + 1),
        "text",
        None,
    ],
    ids=["nothing", "garbage", "pickle", "a later form", "huge", "no bytes", "None"],
)
def test_foreign_contents_of_the_register_are_refused(state):
    store = RegisterStore(Register((state, 1)), "r")
    with pytest.raises(ConfigurationError, match="store-record"):
        run(store.get("k"))
    with pytest.raises(ConfigurationError, match="store-record"):
        run(store.compare_and_set("k", b"", 0))


def test_all_keys_together_have_a_bound():
    store = RegisterStore(Register(), "r")
    big = b"x" * STORE_VALUE_BYTES_MAX
    for number in range(3):
        run(store.compare_and_set(f"k{number}", big, 0))
    with pytest.raises(ConfigurationError, match="store-value"):
        run(store.compare_and_set("k3", big, 0))
    assert run(store.get("k2")).value == big


def test_a_register_that_hangs_costs_the_bound_and_no_call_passes_another():
    release, inside, most = threading.Event(), [], []

    class Hanging(Register):
        def get_state(self):
            inside.append(1)
            most.append(len(inside))
            release.wait(10)
            inside.pop()

    store = RegisterStore(Hanging(), "r", timeout_s=0.2)

    async def calls():
        return await asyncio.gather(*(store.get("k") for _ in range(4)), return_exceptions=True)

    results = run(calls())
    release.set()
    assert [type(error) for error in results] == [StoreError] * 4
    assert {error.slug for error in results} == {"store-timeout"}
    assert max(most) == 1


def test_any_exception_of_a_register_is_a_store_error():
    class Broken(Register):
        def get_state(self):
            raise KeyError("no such table")

    with pytest.raises(StoreError, match="KeyError: 'no such table'") as caught:
        run(RegisterStore(Broken(), "r").get("k"))
    assert caught.value.slug == "store-unreachable"


def test_writers_that_always_lose_give_up():
    class Busy(Register):
        def set_state(self, state, token=None):
            return (*self.found, False)

    register = Busy()
    run(RegisterStore(other := Register(), "r").compare_and_set("k", b"", 0))
    register.found = other.found
    with pytest.raises(StoreError, match="lost to others"):
        run(RegisterStore(register, "r").compare_and_set("j", b"", 0))
