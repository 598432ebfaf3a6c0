"""A worker with children: one forked, one spawned, one in a session of its own. Prints pids."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time


def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


if __name__ == "__main__":
    forked = multiprocessing.get_context("fork").Process(target=stay, daemon=True)
    forked.start()
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    spawned = subprocess.Popen(program)
    away = subprocess.Popen(program, start_new_session=True)
    print(*(os.getpid(), forked.pid, spawned.pid, away.pid), flush=True)
    if "--leave" in sys.argv:
        os._exit(0)
    time.sleep(600)
