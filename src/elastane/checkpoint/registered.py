"""The state of a job: the objects that the user registered, and the random streams.

Owns how each kind of object is captured (`states_of`) and restored (`load_into`): modules,
optimizers, schedulers, scalers, samplers and all else with `state_dict` and `load_state_dict`, and
torch's generators. It knows nothing of worlds. How it fails: JobError for a wrong registration.

State dicts of modules and optimizers are rebuilt only if their contents were replaced. torch builds
each from scratch, which for a save after every step is most of the time that the loop is blocked: a
millisecond for some hundred tensors. `ModuleState` and `OptimizerState` instead check, at the speed
of C, that the same objects are there under the same names, and when they build a state dict, that
nothing else went into it. If hooks or a subclass add something, it is built each time.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import msgspec
import torch
from torch.nn import Module

from elastane.errors import JobError

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_NAME_IT = "name what heals a peer: job.track(model=model, optimizer=optimizer)"


_VALUES = methodcaller("values")
_OWN = attrgetter(
    *("_parameters", "_buffers", "_modules"),
    *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
)
_METHODS = attrgetter("state_dict", "_save_to_state_dict", "get_extra_state")
_OPTIMIZER_HOOKS = attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class RegisteredObjects:
    """The objects of a job by name, in the order of registration."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._states: dict[str, Callable[[], Any]] = {}
        self._prepared: list[torch.optim.Optimizer] = []

    def add(self, objects: Mapping[str, Any]) -> None:
        """Register objects; raises JobError for a used name or an object without a state."""
        for name, thing in objects.items():
            if name in self._objects:
                raise _refused(f"track({name}=...): there is one of this name", "each name once")
            if not has_state(thing):
                kind = type(thing).__name__
                raise _refused(
                    f"track({name}=...): a {kind} has no state_dict() and load_state_dict()",
                    "a module, an optimizer, a scheduler, a scaler, a sampler, a generator",
                )
            self._objects[name] = bare(thing)
            self._states[name] = states_of(self._objects[name])

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules, unwrapped by `bare`."""
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
        """Schedulers, scalers and the like, whose small states a step may change."""
        big = (torch.nn.Module, torch.optim.Optimizer, torch.Generator)
        return [thing for thing in self._objects.values() if not isinstance(thing, big)]

    @property
    def sharded(self) -> list[Any]:
        """The sharded parameters (DTensor) of modules."""
        found = [parameter for module in self.modules for parameter in module.parameters()]
        return [parameter for parameter in found if is_dtensor(parameter)]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield each parameter once: those of the optimizers, then those of the modules."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        found = [parameter for group in groups for parameter in group["params"]]
        found += [parameter for module in self.modules for parameter in module.parameters()]
        yield from {id(parameter): parameter for parameter in found}.values()

    def prepare(self) -> None:
        """Create the empty state of sharded optimizers, into which a restore reads the shards.

        An optimizer has no state before its first step. If nothing is read into the created one,
        call `unprepare`: it is not the state of an optimizer that has made no step.
        """
        for optimizer in self.optimizers:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            if any(map(is_dtensor, parameters)) and not optimizer.state:
                from torch.distributed.checkpoint.state_dict import _init_optim_state

                _init_optim_state(optimizer)
                self._prepared.append(optimizer)

    def unprepare(self) -> None:
        """Remove the state that `prepare` created."""
        while self._prepared:
            self._prepared.pop().state.clear()

    def state(self) -> dict[str, Any]:
        """Return all states by name, with the objects' own tensors."""
        return {name: state() for name, state in self._states.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the states of another worker; raises JobError if names differ."""
        if set(state) != set(self._objects):
            odd = sorted(set(state) ^ set(self._objects))
            raise _refused(
                f"track(): {', '.join(odd)} on some workers and not on others",
                "the same names on all workers, before the first step",
            )
        for name, thing in self._objects.items():
            load_into(name, thing, state[name])

    def replicas(self) -> dict[str, Any]:
        """Return what is equal on all members: parameters, and optimizer states."""
        return {
            name: dict(thing.named_parameters())
            if isinstance(thing, torch.nn.Module)
            else thing.state_dict()
            for name, thing in self._objects.items()
            if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
        }

    def load_replicas(self, state: Mapping[str, Any]) -> None:
        """Load another member's `replicas()`."""
        for name, held in state.items():
            thing = self._objects[name]
            if isinstance(thing, torch.nn.Module):
                with torch.no_grad():
                    for each, parameter in thing.named_parameters():
                        parameter.copy_(held[each])
            else:
                load_exactly(thing, held)


def has_state(thing: Any) -> bool:
    """Whether an object's state is saved; otherwise it is a plain value."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return isinstance(thing, torch.Generator) or all(map(callable, methods))


def states_of(thing: Any) -> Callable[[], Any]:
    """Return a function that returns the state of a bare object."""
    if isinstance(thing, torch.Generator):
        return lambda: {"state": thing.get_state()}
    own = getattr(type(thing), "state_dict", None)
    if own is torch.nn.Module.state_dict:
        return ModuleState(thing)
    if own is torch.optim.Optimizer.state_dict:
        return OptimizerState(thing)
    state: Callable[[], Any] = thing.state_dict
    return state


def load_into(name: str, thing: Any, state: Any) -> None:
    """Load a state into a bare object; its exception gets a note with the name."""
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(state["state"])
        elif isinstance(thing, torch.optim.Optimizer):
            load_exactly(thing, state)
        else:
            thing.load_state_dict(state)
    except Exception as error:
        error.add_note(
            f"elastane: {name!r} does not take the state that was saved as {name!r}: build it as it"
            " was then, or take that state apart: elastane.load_checkpoint(where).state"
        )
        raise


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state bit for bit; the tensors become the optimizer's own.

    torch casts the state of a parameter to the parameter's dtype (2.13): float32 moments of
    bfloat16 weights would lose half of their bits.
    """
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = value


def bare(thing: Any) -> Any:
    """Unwrap DDP, torch.compile and Accelerate's optimizer, whose state is the same."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # Loaded if something was compiled.
    while True:
        if isinstance(thing, _WRAPPERS):
            thing = thing.module
        elif dynamo is not None and isinstance(thing, dynamo.OptimizedModule):
            thing = thing._orig_mod
        elif _is_delegate(thing):
            thing = thing.optimizer
        else:
            return thing


def _is_delegate(thing: Any) -> bool:
    """Whether an optimizer only delegates to another one, as Accelerate's does."""
    is_one = isinstance(thing, torch.optim.Optimizer)
    inner = vars(thing).get("optimizer") if is_one else None
    has_hooks = is_one and "_optimizer_step_pre_hooks" in vars(thing)
    return not has_hooks and isinstance(inner, torch.optim.Optimizer)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded; without an import of its own, which is heavy."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _refused(what: str, expected: str) -> JobError:
    return JobError(what, expected=expected, next_step=_NAME_IT, slug="job-track")


class ModuleState:
    """The state dict of a module, with its parameters: new tensors would take 4 times as long."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._state: dict[str, Any] | None = None
        self._modules: list[Module] = []
        # The mappings of all modules: six of each module.
        self._own: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        self._sets: list[set[str]] = []
        # Their contents.
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._unsaved: list[set[str]] = []

    def __call__(self) -> dict[str, Any]:
        """Return the state dict."""
        if self._state is None or not self._is_same():
            self._state = None
            state = self._module.state_dict(keep_vars=True)
            self._record()
            if _are_same(self._saved(), state.values()):
                self._state = state
            return state
        return self._state

    def _record(self) -> None:
        self._modules = [*self._module.modules()]
        self._own = [*chain.from_iterable(map(_OWN, self._modules))]
        self._dicts = [each for n in range(3) for each in self._own[n::6]]
        self._sets = self._own[3::6]
        self._hooks = [each for n in (4, 5) for each in self._own[n::6]]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(_VALUES, self._dicts))]
        self._unsaved = [{*names} for names in self._sets]

    def _is_same(self) -> bool:
        return (
            _are_same(chain.from_iterable(map(_OWN, self._modules)), self._own)
            and _are_same(chain.from_iterable(map(_VALUES, self._dicts)), self._values)
            and [*chain.from_iterable(self._dicts)] == self._keys
            and self._sets == self._unsaved
            and not any(self._hooks)
        )

    def _saved(self) -> Iterable[Any]:
        """Yield a standard state dict's contents; for other modules something that cannot match."""
        for module in self._modules:
            kind = type(module)
            if _METHODS(kind) != _METHODS(Module) or any(_OWN(module)[4:]):
                yield module
            yield from filter(_is_there, module._parameters.values())
            for name, buffer in module._buffers.items():
                if name not in module._non_persistent_buffers_set and buffer is not None:
                    yield buffer


class OptimizerState:
    """The state dict of an optimizer, with the states of its parameters, as torch returns it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._packed: dict[Any, Any] | None = None
        self._states: list[Any] = []
        self._parameters: list[list[Any]] = []
        self._numbers: list[list[int]] = []

    def __call__(self) -> dict[str, Any]:
        """Return the state dict."""
        if self._packed is not None and self._is_same():
            return {"state": self._packed, "param_groups": self._groups()}
        state = self._optimizer.state_dict()
        self._packed = None
        if not any(_OPTIMIZER_HOOKS(self._optimizer)) and [*state] == ["state", "param_groups"]:
            groups = self._optimizer.param_groups
            self._states = [*chain(self._optimizer.state, self._optimizer.state.values())]
            self._parameters = [[*group["params"]] for group in groups]
            self._numbers = [group["params"] for group in state["param_groups"]]
            own = [*self._optimizer.state.values()]
            if _are_same(state["state"].values(), own) and _are_alike(
                self._groups(), state["param_groups"]
            ):
                self._packed = state["state"]
        return state

    def _is_same(self) -> bool:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        return (
            _are_same(chain(optimizer.state, optimizer.state.values()), self._states)
            and len(groups) == len(self._parameters)
            and all(
                _are_same(group["params"], own)
                for group, own in zip(groups, self._parameters, strict=True)
            )
            and not any(_OPTIMIZER_HOOKS(optimizer))
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups with their current options, and their parameters by number."""
        return [
            {**{key: each for key, each in group.items() if key != "params"}, "params": numbers}
            for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=True)
        ]


