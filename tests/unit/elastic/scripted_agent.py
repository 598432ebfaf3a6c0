"""An agent with scripted hooks, over a fake handler and a HashStore; it starts no process."""

from __future__ import annotations

import importlib
import signal
from types import SimpleNamespace

import torch.distributed as dist

from elastane.elastic.rendezvous import RendezvousStoreInfo

theirs = importlib.import_module("torch.distributed.elastic.agent.server.api")
FAILED_RANK = 1


class Handler:
    """A scripted rendezvous of one node; `waiting` has its answers to the agent."""

    use_agent_store = True

    def __init__(self, waiting=(), infos=None):
        self.waiting, self.infos, self.met = list(waiting), infos, 0
        self.hash_store = dist.HashStore()

    def next_rendezvous(self):
        self.met += 1
        info = next(self.infos) if self.infos else self.info()
        if isinstance(info, Exception):
            raise info
        return info

    def info(self, store=None):
        store = store or dist.PrefixStore(str(self.met), self.hash_store)
        where = RendezvousStoreInfo("host", 1000 + self.met)
        return SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=where)

    def num_nodes_waiting(self):
        answer = self.waiting.pop(0) if self.waiting else 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_backend(self):
        return "fake"

    def get_run_id(self):
        return "run"


def spec_of(api, handler=None, **more):
    given = {
        "role": "trainer",
        "local_world_size": 2,
        "rdzv_handler": handler or Handler(),
        "entrypoint": "train",
        "max_restarts": 2,
        "monitor_interval": 0.001,
    }
    return api.WorkerSpec(**{**given, **more})


def agent_of(api, states=(), handler=None, **more):
    """Return an agent whose workers are in these states, one after another."""
    errors = importlib.import_module(
        api.__name__.replace("agent.server.api", "multiprocessing.errors")
    )

    class Scripted(api.SimpleElasticAgent):
        def __init__(self, spec):
            super().__init__(spec, exit_barrier_timeout=5, shutdown_timeout=7)
            self.calls, self.states = [], list(states)

        def _start_workers(self, worker_group):
            where = (worker_group.master_addr, worker_group.master_port)
            self.calls.append(("start", worker_group.state.value, str(worker_group.workers), where))
            return {worker.local_rank: f"id-{worker.local_rank}" for worker in worker_group.workers}

        def _stop_workers(self, worker_group):
            self.calls.append(("stop", worker_group.state.value))

        def _monitor_workers(self, worker_group):
            state = self.states.pop(0)
            self.calls.append(("monitor", [worker.id for worker in worker_group.workers]))
            if isinstance(state, signal.Signals):
                raise errors_signal(state)
            result = api.RunResult(api.WorkerState[state])
            if state == "SUCCEEDED":
                result.return_values = {0: "a", 1: "b"}
            if state == "FAILED":
                failure = errors.ProcessFailure(FAILED_RANK, 99999, 3, "<N/A>")
                result.failures = {FAILED_RANK: failure}
            return result

        def _shutdown(self, death_sig=signal.SIGUSR1, timeout=30):
            self.calls.append(("shutdown", death_sig.name, timeout))

    def errors_signal(sigval):
        name = api.__name__.replace("agent.server.api", "multiprocessing")
        return importlib.import_module(name).SignalException("got it", sigval)

    return Scripted(spec_of(api, handler, **more))
