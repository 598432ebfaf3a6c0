"""The event log's files: several writers, reading by time, and losses on a faulty disk."""

import io
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from shown_job import write_job
from view_events import event, settled

from elastane.observe import events as events_module
from elastane.observe.account import account_of
from elastane.observe.events import (
    EventLog,
    EventReader,
    decode_line,
    encode_line,
    follow,
    read_events,
)
from elastane.observe.story import story_of
from elastane.protocol.log_events import EventKind, LogEvent


def note(reason, kind=EventKind.INCIDENT):
    return LogEvent(kind=kind, reason=reason)


@pytest.fixture
def log(tmp_path):
    made = []

    def make(host="host-a", base_dir=tmp_path, job="job"):
        made.append(EventLog(str(base_dir), job, "node", host))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reasons(folder):
    return [event.reason for event in read_events(folder)]


def test_events_of_all_hosts_are_read_in_the_order_of_time(log, tmp_path):
    one, other = log("host-a"), log("host-b")
    for number in range(6):
        (one if number % 2 else other).log(note(str(number)), "agent")
    assert one.flush()
    assert other.flush()
    assert reasons(tmp_path / "job") == list("012345")
    assert len(list((tmp_path / "job").glob("events.*.jsonl"))) == 2


def test_two_agents_of_one_host_share_a_file_without_tearing_lines(log, tmp_path):
    logs = [log(), log()]

    def tell_many(each):
        for number in range(300):
            each.log(note(f"{number}" + "x" * 500), "agent")

    threads = [threading.Thread(target=tell_many, args=(each,)) for each in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.flush() for each in logs)
    # A log opened in the middle of the other's write takes that for a torn line, and ends it: an
    # empty line, since writes append whole.
    lines = [line for line in logs[0].path.read_bytes().splitlines() if line]
    told = [event for event in read_events(tmp_path / "job") if event.kind == "incident"]
    lost = sum(e.data["events"] for e in read_events(tmp_path / "job") if e.kind == "events-lost")
    assert len(told) + lost == 600
    assert len(list(read_events(tmp_path / "job"))) == len(lines)


def test_a_second_run_appends(log, tmp_path):
    first = log()
    first.log(note("first"), "agent")
    first.close()
    second = log()
    second.log(note("second"), "agent")
    assert second.flush()
    assert reasons(tmp_path / "job") == ["first", "second"]


def test_line_torn_by_a_death_costs_that_line_only(log, tmp_path):
    first = log()
    first.log(note("whole"), "agent")
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"time":"torn')
    second = log()
    second.log(note("after"), "agent")
    assert second.flush()
    assert reasons(tmp_path / "job") == ["whole", "after"]


def test_full_disk_is_reported_once_and_the_loss_is_written_afterwards(
    log, tmp_path, monkeypatch, caplog
):
    full = os.open("/dev/full", os.O_WRONLY)
    each = log()
    with monkeypatch.context() as patch:
        patch.setattr(events_module, "open_append", lambda path: os.dup(full))
        patch.setattr(events_module, "_ends_torn", lambda path: False)
        with caplog.at_level(logging.WARNING, "elastane.events"):
            for number in range(5):
                each.log(note(str(number)), "agent")
            assert each.flush()
    os.close(full)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    each.log(note("again"), "agent")
    assert each.flush()
    told = {event.kind: event for event in read_events(tmp_path / "job")}
    assert told["incident"].reason == "again"
    assert told["events-lost"].data == {"events": 5}


def test_folder_that_cannot_be_made_raises_nothing(log, tmp_path):
    (tmp_path / "file").write_text("")
    each = log(base_dir=tmp_path / "file")
    each.log(note("x"), "agent")
    assert each.flush()


def test_hanging_disk_blocks_no_caller(log, monkeypatch, tmp_path):
    release = threading.Event()
    real = events_module.open_append
    monkeypatch.setattr(
        events_module, "open_append", lambda path: real(path) if release.wait(30) else -1
    )
    each = log()
    for number in range(5000):
        each.log(note("x" * 900 + str(number)), "agent")
    assert not each.flush(0.05)
    release.set()
    assert each.flush(30)
    each.log(note("after"), "agent")
    assert each.flush()
    told = list(read_events(tmp_path / "job"))
    lost = sum(event.data["events"] for event in told if event.kind == "events-lost")
    assert lost > 0
    assert lost + sum(event.kind == "incident" for event in told) == 5001


