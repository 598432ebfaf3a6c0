"""The servers beside a run: its web page (`--serve`) and its metrics (`--metrics-port`).

Each is a separate process, so its faults do not affect the agent. It is not the agent's child,
since the agent ends children that it does not know. It ends when the agent does: the pipe between
them breaks, even if the agent was killed. A server that cannot listen is an error before the job
begins.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli._serving import listener_on, shown_host
from elastane.errors import UsageError

if TYPE_CHECKING:
    from elastane.options.config import AgentConfig
    from elastane.process.files import JobRegistry
    from elastane.process.tls import TlsConfig

HOST = "127.0.0.1"
# Serves the job of a configuration on a listening socket, and never returns.
_Serve = Callable[["AgentConfig", socket.socket], None]


@contextlib.contextmanager
def servers_beside(config: AgentConfig) -> Iterator[None]:
    """Serve what --serve and --metrics-port ask for inside this context."""
    with contextlib.ExitStack() as stack:
        if config.serve is not None:
            from elastane.cli.dashboard import check_packages

            check_packages()
            _check_log(config, f"--serve {config.serve}", "--serve")
            listener = listener_on(HOST, config.serve, slug="dashboard-listen", free="--serve 0")
            _print(f"the page of this job is http://{HOST}:{listener.getsockname()[1]}/")
            stack.enter_context(_beside(config, listener, "dashboard", _serve_page))
        if config.metrics is not None:
            from elastane.cli.metrics import check_package

            check_package()
            host, port = config.metrics
            _check_log(config, f"--metrics-port {port}", "--metrics-port")
            listener = listener_on(host, port, slug="metrics-listen", free="--metrics-port 0")
            at = f"{shown_host(host)}:{listener.getsockname()[1]}"
            _print(f"the metrics of this job are http://{at}/metrics")
            stack.enter_context(_beside(config, listener, "metrics", _serve_metrics))
        yield


def _check_log(config: AgentConfig, what: str, option: str) -> None:
    if not config.logs.has_files:
        raise UsageError(
            f"{what} with a job that writes no event log",
            slug="no-event-log",
            expected="a --log-dir, which the server reads",
            next_step=f"leave out --log-dir, or {option}",
        )


def _print(text: str) -> None:
    print(f"elastane: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _beside(
    config: AgentConfig, listener: socket.socket, verb: str, serve: _Serve
) -> Iterator[None]:
    """Serve in a process that ends with this one; its parent is init, or a subreaper above."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        # A server that cannot start prints its error, and the job continues.
        try:
            os.setsid()
            if os.fork() == 0:
                os.close(there)
                _become(config, verb, here)
                serve(config, listener)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(here)
    listener.close()
    try:
        yield
    finally:
        os.close(there)


def _become(config: AgentConfig, verb: str, pipe: int) -> None:
    """Become a process that is named after a verb, and that ends with the agent."""
    from elastane.process.kernel import show_program

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    with contextlib.suppress(OSError):
        show_program(["elastane", verb, str(_folder(config))])
    threading.Thread(target=_end_with_agent, args=(pipe,), daemon=True).start()


def _folder(config: AgentConfig) -> Path:
    return config.logs.job_dir(config.spec.job).absolute()


def _reach(config: AgentConfig) -> tuple[JobRegistry, TlsConfig | None]:
    """Return where coordinators are found, and what proves this user to them."""
    from elastane.process.files import JobRegistry, runtime_folder
    from elastane.process.tls import TlsConfig

    tls = config.rendezvous.tls
    proof = TlsConfig(cert=tls.cert, key=tls.key, ca=tls.ca) if tls else None
    return JobRegistry(runtime_folder(config.environment)), proof


def _serve_page(config: AgentConfig, listener: socket.socket) -> None:
    from elastane.dashboard.connections import BoundedServer
    from elastane.dashboard.following import Jobs
    from elastane.dashboard.guard import Guard
    from elastane.dashboard.server import DashboardServer

    folder, (registry, proof) = _folder(config), _reach(config)
    jobs = Jobs(folder.parent, registry, folder, proof)
    BoundedServer(DashboardServer(jobs, Guard(HOST, "")).app()).run(sockets=[listener])


def _serve_metrics(config: AgentConfig, listener: socket.socket) -> None:
    import asyncio

    from elastane.dashboard.exporter import MetricsExporter

    async def serve() -> None:
        registry, proof = _reach(config)
        exporter = MetricsExporter(registry, _folder(config), proof, only=config.spec.job)
        await exporter.server(*listener.getsockname()[:2]).start(listener)
        await exporter.follow()

    asyncio.run(serve())


def _end_with_agent(pipe: int) -> None:
    """Wait for the end of the agent, then end at once."""
    os.read(pipe, 1)
    os._exit(0)
