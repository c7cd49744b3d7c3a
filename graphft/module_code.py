"""The user's module and loss as bytes in a program, for op `eager_step`: pickled with cloudpickle.

This is the one place that unpickles. What it reads lies in the job's folder, as the script of its Dataset does: code of
the user who started the job. Nothing that comes from the network, and no checkpoint, is read here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS
from torch import Tensor, nn
from torch.nn.utils import parametrize

from graphft.errors import UsageError, describe
from graphft.module_step import tensors_of


@dataclass(frozen=True)
class Packed:
    """What a program's op runs, and the names of its operands: inputs, then the module's tensors by their use."""

    model: nn.Module
    call: Callable[..., Any]
    training: bool
    inputs: tuple[str, ...]
    trained: tuple[str, ...]
    fixed: tuple[str, ...]
    written: tuple[str, ...]
    source: str
    """A digest of the code, which the op holds as well."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.trained, *self.fixed, *self.written)


class _Pickler(cloudpickle.Pickler):
    """Leaves the values of the module's parameters and buffers out, and takes parts of torch.jit along.

    A class of the script gets no id that cloudpickle would know it by: unpickled in this very process, it would change
    the class that is here.
    """

    def __init__(self, file: io.BytesIO, left_out: set[int]) -> None:
        super().__init__(file)
        self._left_out = left_out

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in self._left_out:
            return _empty, (
                torch.empty_like(value, device="meta"),
                value.device,
                type(value) is nn.Parameter,
                value.requires_grad,
            )
        if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            buffer = io.BytesIO()
            torch.jit.save(value, buffer)
            return _scripted, (buffer.getvalue(),)
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            return _parametrized, (type(value).__mro__[1], dict(vars(value)))
        if isinstance(value, ModuleType) and value.__name__ in ("torch.ops", "torch.classes"):
            return importlib.import_module, (value.__name__,)  # of a class that cloudpickle takes for no module
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple):  # a class of the script, by value
            known = _DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value)
            made = tuple(None if argument is known else argument for argument in reduced[1])
            return reduced[0], made, *reduced[2:]
        return reduced


def _empty(like: Tensor, device: torch.device, parameter: bool, trained: bool) -> Tensor:
    made = torch.zeros_like(like, device=device)
    return nn.Parameter(made, trained) if parameter else made.requires_grad_(trained)


def _parametrized(original: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    """A module whose class torch.nn.utils.parametrize derived from `original`, which torch itself does not pickle."""
    made = original.__new__(original)
    vars(made).update(attributes)
    parametrize._inject_new_class(made)
    for name in made.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(made, name)
    return made


def _scripted(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))


def pack(packed: Packed) -> Tensor:
    """uint8[bytes]. Raises UsageError[capture] for what cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, {id(t) for t in tensors_of(packed.model).values()}).dump(packed)
    except Exception as error:
        raise UsageError(
            f"the model or loss_fn cannot be pickled, as capture=False needs it: {describe(error)}",
            rule="capture",
            help="keep open files, locks, generators and connections out of the module and of what loss_fn refers to",
        ) from error
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(code: Tensor, source: str) -> Packed:
    """Raises UsageError[capture] where a module that it imports is not there, and if its code is not of this digest."""
    try:
        packed = pickle.loads(code.cpu().numpy().tobytes())
    except Exception as error:
        raise UsageError(
            f"the pickled model cannot be loaded here: {describe(error)}",
            rule="capture",
            help="the modules that define it must be importable where a role runs (PYTHONPATH), in the same versions",
        ) from error
    assert isinstance(packed, Packed)
    if packed.source != source:
        raise UsageError(
            f"the pickled model is of code {packed.source}, expected {source}",
            rule="capture",
            help="program and values belong together: save the job again",
        )
    return packed


def source_digest(model: nn.Module, call: Callable[..., Any]) -> str:
    """A digest of the code: the module's structure, and the sources of its classes and of the loss outside of torch.

    The same in each process, as the pickled bytes are not: by it, a script that is run again finds its job.
    """
    classes = {c for m in model.modules() for c in type(m).__mro__ if not c.__module__.startswith("torch.")}
    parts = [repr(model), *sorted(map(_source, classes)), _source(call), _constants(call)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # built in, a partial, an object that is called, typed at a prompt
        return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def _constants(code: Any) -> str:
    """Numbers and texts that a function refers to outside of itself."""
    try:
        variables = inspect.getclosurevars(code)
    except TypeError:
        return ""
    found = {**variables.globals, **variables.nonlocals}
    return repr(sorted((n, v) for n, v in found.items() if isinstance(v, (bool, int, float, str))))