@pytest.mark.parametrize("base_dir", ["", "/dev/null"])
def test_without_a_folder_nothing_is_written(log, base_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each = log(base_dir=base_dir)
    each.log(note("x"), "agent")
    assert each.flush()
    assert list(tmp_path.iterdir()) == []


def test_names_of_job_and_host_cannot_leave_the_folder(log, tmp_path):
    each = log(host="../../h", job="../j")
    each.log(note("x"), "agent")
    assert each.flush()
    assert each.path.resolve().is_relative_to(tmp_path.resolve())
    assert each.path.exists()


def test_reader_gives_each_event_once_as_the_files_grow(log, tmp_path):
    reader = EventReader(tmp_path / "job")
    assert reader.poll() == []
    one = log("host-a")
    one.log(note("1"), "agent")
    assert one.flush()
    assert [event.reason for event in reader.poll()] == ["1"]
    other = log("host-b")
    one.log(note("2"), "agent")
    assert one.flush()
    other.log(note("3"), "agent")
    assert other.flush()
    assert [event.reason for event in reader.poll()] == ["2", "3"]
    with one.path.open("ab") as file:
        file.write(b'{"half')
    assert reader.poll() == []


def test_reader_says_which_share_of_the_files_it_has_read(log, tmp_path):
    one = log()
    for number in range(20_000):
        one.log(note(str(number)), "agent")
        if number % 500 == 0:  # a full queue drops events
            assert one.flush(60.0)
    assert one.flush(60.0)
    reader = EventReader(tmp_path / "job")
    assert reader.share() == 1.0, "no file was found yet"
    reader.read(100)
    assert 0.0 < reader.share() < 1.0
    while reader.read(5000):
        pass
    assert reader.share() == 1.0


def test_reader_from_now_skips_older_events(log, tmp_path):
    one = log()
    one.log(note("old"), "agent")
    assert one.flush()
    reader = EventReader(tmp_path / "job", from_now=True)
    assert reader.poll() == []
    one.log(note("new"), "agent")
    assert one.flush()
    assert [event.reason for event in reader.poll()] == ["new"]


def test_follow_gives_all_and_ends_when_is_over_holds(log, tmp_path):
    one = log()
    for number in range(3):
        one.log(note(str(number)), "agent")
    assert one.flush()
    followed = follow(tmp_path / "job", is_over=lambda: True)
    assert [event.reason for event in followed] == ["0", "1", "2"]


@pytest.mark.parametrize("gone", ["folder", "file", "renamed"])
def test_a_removed_log_is_made_again_with_a_warning(log, tmp_path, caplog, gone):
    one = log()
    one.log(note("before"), "agent")
    assert one.flush()
    match gone:
        case "folder":
            shutil.rmtree(tmp_path / "job")
        case "file":
            one.path.unlink()
        case "renamed":
            one.path.rename(one.path.with_suffix(".1"))
    one.log(note("after"), "agent")
    assert one.flush()
    assert reasons(tmp_path / "job") == ["after"]
    assert caplog.text.count("was removed or replaced") == 1


def written(folder, events, host="a"):
    folder.mkdir(exist_ok=True)
    (folder / f"events.{host}.jsonl").write_bytes(b"".join(map(encode_line, events)))
    return folder


def counted(at_s, steps, of_round=1):
    return event("progress", time_s=at_s, steps=steps, round=of_round, attempt=0, workers=2)


def told(folder, events):
    return account_of(events, 9e9), story_of("j", str(folder), events)


def repeating():
    """Return a job that is restored from step 2000 at 6000, and repeats the steps in 400 counts."""
    trained = {"round": 2, "attempt": 0}
    return [
        settled(1, "node-a", 2, time_s=0.0, nodes=1),
        event("workers-training", round=1, attempt=0, time_s=1.0),
        *(counted(10.0 * n, 10 * n) for n in range(1, 601)),
        event("incident", round=1, attempt=0, time_s=6001.0),
        settled(2, "node-a", 2, time_s=6003.0, nodes=1),
        event("restored", time_s=6003.5, step=2000),
        event("workers-training", time_s=6004.0, **trained),
        *(counted(6010.0 + 10 * n, 2000 + 11 * n, 2) for n in range(1, 900)),
    ]


@pytest.mark.parametrize("with_saves", [False, True])
def test_account_and_story_are_the_same_without_most_step_counts(tmp_path, with_saves):
    events = repeating()
    saves = [event("checkpoint-saved", time_s=one.time_s + 1, step=1) for one in events[::7]]
    folder = written(tmp_path / "j", sorted([*events, *(saves if with_saves else ())],
                                            key=lambda one: one.time_s))  # fmt: skip
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert told(folder, few) == told(folder, every)
    repeated = sum(one.seconds for one in told(folder, few)[0].intervals if one.cause == "retried")
    assert 3000 < repeated < 4000, "the counts until all steps were repeated are not left out"
    counts = [one for one in few if one.kind == "progress"]
    assert len(counts) < 400 and sum(one.kind == "progress" for one in every) > 1400
    assert few[-10:] == every[-10:] or with_saves


def test_paces_are_left_out_like_counts_and_separate_them(tmp_path):
    """A script reports its steps late: until then paces are logged, also after a restart."""

    def paced(time_s, round_=1):
        return event("pace", round=round_, attempt=0, time_s=time_s, made=10, seconds=10.0)

    events = [one for one in repeating() if one.time_s > 10.0 or one.kind != "progress"]
    paces = [*(paced(10.0 + n / 100) for n in range(1, 900)), paced(6004.5, 2), paced(6005.0, 2)]
    folder = written(tmp_path / "j", sorted([*events, *paces], key=lambda one: one.time_s))
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert told(folder, few) == told(folder, every)
    assert sum(one.kind == "pace" for one in few) == 4, "the first and the last of each row"
    assert few[-10:] == every[-10:]


def test_a_stall_ends_at_the_next_pace_also_without_most_of_them(tmp_path):
    paces = [
        event("pace", round=1, attempt=0, time_s=float(n), made=10, seconds=10.0)
        for n in range(20, 400, 10)
    ]
    stall = event("stall", round=1, attempt=0, time_s=205.0, reason="no step")
    events = sorted([settled(1, "node-a", 2, time_s=0.0, nodes=1), *paces, stall], key=_time)
    folder = written(tmp_path / "j", events)
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert told(folder, few) == told(folder, every) and len(few) < len(every)


def _time(one):
    return one.time_s


def test_steps_that_another_coordinator_repeats_in_its_own_file_are_counted(tmp_path):
    """Before the first count there are more events than are read at once from each file."""
    before = [event("node-joined", time_s=-1.0) for _ in range(300)]
    events = [one for one in repeating() if one.kind != "progress" or one.time_s < 6002.0]
    faster = [counted(6010.0 + 10 * n, 2000 + n * n // 100, 2) for n in range(1, 900)]
    written(tmp_path / "j", [*before, *(one for one in events if one.time_s < 6002.0)], "a")
    folder = written(
        tmp_path / "j", [*(one for one in events if one.time_s > 6002.0), *faster], "b"
    )
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert told(folder, few) == told(folder, every)


def test_a_job_of_many_incidents_has_the_same_account_without_most_step_counts(tmp_path):
    folder = write_job(tmp_path, now_s=1e9)
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert len(few) < 0.7 * len(every)
    assert told(folder, few) == told(folder, every)


def test_a_count_whose_line_is_torn_or_that_only_a_text_names_ends_no_job(tmp_path):
    quoted = event("incident", reason='{"kind":"progress","steps":9}', time_s=2.5)
    folder = written(tmp_path / "j", [*(counted(float(n), n) for n in (1, 2)), quoted])
    with (folder / "events.a.jsonl").open("ab") as file:
        file.write(encode_line(counted(3.0, 3)) + encode_line(counted(4.0, 4))[:-20])
    found = list(read_events(folder, all_counts=False))
    assert [one.kind for one in found] == ["progress", "progress", "incident", "progress"]
    assert found[2] == decode_line(encode_line(quoted))


def test_step_counts_of_one_coordinator_are_left_out_beside_the_files_of_other_hosts(tmp_path):
    events = repeating()
    agents = [one for one in events if one.kind in ("workers-training", "restored")]
    folder = written(tmp_path / "j", [one for one in events if one not in agents], "a")
    written(folder, agents, "b")
    every, few = list(read_events(folder)), list(read_events(folder, all_counts=False))
    assert told(folder, few) == told(folder, every)
    assert len(few) < 400 and len(every) > 1400


def test_a_log_of_more_hosts_than_a_process_may_open_files_is_read_whole(tmp_path, monkeypatch):
    """If each file stayed open until its last event, all files would be open at once."""
    opened, most = [0], [0]

    class Counted(io.FileIO):
        def __init__(self, path, mode="r"):
            super().__init__(path, mode)
            opened[0] += 1
            most[0] = max(most[0], opened[0])

        def close(self):
            opened[0] -= not self.closed
            super().close()

    for host in range(40):
        written(tmp_path / "j", [event("pace", time_s=at + host / 64) for at in range(200)], host)
    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(path, mode.rstrip("b")))
    found = list(read_events(tmp_path / "j"))
    assert len(found) == 8000 and found == sorted(found, key=lambda one: one.time_s)
    assert most[0] == 1


def test_a_line_across_two_pieces_is_read_and_one_that_is_too_long_is_left_out(tmp_path):
    events = [event("incident", reason="x" * 900, time_s=float(at)) for at in range(3000)]
    folder = written(tmp_path / "j", events)
    with (folder / "events.a.jsonl").open("ab") as file:
        file.write(b"x" * (3 << 20) + b"\n" + encode_line(event("stall", time_s=1e6))[:-1])
    found = list(read_events(folder))
    assert [one.time_s for one in found] == [*map(float, range(3000)), 1e6]
