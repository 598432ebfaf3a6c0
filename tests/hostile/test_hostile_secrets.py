"""A job's secrets are only where the user put them, and its files are private."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import stat
import subprocess
import urllib.request
from pathlib import Path

import pytest
from etcd_server import etcd
from hostile_support import links, listening
from jobs import until
from ports import free_port
from supervise import Agent, ask, children, command_line, descendants, words_agent, write_script

BODY = """
import json, sys
print("variables", json.dumps(dict(os.environ)))
tell("up")
wait_for("asked")
raise RuntimeError("the end of this worker: " + json.dumps(dict(os.environ)))
"""
UMASK_NONE = ("sh", "-c", 'umask 0; exec "$@"', "sh")


class Spill:
    """All output, files and process data of a job, by the place where it was found."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}

    def take(self, one: Agent) -> None:
        """Collect everything that is visible of a running job."""
        family = descendants(one.pid)
        assert len(family) >= 3, "an orphan reaper, a zygote, a worker"
        for pid in family | {one.pid}:
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # A worker may end at any time.
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                name = line.split(b"\0")[:4]
                self.found[f"command line {pid} {name}"] = line
                if pid != one.pid:  # The agent's variables were given by its user.
                    found = Path(f"/proc/{pid}/environ").read_bytes()
                    self.found[f"variables {pid} {name}"] = found

    def run(self, one: Agent, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        done = ask(one, *words)
        assert done.returncode in codes, done.stderr
        self.found[" ".join(words)] = (done.stdout + done.stderr).encode()
        return done.stdout

    def files(self, folder: Path, but: tuple[Path, ...]) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path not in but:
                self.found[str(path)] = path.read_bytes()

    def holds(self, secret: str) -> list[str]:
        forms = (secret, base64.b64encode(secret.encode()).decode(), json.dumps(secret)[1:-1])
        return [
            where for where, data in self.found.items() if any(f.encode() in data for f in forms)
        ]


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *ec, "-keyout", "key", "-out", "ca", "-subj", "/CN=ca")
    return folder


def key_line(papers: Path) -> str:
    return (papers / "key").read_text().splitlines()[1]


def tls(papers: Path) -> str:
    return f"tls_cert={papers / 'ca'},tls_key={papers / 'key'},tls_ca={papers / 'ca'}"


def private_files(folder: Path) -> list[str]:
    """Return the files below a folder that other users could open or change."""
    wrong = []
    for path in [folder, *folder.rglob("*")]:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o077:
            continue
        wrong.append(f"{path} {stat.filemode(found.st_mode)}")
    return wrong


def test_no_secret_of_an_endpoint_job_is_visible_anywhere(tmp_path, papers):
    token, other, wrong = (secrets.token_urlsafe(24) for _ in range(3))
    files = {}
    for name, text in (("token", token), ("wrong", wrong)):
        files[name] = tmp_path / name
        files[name].write_text(text)
    port, spill = free_port(), Spill()
    words = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["--rdzv-id", "spilled", "--token-file", str(files["token"]), "--tee", "3"]
    words += ["--rdzv-conf", tls(papers), "--report-file", "report", "--preload", "json"]
    words += ["--event-log-handler", "console", write_script(tmp_path, BODY)]
    env = {"ELASTANE_TOKEN": other, "LOGLEVEL": "DEBUG"}
    with words_agent(tmp_path, *words, lead=UMASK_NONE, **env) as one:
        one.told("up.0.0", 60)
        spill.take(one)
        paths = [f"--tls-{name}={papers / file}" for name, file in
                 (("cert", "ca"), ("key", "key"), ("ca", "ca"))]  # fmt: skip
        shown = json.loads(spill.run(one, "status", "--json", *paths))
        assert shown["jobs"][0]["report"]["phase"] == "running"
        asked = ("status", "spilled", "--rdzv-endpoint", f"127.0.0.1:{port}", *paths)
        spill.run(one, *asked, "--token-file", str(files["wrong"]), codes=(78,))
        spill.run(one, *asked, codes=(78,))
        assert "[wrong-token]" in spill.found[" ".join(asked)].decode()
        spill.run(one, "run", "--show-config", "--json", *words)
        spill.run(one, "run", "--show-config", *words)
        assert not private_files(tmp_path / f"elastane-{os.getuid()}")
        logs = tmp_path / f"elastane-logs-{os.getuid()}"
        assert not logs.stat().st_mode & 0o077, "and so nothing below it can be reached"
        (tmp_path / "asked").touch()
        assert one.wait() == 1
        spill.run(one, "explain", "--json", "spilled")
        spill.run(one, "explain", "spilled")
        one.gone()
    spill.files(tmp_path, but=tuple(files.values()))
    assert "the end of this worker" in one.err and spill.holds("the end of this worker")
    secret = [token, other, wrong, key_line(papers)]
    assert {text: spill.holds(text) for text in secret} == {text: [] for text in secret}


