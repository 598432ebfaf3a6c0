"""What a job's state is made of: the objects that its user named, and the random streams.

Owns how each kind is captured and given back. Modules, optimizers, schedulers, scalers, samplers:
whatever has `state_dict` and `load_state_dict`; and torch's generators. It knows nothing of worlds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastane.errors import JobError

_NAME_IT = "name what heals a peer: job.track(model=model, optimizer=optimizer)"


class Tracked:
    """The named objects of a job, in the order in which they were named."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, objects: Mapping[str, Any]) -> None:
        """Take in more; JobError for a name that is taken, or an object without a state."""
        for name, thing in objects.items():
            if name in self._objects:
                raise _refused(f"track({name}=...): there is one of this name", "each name once")
            if not (_is_stateful(thing) or isinstance(thing, torch.Generator)):
                kind = type(thing).__name__
                raise _refused(
                    f"track({name}=...): a {kind} has no state_dict() and load_state_dict()",
                    "a module, an optimizer, a scheduler, a scaler, a sampler, a generator",
                )
            if _is_sharded(thing):
                raise _refused(
                    f"track({name}=...): its parameters are sharded over workers (fully_shard)",
                    "replicas: whole parameters on each worker, as with DDP over job.process_group",
                    "leave elastane.init() out: elastane run restarts such a script from its own"
                    " checkpoint",
                )
            self._objects[name] = _bare(thing)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules, without what DDP wraps around them."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return [t for t in self._objects.values() if isinstance(t, torch.optim.Optimizer)]

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.Generator)]

    @property
    def others(self) -> list[Any]:
        """Schedulers, scalers and the like: small states that a step may change."""
        big = (torch.nn.Module, torch.optim.Optimizer, torch.Generator)
        return [thing for thing in self._objects.values() if not isinstance(thing, big)]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield each parameter of the optimizers once, else of the modules."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        found = [parameter for group in groups for parameter in group["params"]]
        found += [parameter for module in self.modules for parameter in module.parameters()]
        yield from {id(parameter): parameter for parameter in found}.values()

    def state(self) -> dict[str, Any]:
        """Return all states, by name; tensors are those of the objects, not copies."""
        return {
            name: {"state": thing.get_state()}
            if isinstance(thing, torch.Generator)
            else thing.state_dict()
            for name, thing in self._objects.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Give all objects the states of another worker's; JobError where names differ."""
        if set(state) != set(self._objects):
            odd = sorted(set(state) ^ set(self._objects))
            raise _refused(
                f"track(): {', '.join(odd)} on some workers and not on others",
                "the same names on all workers, before the first step",
            )
        for name, thing in self._objects.items():
            if isinstance(thing, torch.Generator):
                thing.set_state(state[name]["state"])
            elif isinstance(thing, torch.optim.Optimizer):
                load_exactly(thing, state[name])
            else:
                thing.load_state_dict(state[name])

    def replicas(self) -> dict[str, Any]:
        """Return what is the same on all members: parameters, and the state of optimizers."""
        return {
            name: dict(thing.named_parameters())
            if isinstance(thing, torch.nn.Module)
            else thing.state_dict()
            for name, thing in self._objects.items()
            if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
        }

    def load_replicas(self, state: Mapping[str, Any]) -> None:
        """Take over another member's `replicas()`."""
        for name, held in state.items():
            thing = self._objects[name]
            if isinstance(thing, torch.nn.Module):
                with torch.no_grad():
                    for each, parameter in thing.named_parameters():
                        parameter.copy_(held[each])
            else:
                load_exactly(thing, held)


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state to the last bit; its tensors become the optimizer's own.

    torch turns the state of a parameter into the parameter's dtype (2.13): moments in float32 of
    weights in bfloat16 would lose half of their bits.
    """
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = value


class RandomStreams:
    """The random streams of this process, as they were when this was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore(self) -> None:
        """Let them go on from there."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def _is_sharded(thing: Any) -> bool:
    """Whether one worker's loss is a loss of state that no other holds."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not isinstance(thing, torch.nn.Module):
        return False
    return any(isinstance(parameter, tensor.DTensor) for parameter in thing.parameters())


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def _bare(thing: Any) -> Any:
    """Return the module inside a DDP: its names are the same whether it is wrapped or not."""
    wrapped = isinstance(thing, torch.nn.parallel.DistributedDataParallel)
    return thing.module if wrapped else thing


def _refused(what: str, expected: str, next_step: str = _NAME_IT) -> JobError:
    return JobError(what, expected=expected, next_step=next_step, slug="job-track")