def _are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether both are the same objects in the same order."""
    found, known = [*one], [*other]
    return len(found) == len(known) and all(map(is_, found, known))


def _are_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether the mappings have the same keys in the same order, with the same objects."""
    return len(one) == len(other) and all(
        [*own] == [*his] and _are_same(own.values(), his.values())
        for own, his in zip(one, other, strict=True)
    )


def _is_there(value: Any) -> bool:
    return value is not None


class LastState:
    """The state of one random stream, which is made again only where its memory has changed.

    NumPy takes 31 us to make its state, Python 8 us, and both three times as long with cold caches.
    Comparing the memory takes 1 us (AMD EPYC, 2026-11-24).
    """

    def __init__(self) -> None:
        self._last: tuple[object, Any] = (None, None)

    def read(self, memory: Callable[[], object], state: Callable[[], Any]) -> Any:
        """Return `state()`; `memory` returns all memory that determines it, None if unknown."""
        before = memory()
        kept, value = self._last
        if before is None or before != kept:
            value = state()
            # Another thread may have drawn a number meanwhile.
            self._last = (before if before == memory() else None, value)
        return value


_of_python, _of_numpy = LastState(), LastState()
# Of the generator that numpy.random uses: 624 words of 32 bits, and a place in them.
_MT19937_BYTES = 625 * 4