def test_no_password_of_a_store_is_visible_anywhere(tmp_path):
    password, token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    spill = Spill()
    with etcd(tmp_path.parent / f"{tmp_path.name}-etcd") as cluster:
        for path, what in (
            ("user/add", {"name": "root", "password": password}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            data = json.dumps(what).encode()
            url = f"{cluster.members[0].url}/v3/auth/{path}"
            urllib.request.urlopen(urllib.request.Request(url, data, method="POST"), timeout=60)
        words = ["--nnodes", "1", "--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoint]
        words += ["--rdzv-id", "stored", "--preload", "json", "--report-file", "report"]
        words += ["--tee", "3", write_script(tmp_path, BODY)]
        conf = f"user=root,password={password},token={token}"
        with words_agent(tmp_path, *words, PET_RDZV_CONF=conf, LOGLEVEL="DEBUG") as one:
            one.told("up.0.0", 60)
            spill.take(one)
            spill.run(one, "status", "--json")
            shown = ask(one, "run", "--show-config", "--json", *words)
            spill.found["--show-config"] = shown.stdout.encode()
            (tmp_path / "asked").touch()
            assert one.wait() == 1
            one.gone()
        env = {"PET_RDZV_CONF": f"user=root,password={password}x,token={token}"}
        again = [*words[:6], "--rdzv-id", "other", *words[8:]]
        with words_agent(tmp_path, *again, **env) as one:
            assert one.wait() == 78 and "[etcd-auth]" in one.err
            assert password not in one.err
        wrong = [*words[:5], f"http://root:{password}@127.0.0.1:1", *words[6:]]
        with words_agent(tmp_path, *wrong) as one:
            assert one.wait() == 78 and "[endpoint-syntax]" in one.err
            assert password not in one.err
    spill.files(tmp_path, but=())
    assert {text: spill.holds(text) for text in (password, token)} == {password: [], token: []}


def test_the_etcd_sidecar_has_no_secret_of_the_job(tmp_path):
    token = secrets.token_urlsafe(24)
    words = ("--standalone", "--rdzv-backend", "etcd", "--no-zygote", "--log-dir", "logs")
    with words_agent(tmp_path, *words, write_script(tmp_path, BODY), ELASTANE_TOKEN=token) as one:
        one.told("up.0.0", 60)
        spill = Spill()
        spill.take(one)
        assert any("etcd" in where for where in spill.found)
        assert not spill.holds(token)


def test_the_etcd_sidecar_listens_on_no_port(tmp_path):
    words = ("--standalone", "--rdzv-backend", "etcd", "--no-zygote", "--log-dir", "logs")
    with words_agent(tmp_path, *words, write_script(tmp_path, BODY), lead=UMASK_NONE) as one:
        one.told("up.0.0", 60)
        (server,) = [p for p in one.family() if "--data-dir" in command_line(p)]
        assert not listening([server])
        sockets = [path for path in tmp_path.rglob("*.sock:1") if path.is_socket()]
        assert len(sockets) == 2
        (folder,) = {path.parent for path in sockets}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_of_a_file_store_are_private_even_with_an_open_umask(tmp_path):
    words = ["--nnodes", "1", "--rdzv-backend", "file", "--rdzv-endpoint", str(tmp_path / "store")]
    words += ["--rdzv-id", "filed", "--no-zygote", "--log-dir", "logs"]
    with words_agent(tmp_path, *words, write_script(tmp_path, BODY), lead=UMASK_NONE) as one:
        one.told("up.0.0", 60)
        held = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert any(path.parent.parent.name == "token" for path in held)
        assert not private_files(tmp_path / "store")


def test_an_agents_named_pipe_and_its_one_named_socket_are_private(tmp_path):
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "t")}
    words = ("--standalone", "--preload", "json", write_script(tmp_path, BODY))
    with words_agent(tmp_path, *words, lead=UMASK_NONE, **env) as one:
        one.told("up.0.0", 60)
        until(lambda: children(one.pid), "it has children")
        assert stat.S_IMODE((tmp_path / "t").lstat().st_mode) == 0o600
        # That of its snapshot server, which asks the kernel besides who connects.
        (listener,) = [path for path in tmp_path.rglob("*") if path.is_socket()]
        assert stat.S_IMODE(listener.lstat().st_mode) == 0o600
        assert stat.S_IMODE(listener.parent.lstat().st_mode) == 0o700
        named = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        inodes = {words[6]: words[7] for words in named if len(words) > 7}
        held = links(one.pid)
        mine = {name for inode, name in inodes.items() if ("socket", inode) in held}
        assert [Path(name).name for name in mine] == [listener.name]
