"""docs/threat-model.md names tests that exist, bounds that are the code's, and links that lead."""

import ast
import re

import pytest
from style_sources import ROOT

from elastane.coordinator.server import MESSAGES_PER_S_MAX
from elastane.dashboard import connections
from elastane.options import secret
from elastane.process import health
from elastane.process.rpc.listener import UNPROVEN_MAX
from elastane.protocol.limits import HANDSHAKE_BYTES_MAX, HANDSHAKE_TIMEOUT_S, UNPROVEN_TIMEOUT_S

PAGE = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_it_names_exists(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert function in {getattr(node, "name", "") for node in tree.body}


def test_every_defence_names_its_test():
    rows = [line for line in section("What is defended").splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert all(row.rstrip("| ").endswith("`") and "::test_" in row for row in rows[1:])


def test_its_figures_are_those_of_the_code():
    defended = section("What is defended")
    assert f"{HANDSHAKE_TIMEOUT_S:g} s for a handshake, {UNPROVEN_MAX} unproven" in defended
    assert f"makes room after {UNPROVEN_TIMEOUT_S:g} s" in defended
    assert f"beyond {HANDSHAKE_BYTES_MAX >> 10} KiB" in defended
    assert f"{MESSAGES_PER_S_MAX:g} messages a second" in defended
    assert f"{health._CONNECTIONS_MAX} at most" in defended
    assert f"{connections.UNPROVEN_MAX} connections without an accepted request" in defended
    assert f"{connections.PROVEN_MAX} with one; {connections.REQUEST_S:g} s for a whole" in defended
    assert secret._LOOK_S == 1.0 and "once a second" in section("Changing the secret")


def test_what_is_not_defended_says_how_to_wall_it_off():
    text = section("Not defended")
    for word in ("NetworkPolicy", "WireGuard", "NCCL_SOCKET_IFNAME", "--token-file", "namespaces"):
        assert word in text


def test_every_link_leads_somewhere():
    headings = {line.lstrip("# ").lower() for line in PAGE.splitlines() if line[:1] == "#"}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:].replace("-", " ") in headings, target
        else:
            assert (ROOT / "docs" / target).is_file(), target
