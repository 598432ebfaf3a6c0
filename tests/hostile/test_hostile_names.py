"""Names and folders that lead to other places are refused or made safe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from memory_store import MemoryBackend, MemoryStore
from ports import free_port
from supervise import words_agent, write_script

from elastane.cli.main import main
from elastane.coordinator.rules import Rendezvous
from elastane.errors import ConfigurationError
from elastane.observe.events import EventOrigin, encode_line, make_event
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.process.files import JobEntry, JobRegistry, NodeSlot, runtime_folder, safe_name
from elastane.protocol.events import Received
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import Join, Refused, Welcome
from elastane.protocol.model import Fence, JobSpec, NodeSpec, PortOffer, Versions
from elastane.stores.jobs import JobKeys
from elastane.stores.protocol import check_key

ODD = {
    "above": "../../x",
    "absolute": "/etc/passwd",
    "dots": "..",
    "nul": "a\0b",
    "newline": "a\nb",
    "escape": "a\x1b[2Jb",
    "backwards": "a\u202eb",
    "backslash": "..\\x",
    "long": "n" * 201,
}
SPEC = JobSpec(job="digits", min_nodes=1, max_nodes=1, max_restarts=0)


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
@pytest.mark.parametrize("option", ["--rdzv-id", "--node-id", "--role"])
def test_an_odd_name_on_a_command_line_is_refused_by_name(tmp_path, monkeypatch, option, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with pytest.raises(ConfigurationError) as caught:
        build(parse([*where, "--nnodes", "2", f"{option}={name}", "train.py"], {}), {})
    assert caught.value.slug == "bad-name" and caught.value.what.startswith(option)
    assert str(caught.value).isprintable() or "\n" not in caught.value.what


def answer(**changes):
    """Return the coordinator's answer to an agent with these names."""
    node = {"node_id": "a", "incarnation": "i", "local_world_size": 1} | changes
    spec = NodeSpec(**node, versions=Versions(elastane="1", python="3"))
    join = Join(spec=SPEC, node=spec, offer=PortOffer(1, True))
    machine = Rendezvous(SPEC, 0.0)
    effects = machine.handle(Received(session=1, message=join, peer_host="h", local_host="h"), 0.0)
    return [e.message for e in effects if hasattr(e, "message")]


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_an_odd_name_from_the_wire_is_refused_in_printable_words(name):
    for field in ("node_id", "role", "local_addr"):
        if (field, name) == ("local_addr", ".."):
            continue  # No address, and no path either.
        if (field, name) == ("role", ".."):
            continue  # A role is part of a line, and of no path by itself.
        [refused] = answer(**{field: name})
        assert isinstance(refused, Refused), (field, refused)
        assert refused.slug in ("bad-node-id", "bad-name") and refused.what.isprintable()


def test_an_ordinary_name_from_the_wire_is_welcome():
    assert isinstance(
        answer(node_id="node-0.rack_7", role="träner", local_addr="fe80::1%eth0")[0], Welcome
    )


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_files_and_keys_stay_below_their_folder_for_any_job_name(tmp_path, name):
    assert safe_name(name) not in ("", ".", "..") and "/" not in safe_name(name)
    registry = JobRegistry(tmp_path)
    entry = JobEntry(job=name, node=name, endpoint="h:1", token="t", pid=1, process="x")
    path = registry.write(entry).resolve()
    assert path.parent.parent == (tmp_path / "jobs").resolve()
    with NodeSlot.acquire(tmp_path, name, name) as slot:
        assert slot._path.resolve().parent == (tmp_path / "slots").resolve()
    keys = JobKeys(MemoryStore(MemoryBackend()), name)
    for key in (keys.coordinator, keys.token_key, keys.record, keys.leadership):
        assert check_key(key).split("/")[0] == keys.prefix


def test_names_that_look_alike_or_are_cut_alike_never_share_a_file():
    alike = ["run", "r\u0443n", "run ", "run\u200b", "Run", "r/un", "r_un", "r\\un"]
    alike += ["n" * 300, "n" * 301, "n" * 300 + "/"]
    assert len({safe_name(name) for name in alike}) == len(alike)


def test_a_runtime_folder_that_is_a_link_or_anothers_or_open_is_refused(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    place = tmp_path / f"elastane-{os.getuid()}"

    def refused():
        with pytest.raises(ConfigurationError) as caught:
            runtime_folder({"TMPDIR": str(tmp_path)})
        return caught.value.slug == "runtime-folder" and str(place) in caught.value.what

    place.symlink_to(mine)
    assert refused() and not list(mine.iterdir())
    place.unlink()
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    assert refused()
    place.chmod(0o700)
    assert runtime_folder({"TMPDIR": str(tmp_path)}) == place
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
        assert refused()


@pytest.mark.parametrize("trap", ["link", "file", "another"])
def test_a_planted_default_log_folder_gets_no_logs_and_the_job_runs(tmp_path, trap):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = tmp_path / f"elastane-logs-{os.getuid()}"
    if trap == "link":
        place.symlink_to(elsewhere)
    elif trap == "file":
        place.write_text("mine")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can make a folder another user's")
        place.mkdir()
        os.chown(place, 12345, 12345)
    script = write_script(tmp_path, "print('said'); tell('done')")
    words = ("--standalone", "--no-zygote", "--tee", "3", script)
    with words_agent(tmp_path, *words) as one:
        assert one.wait(60) == 0, one.err
        assert one.told("done.0.0") == "" and "said" in one.out
    assert not list(elsewhere.iterdir())
    assert trap != "file" or place.read_text() == "mine"
    assert trap != "another" or not list(place.iterdir())


def test_a_link_in_the_runtime_folder_is_not_followed(tmp_path):
    """Only this user can make such a link; after a mistake its target must not be truncated."""
    folder = runtime_folder({"TMPDIR": str(tmp_path)})
    victim = tmp_path / "victim"
    victim.write_text("precious")
    entry = JobEntry(job="j", node="a", endpoint="h:1", token="t", pid=1, process="x")
    path = JobRegistry(folder).write(entry)
    path.unlink()
    path.symlink_to(victim)
    JobRegistry(folder).write(entry)
    assert victim.read_text() == "precious" and not path.is_symlink()
    (folder / "slots").mkdir(exist_ok=True)
    lock = Path(folder / "slots" / safe_name("j.host.0.lock"))
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        NodeSlot.acquire(folder, "j", "host")
    assert victim.read_text() == "precious"


def test_text_of_other_users_cannot_control_a_terminal(tmp_path, capsys):
    """An event log is a file that others may have written."""
    folder = tmp_path / "job"
    folder.mkdir()
    note = LogEvent(
        kind=EventKind.WORKER_EXITED,
        reason="SIGKILL\x1b[2J",
        node_id="a\x1b]0;x\x07",
        fence=Fence(1, 0),
        data={"exit_code": -9, "message": "line\x1b[31m\r\nother"},
    )
    teller = EventOrigin(job="j\x1b[2J", node="n", host="h", pid=1)
    event = make_event(note, teller, source="agent", seq=0, now_ns=1)
    (folder / "events.h.jsonl").write_bytes(encode_line(event))
    for words in (["explain", str(folder)], ["status", "job", "--log-dir", str(tmp_path)]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "SIGKILL?[2J" in said
        assert all(char.isprintable() or char == "\n" for char in said)
