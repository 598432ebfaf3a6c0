"""The watch of notices: each is reported once, and a source that fails affects no other."""

import asyncio
import errno
import logging

import pytest

from elastane.errors import ConfigurationError
from elastane.notices import watch
from elastane.notices.rules import NoticeSource
from elastane.notices.watch import NoticeWatch
from elastane.protocol.events import Notice

GOING = Notice("file", "going")


class Scripted:
    """A source that returns or raises scripted results, and then repeats the last one."""

    pause_s = 0.0

    def __init__(self, *script):
        self.script = list(script)
        self.reads = 0
        self.closed = False

    async def read(self):
        self.reads += 1
        now = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if now == "hang":
            await asyncio.Event().wait()
        if isinstance(now, Exception):
            raise now
        return now

    async def close(self):
        self.closed = True


class Watched(NoticeWatch):
    """A watch of scripted sources."""

    def __init__(self, *readers):
        self.readers = [*readers]
        self.heard = []
        sources = [NoticeSource("file", f"/{number}") for number in range(len(readers))]
        super().__init__(sources, self.heard.append, 0.0, {})

    def _readers(self, source):
        return [self.readers[int(source.where[1:])]]

    def run_until(self, condition):
        async def body():
            self.start()
            async with asyncio.timeout(90):
                while not condition():  # noqa: ASYNC110 - each look lets the sources be read
                    await asyncio.sleep(0)
            await self.close()

        asyncio.run(body())
        return self.heard


def test_each_notice_is_reported_once_however_often_it_is_read():
    reader = Scripted([], [GOING])
    assert Watched(reader).run_until(lambda: reader.reads > 20) == [GOING]
    assert reader.closed


def test_a_source_that_hangs_or_fails_delays_no_other():
    failing, good = Scripted(RuntimeError("a bug")), Scripted([], [], [GOING])
    watched = Watched(Scripted("hang"), failing, good)
    assert watched.run_until(lambda: watched.heard and failing.reads > 5) == [GOING]


def test_a_source_that_fails_is_read_again_and_is_reported_once(caplog):
    logging.getLogger("elastane").propagate = True
    error = OSError("no route to host")
    reader = Scripted(*[error] * 8, [], *[error] * 2, [GOING])
    watched = Watched(reader)
    with caplog.at_level(logging.WARNING, "elastane.agent"):
        assert watched.run_until(lambda: watched.heard) == [GOING]
    assert [record.getMessage() for record in caplog.records] == [
        "notices of file:/0 cannot be read and are tried again: no route to host [notice-source]",
        "notices of file:/0 are read again",
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)"),
         "Connection refused"),
        (ConfigurationError("cannot run 'say': Permission denied", slug="s", expected="a program"),
         "cannot run 'say': Permission denied; expected a program"),
    ],
)  # fmt: skip
def test_the_reason_why_a_source_cannot_be_read_is_in_words(error, said, caplog):
    logging.getLogger("elastane").propagate = True
    reader = Scripted(*[error] * 4, [GOING])
    watched = Watched(reader)
    with caplog.at_level(logging.WARNING, "elastane.agent"):
        assert watched.run_until(lambda: watched.heard) == [GOING]
    told = f"notices of file:/0 cannot be read and are tried again: {said} [notice-source]"
    assert caplog.records[0].getMessage() == told


def test_auto_reads_no_source_outside_a_known_cloud(monkeypatch, caplog):
    logging.getLogger("elastane").propagate = True
    monkeypatch.setattr(watch, "read_dmi", lambda: {"sys_vendor": "QEMU"})
    assert NoticeWatch([], print, 0.0, {})._readers(NoticeSource("auto", "")) == []
    assert "no known cloud" in caplog.text


def test_auto_reads_the_cloud_of_the_machine_at_its_usual_address(monkeypatch):
    monkeypatch.setattr(watch, "read_dmi", lambda: {"product_name": "Google Compute Engine"})
    readers = NoticeWatch([], print, 0.0, {})._readers(NoticeSource("auto", ""))
    assert [str(reader._address) for reader in readers] == ["169.254.169.254"] * 2


def test_the_pause_grows_to_a_bound_that_a_short_notice_survives():
    pauses = [watch._pause_s(5.0, failures) for failures in range(12)]
    assert pauses[0] == 5.0 and pauses == sorted(pauses) and pauses[-1] == watch.PAUSE_MAX_S
    assert watch._pause_s(60.0, 3) == 60.0
