"""The findings from results of several nodes: each fault has its cause and remedy."""

from itertools import combinations

import msgspec
import pytest

from elastane.doctor.network_rules import (
    CONNECTED,
    FULL,
    LOST,
    REFUSED,
    STRANGER,
    TIMEOUT,
    GlooPlace,
    MeetingFacts,
    NodePage,
    Reach,
    Speed,
    judge_nodes,
    pairs_of_round,
    rounds_of,
)
from elastane.doctor.rules import Level
from elastane.protocol.model import Versions

VERSIONS = Versions(elastane="0.1.0", python="3.11", torch="2.13.0")
NAMES = ("a", "b", "c")
replace = msgspec.structs.replace


def page(number):
    name, address = NAMES[number], f"10.0.0.{number + 1}"
    reaches = [
        Reach(to=to, outcome=CONNECTED, latency_s=2e-4, offset_s=1e-3, name=(f"10.0.0.{to + 1}",))
        for to in range(3)
        if to != number
    ]
    return NodePage(
        name=name,
        versions=VERSIONS,
        address=address,
        probe_port=40000 + number,
        gloo=GlooPlace(chosen_by=f"the host's name {name}", address=address, port=50000),
        interfaces=(("lo", ("127.0.0.1",)), ("eth1", (address,))),
        ports=(32768, 60999),
        endpoint=("10.0.0.1",),
        reaches=tuple(reaches),
        speeds=tuple(Speed(to=to, sent=1e9, received=1.1e9) for to in range(number + 1, 3)),
    )


FACTS = MeetingFacts(
    endpoint="a:29400", wanted=3, waited_s=120.0, resolved=("10.0.0.1",), names=NAMES,
    pages=tuple(map(page, range(3))),
)  # fmt: skip


def met(**changes):
    """Return the results of a meeting, with changes for the named nodes."""
    pages = [replace(one, **changes.get(one.name, {})) for one in FACTS.pages]
    return replace(FACTS, pages=tuple(pages))


def reached(number, to, **changes):
    """Return the reaches of a node, with one changed."""
    return {
        "reaches": tuple(
            replace(one, **changes) if one.to == to else one for one in page(number).reaches
        )
    }


def bad(facts):
    found = [one for one in judge_nodes(facts) if one.level is not Level.GOOD]
    assert all(one.why and one.next_step for one in found)
    return [(one.subject, one.level.value) for one in found], " ".join(
        f"{one.found} {one.why} {one.next_step}" for one in found
    )


def test_nodes_that_fit_have_good_findings_alone():
    assert bad(FACTS) == ([], "")
    said = {one.subject: one.found for one in judge_nodes(FACTS)}
    assert said["meeting"] == "3 of 3 nodes met at a:29400"
    assert said["versions"] == "elastane 0.1.0, python 3.11, torch 2.13.0 on all nodes"
    assert said["connections"] == "6 directions open: a 10.0.0.1, b 10.0.0.2, c 10.0.0.3"
    assert said["gloo"] == "is reached where it would listen on 3 nodes"
    assert said["clocks"] == "differ by at most 1 ms"
    assert said["latency"] == "0.2 ms to 0.2 ms of round trip"
    assert said["bandwidth"] == "1.00 GB/s to 1.10 GB/s of one connection"


def test_one_direction_that_is_closed_names_the_ports_and_the_open_one():
    subjects, text = bad(met(b=reached(1, 2, outcome=TIMEOUT)))
    assert subjects == [("connections", "fault")]
    assert "b to c (10.0.0.3:40002): no answer; open from c to b" in text
    assert "open TCP ports 32768 to 60999 of c for b" in text


def test_closed_connections_of_one_node_are_one_finding():
    closed = tuple(replace(one, outcome=REFUSED) for one in page(0).reaches)
    subjects, text = bad(met(a={"reaches": closed}))
    assert subjects == [("connections", "fault")] and "a to b, c (10.0.0.2:40001): refused" in text


def test_another_host_at_the_address_of_a_node_is_distinguished_from_a_closed_port():
    _, text = bad(met(b=reached(1, 0, outcome=STRANGER)))
    assert "b to a (10.0.0.1:40000): another host answers" in text and "--local-addr" in text


def test_each_version_that_differs_is_a_fault():
    other = replace(VERSIONS, torch="2.11.0", accelerator="cuda 12.8")
    subjects, text = bad(met(c={"versions": other}))
    assert subjects == [("versions", "fault")] * 2
    assert "torch: 2.13.0 on a, b; 2.11.0 on c" in text
    assert "accelerator: none on a, b; cuda 12.8 on c" in text


