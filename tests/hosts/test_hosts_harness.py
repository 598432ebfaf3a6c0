"""The hosts of these tests: each fault has its effect, and no host is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from host_jobs import late_steps
from hosts import Lan, need_hosts
from jobs import MARK, Step, left_over, until

SEND = "import socket,sys;s=socket.socket(2,2);s.sendto(b'x',(sys.argv[1],9))"
# What has arrived is kept until all is sent; after that, another 0.3 s are enough for the switch.
HEAR = (
    "import os,socket,sys,time;s=socket.socket(2,2);s.bind(('',9));print('ready',flush=True)\n"
    "while not os.path.exists(sys.argv[1]):time.sleep(0.01)\n"
    "s.settimeout(0.3)\ntry:\n while 1:print(len(s.recv(9)),flush=True)\n"
    "except TimeoutError: pass"
)


def heard(lan: Lan, sender: str, hearer: str, folder: Path, count: int = 1) -> int:
    """Return how many of `count` datagrams arrive."""
    log = folder / uuid.uuid4().hex
    sent = log.with_suffix(".sent")
    hearing = lan[hearer].start([sys.executable, "-S", "-c", HEAR, str(sent)], {}, log)
    until(lambda: log.read_text().startswith("ready"), "it listens")
    for _ in range(count):
        lan[sender].run(sys.executable, "-S", "-c", SEND, lan.address(hearer))
    sent.touch()
    hearing.wait()
    return log.read_text().count("1")


def test_each_simulated_fault_has_its_named_effect(tmp_path: Path) -> None:
    with Lan("ab") as lan:
        assert (heard(lan, "a", "b", tmp_path), heard(lan, "b", "a", tmp_path)) == (1, 1)
        lan.mute("b")
        assert (heard(lan, "a", "b", tmp_path), heard(lan, "b", "a", tmp_path)) == (1, 0)
        lan.heal()
        lan.deafen("b")
        assert (heard(lan, "a", "b", tmp_path), heard(lan, "b", "a", tmp_path)) == (0, 1)
        lan.heal()
        lan.rule("a", "b", duplicate=1.0)
        assert heard(lan, "a", "b", tmp_path, 3) == 6
        lan.heal()
        lan.rule("a", "b", loss=0.5)
        assert 0 < heard(lan, "a", "b", tmp_path, 20) < 20
        lan.heal()
        lan.rule("a", "b", delay_s=5.0)
        assert heard(lan, "a", "b", tmp_path) == 0, "it comes when nobody listens any more"


def test_hosts_differ_in_names_addresses_and_process_numbers(tmp_path: Path) -> None:
    with Lan("ab") as lan:
        for name in "ab":
            assert lan[name].run("hostname").strip() == name
            said = lan[name].run("getent", "ahostsv4", "a")
            assert said.startswith("10.77.0.1 ")
            assert "10.77.0." not in lan[name].run("cat", "/etc/resolv.conf")
        sleeping = [lan[n].start(["sleep", "60"], {}, tmp_path / n) for n in "ab"]
        assert sleeping[0].pid < 100 and sleeping[1].pid < 100
        lan.kill("a")
        assert sleeping[0].poll() == -signal.SIGKILL and sleeping[1].poll() is None


def test_nothing_is_left_of_hosts_whose_test_was_killed(tmp_path: Path) -> None:
    need_hosts()
    mark = uuid.uuid4().hex
    program = (
        "import sys,time\n"
        f"sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "from pathlib import Path\nfrom hosts import Lan\n"
        "lan = Lan('ab').__enter__()\n"
        f"for n in 'ab': lan[n].start(['sleep', '60'], {{{MARK!r}: {mark!r}}}, Path('/dev/null'))\n"
        "print('made', flush=True)\ntime.sleep(60)\n"
    )
    env = {**os.environ, MARK: mark}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as one:
        assert one.stdout is not None and one.stdout.readline() == b"made\n"
        assert len(left_over(mark)) >= 6, "hosts, the switch and what runs on them"
        one.kill()
    until(lambda: not left_over(mark), "all of it ended")


def test_a_host_that_cannot_be_made_is_a_failure_where_everything_is_to_be_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hosts.unavailable", lambda: "no namespaces")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"NOT RUN: .* no namespaces"):
        need_hosts()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"NOT RUN: .* no namespaces"):
        need_hosts()


def test_a_step_of_an_older_world_is_late_unless_the_others_had_made_it() -> None:
    def step(rank: int, number: int, round_: int) -> Step:
        return Step(rank, number, 3, 0, round_, 0, "abc"[rank], 1, 0.0)

    before = [step(0, 4, 1), step(2, 3, 1), step(0, 1, 2)]
    finished, new, second = step(2, 4, 1), step(2, 5, 1), step(2, 3, 1)
    assert late_steps([*before, finished, step(1, 1, 2)]) == []
    assert late_steps([*before, new]) == [new], "no other member had made it"
    assert late_steps([*before, finished, second]) == [second], "a member finishes one step"
