"""A server that speaks S3, as a process: moto's."""

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import NamedTuple

from ports import free_port

BUCKET = "checkpoints"
START_S = 60.0


class Server(NamedTuple):
    """One that runs: its URL, and its process, to be harmed."""

    url: str
    process: subprocess.Popen


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def environment(url):
    """What a client of S3 finds in its environment."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


@contextmanager
def serving(log):
    """Serve an empty bucket; yields the Server."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=dict(os.environ))
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(f"{url}/moto-api/"):
            assert server.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        put = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(put, timeout=30).close()
        yield Server(url, server)
    finally:
        server.kill()
        server.wait()
