"""The modes of what a job leaves on disk: the table of docs/threat-model.md."""

from __future__ import annotations

import os

import pytest

from elastane.observe.events import EventLog
from elastane.observe.report import FinalReport, write_report
from elastane.process.errorfile import write_content
from elastane.process.streams import files
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.storage.folder import FolderStorage


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


def test_modes_are_those_of_the_threat_model(tmp_path, monkeypatch, mask):
    monkeypatch.setattr(files, "default_base_dir", lambda: str(tmp_path / "default"))
    for name, folder_mode in (("default", 0o700), ("named", 0o777 & ~mask)):
        files.ensure_base_dir(str(tmp_path / name))
        assert mode(tmp_path / name) == folder_mode
        log = tmp_path / name / "stdout.log"
        os.close(files.open_append(log))
        assert mode(log) == 0o666 & ~mask
    write_content(str(tmp_path / "error.json"), {"message": "m"})
    assert mode(tmp_path / "error.json") == 0o666 & ~mask
    events = EventLog(str(tmp_path / "named"), "job", "node", "host")
    events.log(LogEvent(kind=EventKind.JOB_ENDED, reason="r"), "agent")
    events.close()
    assert mode(events.path) == 0o666 & ~mask
    write_report(str(tmp_path / "report"), FinalReport(job="j", ok=True, exit_code=0, reason=""))
    assert mode(tmp_path / "report") == 0o644 & ~mask
    assert FolderStorage(tmp_path / "checkpoints").create("step/part", b"x")
    assert mode(tmp_path / "checkpoints" / "step") == 0o777 & ~mask
    assert mode(tmp_path / "checkpoints" / "step" / "part") == 0o666 & ~mask
