"""Workers of a process group in a test: real processes that get orders through pipes.

They are forked from a single-threaded server that has imported torch, so each costs milliseconds.
A body is a function of one of the modules *_bodies: `body(worker, *args)`.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from unittest import mock

DEADLINE_S = 90.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["comms_bodies"])


# Libraries that start threads when they are imported would start them in the server.
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_HERE = str(Path(__file__).parent)


def start_server():
    """Start the server that forks, single-threaded, if it does not run yet."""
    with mock.patch.dict(os.environ, {**_ALONE, "PYTHONPATH": _HERE}):
        multiprocessing.forkserver.ensure_running()


def _prepared(name):
    """Return the preparation data of a child, without the test runner's main module."""
    return {"name": name, "sys_path": [*sys.path, _HERE], "dir": os.getcwd()}


class Worker:
    """The argument of a body: its number, the store's port, and the pipe to the test."""

    def __init__(self, number, port, pipe):
        self.number, self.port, self.pipe = number, port, pipe

    def say(self, value):
        self.pipe.send(value)

    def hear(self):
        assert self.pipe.poll(DEADLINE_S), f"worker {self.number} was told nothing"
        return self.pipe.recv()

    def when_told(self, action):
        """Run `action` in a thread as soon as the test sends a message."""
        thread = threading.Thread(target=lambda: (self.hear(), action()), daemon=True)
        thread.start()
        return thread


def _main(body, number, port, pipe, args):
    import comms_bodies
    import comms_message_bodies
    import comms_state_bodies
    import deterministic_bodies
    import torch

    torch.set_num_threads(1)
    homes = (comms_bodies, comms_message_bodies, comms_state_bodies, deterministic_bodies)
    home = next(each for each in homes if hasattr(each, body))
    getattr(home, body)(Worker(number, port, pipe), *args)


class Crew:
    """`size` workers that run `body`; ends them all at exit."""

    def __init__(self, size, body, *args):
        start_server()
        self._processes, self._pipes = [], []
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.port = listener.getsockname()[1]
            self.add("serve_store", listener)
        for _ in range(size):
            self.add(body, *args)

    def add(self, body, *args):
        ours, theirs = _context.Pipe()
        number = len(self._processes) - 1
        process = _context.Process(target=_main, args=(body, number, self.port, theirs, args))
        with mock.patch.object(multiprocessing.spawn, "get_preparation_data", _prepared):
            process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(DEADLINE_S)
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def hear(self, worker):
        return self._hear(worker + 1)

    def _hear(self, index):
        try:
            assert self._pipes[index].poll(DEADLINE_S), f"worker {index - 1} says nothing"
            return self._pipes[index].recv()
        except (EOFError, ConnectionResetError):
            self._processes[index].join(1.0)
            code = self._processes[index].exitcode
            raise AssertionError(f"worker {index - 1} ended with {code}") from None

    def is_silent(self, worker, for_s):
        return not self._pipes[worker + 1].poll(for_s)

    def hear_all(self, *workers):
        return [self.hear(each) for each in workers or range(len(self._pipes) - 1)]

    def say(self, worker, value=None):
        self._pipes[worker + 1].send(value)

    def say_all(self, *workers):
        for each in workers or range(len(self._pipes) - 1):
            self.say(each)

    def kill(self, worker, number=signal.SIGKILL):
        os.kill(self._processes[worker + 1].pid, number)
