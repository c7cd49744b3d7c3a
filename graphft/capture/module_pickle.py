"""The user's module and loss as bytes in a program, for op `eager_step`: pickled with cloudpickle.

This is the one place that unpickles, and what it reads lies in the job's folder: code of the user who started the job.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import pickle
import pickletools
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import torch
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS, _code_reduce
from torch import Tensor, nn

from graphft.capture.module_step import tensors_of
from graphft.errors import UsageError, describe

_SITES = (*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), *torch.__path__)
_INSTALLED = {*map(Path, _SITES), Path(__file__).parents[1]}
"""Folders whose modules are found in each process as they are here."""


@dataclass(frozen=True)
class Packed:
    """Holds what a program's op runs, and the names of its operands and results."""

    model: nn.Module
    call: Callable[..., Any]
    training: bool
    inputs: tuple[str, ...]
    trained: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    draws: bool = False
    """True if the training step draws from Python's or NumPy's generator."""
    source: str = ""
    """A digest of the code, which the op holds as well."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.trained, *self.fixed, *self.written)


class _Pickler(cloudpickle.Pickler):
    """Leaves the values of the module's parameters and buffers out.

    A class of the script gets no id that cloudpickle would know it by: unpickled in this very process, it would change
    the class that is here.
    """

    def __init__(self, file: io.BytesIO, left_out: set[int], digest: bool) -> None:
        super().__init__(file)
        self._left_out, self._digest = left_out, digest

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in self._left_out:
            hooks = (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))
            kept = dict(vars(value)), *(tuple((found or {}).values()) for found in hooks)
            like = torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
            return _empty, (like, value.device, type(value) is nn.Parameter, *kept)
        if isinstance(value, ModuleType) and value.__name__ in ("torch.ops", "torch.classes"):
            return importlib.import_module, (value.__name__,)  # of a class that cloudpickle takes for no module
        if isinstance(value, CodeType):
            if self._digest:  # without its lines: a comment moves them
                names = (value.co_names, value.co_varnames, value.co_freevars, value.co_name)
                return tuple, ((value.co_code, value.co_consts, *names),)
            make, parts = _code_reduce(value)  # with its file, for the errors that name a line
            return make, tuple(value.co_filename if part == "<dynamic-code>" else part for part in parts)
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple):  # a class of the script, by value
            known = _DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value)
            made = tuple(None if argument is known else argument for argument in reduced[1])
            return reduced[0], made, *reduced[2:]
        return reduced


def _empty(like: Tensor, device: torch.device, parameter: bool, attributes: Any, hooks: Any, after: Any) -> Tensor:
    made = torch.zeros_like(like, device=device, requires_grad=False)
    made = nn.Parameter(made, like.requires_grad) if parameter else made.requires_grad_(like.requires_grad)
    vars(made).update(attributes)
    for hook in hooks:
        made.register_hook(hook)
    for hook in after:
        made.register_post_accumulate_grad_hook(hook)
    return made


def pack(packed: Packed) -> Tensor:
    """uint8[bytes]. Raises UsageError[capture] for what cannot be pickled."""
    return torch.frombuffer(bytearray(_pickled(packed, digest=False)), dtype=torch.uint8)


def copy_of(packed: Packed) -> Packed:
    """Returns a copy that shares no object with the module of the script."""
    copied = pickle.loads(_pickled(packed, digest=False))
    assert isinstance(copied, Packed)
    return copied


def _pickled(packed: Packed, digest: bool) -> bytes:
    """Pickles it, code of the user's own modules by value, with the globals that it uses as they are now."""
    own = {m.__name__: m for m in [*sys.modules.values()] if _is_of_user(m) and m.__name__ in sys.modules}
    known = set(cloudpickle.list_registry_pickle_by_value())
    for module in own.values():
        cloudpickle.register_pickle_by_value(module)
    file = io.BytesIO()
    try:
        _Pickler(file, {id(t) for t in tensors_of(packed.model).values()}, digest).dump(packed)
    except Exception as error:
        raise UsageError(
            f"the model or loss_fn cannot be pickled, as capture=False needs it: {describe(error)}",
            rule="capture",
            help="keep open files, locks, generators, torch.jit and parametrizations out of the module and of loss_fn",
        ) from error
    finally:
        for name in own.keys() - known:
            cloudpickle.unregister_pickle_by_value(own[name])
    return file.getvalue()


def _is_of_user(module: Any) -> bool:
    """True for a module that neither Python, nor an installed package, nor graphft has brought."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not isinstance(module, ModuleType) or module.__name__.startswith("graphft."):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED) and module.__name__ != "__main__"


def unpack(code: Tensor, source: str) -> Packed:
    """Returns what `pack` packed. Raises UsageError[capture] if it cannot be loaded, or is of another digest."""
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


def source_digest(packed: Packed) -> str:
    """A digest of the code, and of all that it refers to but the values of parameters and buffers.

    The same in each process, as the pickled bytes are not: sets are sorted, lines of the source left out.
    """
    found: list[Any] = []
    marks: list[int] = []
    for opcode, argument, _ in pickletools.genops(_pickled(packed, digest=True)):
        if opcode.name == "MARK":
            marks.append(len(found))
        elif opcode.stack_before and pickletools.markobject in opcode.stack_before:
            begin = marks.pop()
            if opcode.name in ("ADDITEMS", "FROZENSET"):
                found[begin:] = sorted(found[begin:], key=repr)
        if opcode.name not in ("PROTO", "FRAME", "MEMOIZE", "STOP"):
            found.append((opcode.name, None if "GET" in opcode.name else argument))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