@pytest.mark.parametrize(
    ("gloo", "says"),
    [
        ({"address": "127.0.1.1"}, "b would listen at 127.0.1.1 (the host's name b): a, c cannot"),
        ({"chosen_by": "GLOO_SOCKET_IFNAME=eth7", "error": "there is no network card eth7"},
         "GLOO_SOCKET_IFNAME=eth7: there is no network card eth7"),
    ],
    ids=["address", "card"],
)  # fmt: skip
def test_if_gloo_is_unreachable_the_right_card_is_named(gloo, says):
    lost = {"gloo": REFUSED} if "error" not in gloo else {}
    subjects, text = bad(
        met(
            a=reached(0, 1, **lost),
            b={"gloo": replace(page(1).gloo, **gloo)},
            c=reached(2, 1, **lost),
        )
    )
    assert subjects == [("gloo", "fault")] and says in text
    assert "export GLOO_SOCKET_IFNAME=eth1 on b" in text


def test_a_name_that_leads_to_another_host_is_a_warning_and_one_unknown_is_none():
    subjects, text = bad(
        met(
            a=reached(0, 1, name=("10.9.9.9",)),
            b=reached(1, 0, name=()),
            c=reached(2, 1, name=("10.9.9.9",)),
        )
    )
    assert subjects == [("names", "warning")]
    assert "b is 10.9.9.9 on a, c, and has 10.0.0.2" in text


def test_an_endpoint_with_other_addresses_on_other_nodes_is_a_warning():
    subjects, text = bad(met(b={"endpoint": ("10.0.0.7",)}))
    assert subjects == [("names", "warning")]
    assert "the endpoint's host is 10.0.0.1 on a; 10.0.0.7 on b" in text
    assert bad(met(a={"endpoint": ("127.0.1.1",)})) == ([], ""), "it is that host's own name"


@pytest.mark.parametrize(("offset_s", "word"), [(2.5, "ahead of"), (-2.5, "behind")])
def test_a_clock_that_is_off_is_named(offset_s, word):
    subjects, text = bad(met(a=reached(0, 2, offset_s=offset_s)))
    assert subjects == [("clocks", "warning")]
    assert f"that of c is 2.5 s {word} that of a" in text


def test_high_latency_and_low_bandwidth_are_named_beside_the_median():
    slow = {"speeds": (replace(page(1).speeds[0], received=2e8),)}
    subjects, text = bad(met(a=reached(0, 2, latency_s=0.02), b=slow))
    assert subjects == [("latency", "warning"), ("bandwidth", "warning")]
    assert "20 ms of round trip from a to c; 0.2 ms in the median" in text
    assert "200 MB/s from c to b; 1.00 GB/s in the median" in text and "less than 500 MB/s" in text


def test_results_of_unknown_nodes_are_left_out():
    strange = page(0).reaches[0]
    more = (*page(0).reaches, replace(strange, to=9, outcome=TIMEOUT), replace(strange, to=-1))
    assert bad(met(a={"reaches": more, "speeds": (Speed(to=7, sent=1.0, received=1.0),)})) == (
        [],
        "",
    )


@pytest.mark.parametrize("changes", [{"probe_port": 70000}, {"gloo": {"port": -1}}])
def test_a_page_with_an_impossible_port_is_refused(changes):
    raw = msgspec.to_builtins(page(0))
    assert msgspec.convert(raw, NodePage) == page(0)
    raw["gloo"] |= changes.pop("gloo", {})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw | changes, NodePage)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"error": REFUSED}, "a:29400 is 10.0.0.1: connections are refused for 120 s"),
        ({"error": TIMEOUT}, "nc -vz a 29400"),
        ({"error": TIMEOUT, "endpoint": "[fd00::1]:29400"}, "nc -vz fd00::1 29400"),
        ({"error": STRANGER}, "another program answers there"),
        ({"error": FULL}, "with the same --nodes"),
        ({"error": LOST}, "a:29400 is 10.0.0.1: was lost after this node had joined"),
        ({"error": "Name or service not known", "resolved": ()}, "DNS or /etc/hosts"),
        ({"error": "No route to host"}, "is 10.0.0.1: No route to host a firewall"),
        ({"wanted": 4}, "3 of 4 nodes met at a:29400 within 120 s: a, b, c"),
        ({"pages": (*FACTS.pages[:2], None)}, "and c did not finish"),
        ({"names": ("a",), "pages": FACTS.pages[:1], "resolved": ("127.0.1.1",)},
         "each one waits for itself"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_meet_read_why(changes, says):
    facts = replace(FACTS, **changes)
    if "names" in changes:
        facts = replace(facts, pages=(replace(facts.pages[0], reaches=(), speeds=()),))
    all_found = judge_nodes(facts)
    found = [one for one in all_found if one.subject == "meeting"]
    assert [one.level for one in found] == [Level.FAULT]
    assert "names" not in changes or all_found == found, "a node alone says nothing of others"
    assert says in " ".join((found[0].found, found[0].why, found[0].next_step))


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_each_pair_meets_in_one_round_and_no_node_twice(count):
    met_pairs = []
    for number in range(rounds_of(count)):
        partners = pairs_of_round(count, number)
        assert all(partners[other] == one for one, other in partners.items())
        met_pairs += [(one, other) for one, other in partners.items() if one < other]
    assert sorted(met_pairs) == [*combinations(range(count), 2)]