def _fields(thing: object, kind: type) -> bytes:
    """Return the memory of an object that `kind` has laid out in C: all but the object's header."""
    head = object.__basicsize__
    return ctypes.string_at(id(thing) + head, kind.__basicsize__ - head)


@functools.cache
def _python_is_known() -> bool:
    """Return whether the memory of a generator is all of its state, as in CPython 3.11 to 3.14.

    A later version may keep the words elsewhere. Then two generators of one seed would differ.
    """
    if sys.implementation.name != "cpython":
        return False
    one, same, other = (_fields(random.Random(seed), _random.Random) for seed in (1, 1, 2))
    drawn = random.Random(1)
    drawn.random()
    return one == same and one != other and one != _fields(drawn, _random.Random)


@functools.cache
def _numpy_is_known() -> bool:
    """Return whether the memory beside NumPy's words tells of a number that was drawn ahead."""
    if sys.implementation.name != "cpython":
        return False
    kind = sys.modules["numpy"].random.RandomState
    drawn = kind(1)
    before = _fields(drawn, kind)
    drawn.standard_normal()
    return before != _fields(drawn, kind)


def _python_memory() -> object:
    owner = getattr(random.getstate, "__self__", None)
    if type(owner) is not random.Random or not _python_is_known():
        return None
    return id(owner), vars(owner)["gauss_next"], _fields(owner, _random.Random)


def _numpy_memory() -> object:
    """The words of the generator, and the object beside it, which keeps one number drawn ahead."""
    source = sys.modules["numpy"].random
    owner = getattr(source.get_state, "__self__", None)
    generator: Any = getattr(source, "get_bit_generator", lambda: None)()
    is_known = type(owner) is source.RandomState and type(generator) is source.MT19937
    if not is_known or not _numpy_is_known():
        return None
    words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return id(owner), _fields(owner, source.RandomState), words


class RandomStreams:
    """The random streams of this process, as they were at construction."""

    def __init__(self) -> None:
        self._python = _of_python.read(_python_memory, random.getstate)
        self._torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None
        if numpy is not None:
            self._numpy = _of_numpy.read(_numpy_memory, numpy.random.get_state)
        # Reading its state would initialize the GPU.
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state() if used else None

    def packed(self) -> bytes:
        """Serialize the streams, for `restore_streams`."""
        version, words, gauss = self._python
        numpy = None
        if self._numpy is not None:
            kind, keys, at, has_gauss, cached = self._numpy
            numpy = [kind, keys.tobytes(), int(at), int(has_gauss), float(cached)]
        cuda = None if self._cuda is None else self._cuda.numpy().tobytes()
        python = [version, list(words), gauss]
        return msgspec.msgpack.encode([python, self._torch.numpy().tobytes(), numpy, cuda])

    def restore(self) -> None:
        """Reset this process's streams to this point."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def restore_streams(packed: bytes) -> None:
    """Reset this process's streams to `packed()`; raises ValueError for anything else."""
    python, torch_state, numpy_state, cuda = msgspec.msgpack.decode(packed, type=_Streams)
    random.setstate((python[0], tuple(python[1]), python[2]))
    torch.set_rng_state(_bytes(torch_state))
    if numpy_state is not None and "numpy" in sys.modules:
        kind, keys, at, has_gauss, cached = numpy_state
        numpy = sys.modules["numpy"]
        words = numpy.frombuffer(keys, dtype=numpy.uint32)
        numpy.random.set_state((kind, words, at, has_gauss, cached))
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(cuda))


_Streams = tuple[
    tuple[int, list[int], float | None],
    bytes,
    tuple[str, bytes, int, int, float] | None,
    bytes | None,
]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
