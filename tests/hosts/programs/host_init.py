"""The first process of a host: starts others, and reports their ends; all end with it.

It is pid 1 of the host's own pid namespace: when it is killed, the kernel kills every process of
the host at the same instant, as a loss of power does. A line of JSON on stdin is a command, a line
on stdout the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys

REAP_S = 0.05
started: dict[int, subprocess.Popen[bytes]] = {}


def reap() -> None:
    """Reap orphans; processes that were started here are left to their Popen."""
    for process in started.values():
        process.poll()
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in started:
                started[found.si_pid].poll()
            else:
                os.waitpid(found.si_pid, os.WNOHANG)


def start(argv: list[str], env: dict[str, str], log: str) -> int:
    with open(log, "ab") as file:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    started[process.pid] = process
    return process.pid


def obey(command: dict) -> object:
    what = command.pop("do")
    if what == "run":
        done = subprocess.run(
            command["argv"], capture_output=True, text=True, timeout=20, check=False
        )
        return [done.returncode, done.stdout, done.stderr]
    if what == "start":
        return start(**command)
    if what == "poll":
        return started[command["pid"]].poll()
    if what == "signal":
        with contextlib.suppress(ProcessLookupError):
            os.kill(command["pid"], command["number"])
    return None


def main() -> None:
    while True:
        readable, _, _ = select.select([0], [], [], REAP_S)
        reap()
        if not readable:
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            return
        try:
            answer = {"ok": obey(json.loads(line))}
        except Exception as error:  # to be raised by who asked
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
