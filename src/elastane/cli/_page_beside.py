"""The web page of a job beside its run: `elastane run --serve PORT`.

The page is a separate process, so its faults do not affect the agent. It is not the agent's child,
since the agent ends children that it does not know. It ends when the agent does: the pipe between
them breaks, even if the agent was killed. A page that cannot serve is an error before the job
begins.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastane.cli.dashboard import check_packages, listener_on
from elastane.errors import UsageError

if TYPE_CHECKING:
    from elastane.options.config import AgentConfig

HOST = "127.0.0.1"


@contextlib.contextmanager
def page_beside(config: AgentConfig) -> Iterator[None]:
    """Serve the page of this agent's job inside this context, if --serve is given."""
    if config.serve is None:
        yield
        return
    check_packages()
    if not config.logs.has_files:
        raise UsageError(
            f"--serve {config.serve} with a job that writes no event log",
            slug="no-event-log",
            expected="a --log-dir, which the page reads",
            next_step="leave out --log-dir, or --serve",
        )
    listener = listener_on(HOST, config.serve, "--serve 0")
    port = listener.getsockname()[1]
    here, there = os.pipe()
    _begin(config, listener, here, there)
    os.close(here)
    listener.close()
    print(f"elastane: the page of this job is http://{HOST}:{port}/", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        os.close(there)


def _begin(config: AgentConfig, listener: socket.socket, here: int, there: int) -> None:
    """Start the serving process; its parent is init, or a subreaper above this process."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # A page that cannot start prints its error, and the job continues.
    try:
        os.setsid()
        if os.fork() == 0:
            os.close(there)
            _be_page(config, listener, here)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _be_page(config: AgentConfig, listener: socket.socket, pipe: int) -> None:
    from elastane.dashboard.connections import BoundedServer
    from elastane.dashboard.following import Jobs
    from elastane.dashboard.guard import Guard
    from elastane.dashboard.server import DashboardServer
    from elastane.process.files import JobRegistry, runtime_folder
    from elastane.process.kernel import show_program
    from elastane.process.tls import TlsConfig

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    folder = config.logs.job_dir(config.spec.job).absolute()
    with contextlib.suppress(OSError):
        show_program(["elastane", "dashboard", str(folder)])
    threading.Thread(target=_end_with_agent, args=(pipe,), daemon=True).start()
    tls = config.rendezvous.tls
    proof = TlsConfig(cert=tls.cert, key=tls.key, ca=tls.ca) if tls else None
    registry = JobRegistry(runtime_folder(config.environment))
    jobs = Jobs(folder.parent, registry, folder, proof)
    BoundedServer(DashboardServer(jobs, Guard(HOST, "")).app()).run(sockets=[listener])


def _end_with_agent(pipe: int) -> None:
    """Wait for the end of the agent, then end at once."""
    os.read(pipe, 1)
    os._exit(0)
