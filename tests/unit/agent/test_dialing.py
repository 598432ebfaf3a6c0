"""How an agent proves itself to a coordinator, also while the job's secret is being changed."""

import asyncio

import pytest

from elastane.agent import link
from elastane.agent.link import Dialer
from elastane.errors import MembershipError, RendezvousRefusedError
from elastane.process.rpc import Access

NEW, OLD = b"new", b"old"


class Coordinator:
    """Accepts these secrets, or refuses all of them for another reason."""

    def __init__(self, takes, otherwise="wrong-token"):
        self.takes, self.otherwise = takes, otherwise
        self.tried = []

    async def connect(self, host, port, *, job, secret, tls, timeout_s):
        self.tried.append(secret)
        if secret in self.takes:
            return (host, port, secret)
        raise RendezvousRefusedError("no", slug=self.otherwise)


class Registry:
    def __init__(self, error=None):
        self.error = error
        self.there = None

    def write(self, entry):
        if self.error is not None:
            raise self.error
        self.there = entry

    def remove(self, entry):
        assert entry is self.there
        self.there = None


@pytest.fixture
def dial(monkeypatch):
    """Return a dialer of an agent with these secrets, for this coordinator."""

    def make(coordinator, secrets=(NEW, OLD), registry=None, token=lambda: "token"):
        monkeypatch.setattr(link.rpc, "connect", coordinator.connect)
        access = Access("job", secrets[0], changing=lambda: secrets)
        return Dialer(access, token, "host-a", registry)

    return make


def reach(dialer):
    return asyncio.run(dialer("10.0.0.1", 29400))


def test_a_coordinator_with_the_new_secret_never_receives_the_old_one(dial):
    coordinator = Coordinator({NEW, OLD})
    assert reach(dial(coordinator)) == ("10.0.0.1", 29400, NEW)
    assert coordinator.tried == [NEW]


def test_a_coordinator_without_the_new_secret_gets_the_old_one(dial):
    coordinator = Coordinator({OLD})
    assert reach(dial(coordinator)) == ("10.0.0.1", 29400, OLD)
    assert coordinator.tried == [NEW, OLD]


def test_a_refusal_of_all_secrets_is_raised(dial):
    coordinator = Coordinator(set())
    with pytest.raises(RendezvousRefusedError) as caught:
        reach(dial(coordinator))
    assert caught.value.slug == "wrong-token"
    assert coordinator.tried == [NEW, OLD]


def test_a_refusal_for_another_reason_tries_no_other_secret(dial):
    coordinator = Coordinator(set(), otherwise="wrong-job")
    with pytest.raises(MembershipError) as caught:
        reach(dial(coordinator))
    assert caught.value.slug == "wrong-job"
    assert coordinator.tried == [NEW]


def test_status_finds_the_last_reached_coordinator_until_the_agent_ends(dial):
    registry = Registry()
    dialer = dial(Coordinator({NEW}), registry=registry)
    dialer.close()
    reach(dialer)
    entry = registry.there
    assert (entry.job, entry.node, entry.endpoint) == ("job", "host-a", "10.0.0.1:29400")
    dialer.close()
    assert registry.there is None


def test_a_changed_secret_is_registered_for_status(dial):
    registry, token = Registry(), ["before"]
    dialer = dial(Coordinator({NEW}), registry=registry, token=lambda: token[0])
    dialer.token_changed()
    assert registry.there is None, "no coordinator was reached yet"
    reach(dialer)
    token[0] = "after"
    dialer.token_changed()
    assert (registry.there.endpoint, registry.there.token) == ("10.0.0.1:29400", "after")


def test_a_session_works_without_a_registry_entry(dial, monkeypatch):
    said = []
    monkeypatch.setattr(link._registry_log, "warning", lambda *words: said.append(words[0]))
    dialer = dial(Coordinator({NEW}), registry=Registry(OSError(28, "No space left on device")))
    assert reach(dialer) == ("10.0.0.1", 29400, NEW)
    assert said == ["elastane status will not find this job: %s"]
    assert reach(dial(Coordinator({NEW}))) == ("10.0.0.1", 29400, NEW)
