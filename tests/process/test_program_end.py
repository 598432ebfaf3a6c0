"""How a worker's process ends after its program: as in plain Python, but without the teardown."""

import json
import os
import signal
import subprocess
import sys

import pytest

from elastane.process.status_page import PAGE_FD_VARIABLE, StatusPage

# The import of torch takes most of it, on a busy host.
LIMIT_S = 240.0
ENDS = {
    "none": "sys.exit()",
    "false": "sys.exit(False)",
    "byte": "sys.exit(256)",
    "more": "sys.exit(259)",
    "negative": "sys.exit(-1)",
    "long": "sys.exit(1 << 80)",
    "text": "sys.exit('no more data')",
    "object": "sys.exit(('no', 'data'))",
    "error": "raise ValueError('planted')",
    "interrupt": "raise KeyboardInterrupt",
}
# Each program runs in a forked child, once as plain Python would and once as our workers do.
BOTH_WAYS = f"""
import os, sys
from elastane.process.program_end import run_and_leave

for name, program in {ENDS!r}.items():
    for way in ("plain", "ours"):
        if os.fork() == 0:
            os.dup2(os.open(f"{{name}}.{{way}}", os.O_WRONLY | os.O_CREAT), 2)
            if way == "ours":
                run_and_leave(lambda: exec(program))
            os.execv(sys.executable, [sys.executable, "-c", "import sys; " + program])
        status = os.wait()[1]
        print(name, way, os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_worker_ends_with_the_code_and_the_words_of_plain_python(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BOTH_WAYS], cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_S, check=True,
    )  # fmt: skip
    codes = {tuple(line.split()[:2]): int(line.split()[2]) for line in done.stdout.splitlines()}
    assert codes["byte", "plain"] == 0 and codes["interrupt", "plain"] == -signal.SIGINT
    for name in ENDS:
        assert codes[name, "ours"] == codes[name, "plain"], name
        plain, ours = (
            (tmp_path / f"{name}.{way}").read_text().splitlines()[-1:] for way in ("plain", "ours")
        )
        assert ours == plain, name


SCRIPT = """
import os, sys
from launched import AbortsWhenDropped

vars(sys.modules["json"])["kept"] = AbortsWhenDropped()
exec(sys.argv[1])
"""


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    """Return how a script in place ends by each program: its exit code, words, file and report.

    One process imports what runs such scripts, and a child of it runs each.
    """
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ends")
    (folder / "script.py").write_text(SCRIPT)
    failing = {name: ENDS[name] for name in ("more", "text", "error", "interrupt")}
    pages = {name: StatusPage.create() for name in failing}
    parent = f"""
import os, sys
from elastane.worker import unmodified

sys.path.append({os.path.dirname(__file__)!r})
pages = { ({name: page.fd for name, page in pages.items()})!r}
for name, program in {failing!r}.items():
    if os.fork() == 0:
        os.dup2(os.open(f"{{name}}.stderr", os.O_WRONLY | os.O_CREAT), 2)
        os.environ["TORCHELASTIC_ERROR_FILE"] = name + ".json"
        os.environ["{PAGE_FD_VARIABLE}"] = str(pages[name])
        unmodified.main(["script.py", program])
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", parent], cwd=folder, capture_output=True, text=True,
        timeout=LIMIT_S, check=True, pass_fds=[page.fd for page in pages.values()],
    )  # fmt: skip
    codes = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}

    def ended(name):
        file = folder / f"{name}.json"
        error = json.loads(file.read_text())["message"] if file.exists() else None
        return codes[name], (folder / f"{name}.stderr").read_text(), error, pages[name].error_ns

    return ended


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("more", 3, None),
        ("text", 1, "SystemExit: no more data"),
        ("error", 1, "ValueError: planted"),
        ("interrupt", -signal.SIGINT, None),
    ],
)
def test_a_failed_script_in_place_is_reported_and_ends_without_the_teardown(
    in_place, name, code, message
):
    """The thread that delivers collectives may end a process by SIGABRT in its teardown."""
    ended, words, error, error_ns = in_place(name)
    assert ended == code, words
    assert error_ns > 0, "its agent knows that it has failed"
    assert (error["message"] if error else None) == message
    if name in ("error", "interrupt"):
        assert 'script.py", line 6, in <module>' in words.splitlines()[1], words
