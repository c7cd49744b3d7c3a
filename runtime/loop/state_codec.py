"""A `state_dict()` as tensors by name, and JSON that says how they are put together. No pickle.

What JSON has no word for is an object with one key that begins with "$".
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.errors import GraphftError

PLAIN = (str, bool, type(None))
LARGEST = 2**63
"""JSON's readers agree on whole numbers below it."""
MAPPINGS: dict[type, str] = {dict: "$items", OrderedDict: "$ordered", Counter: "$counter", defaultdict: "$defaultdict"}
COLLECTIONS: dict[type, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset"}
FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""A defaultdict may have any of these as its default_factory."""
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Encoder:
    """Collects the tensors of what it encodes. One that is met twice (tied weights) is collected once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str) -> Any:
        """The JSON of a value. `where`: what it is, for names and errors: "optimizer.state.0".

        Raises GraphftError[state] for what is neither a plain value, nor a tensor, nor a collection of them.
        """
        if type(value) in PLAIN:
            return value
        if type(value) is int:
            return value if abs(value) < LARGEST else {"$int": hex(value)}
        if type(value) is Tensor and not value.requires_grad:
            return {"$tensor": self._tensor(value, where)}
        if type(value) in (Tensor, torch.nn.Parameter):
            kept = type(value) is not Tensor, value.requires_grad
            return {"$parameter": [self._tensor(value.detach(), where), *kept]}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) in MAPPINGS:
            return self._mapping(value, where)
        if type(value) is list:
            return [self.encode(v, f"{where}.{i}") for i, v in enumerate(value)]
        return self._other(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, f"{where}.{k}") for k, v in value.items()}
        pairs = [[self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()]
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and factory not in FACTORIES.values():
                raise _refused(f"{where} cannot be saved: its default_factory is {factory!r}")
            return {"$defaultdict": [getattr(factory, "__name__", None), pairs]}
        if versions := getattr(value, "_metadata", None):  # of the classes of a module, which load by them
            return {"$module": [pairs, self.encode(dict(versions), f"{where}._metadata")]}
        return {MAPPINGS[type(value)]: pairs}

    def _other(self, value: Any, where: str) -> Any:
        if type(value) is np.ndarray and _has_tensors_dtype(value) and value.dtype.isnative:
            return {"$array": self._tensor(torch.from_numpy(np.array(value)), where)}
        if isinstance(value, np.generic) and _has_tensors_dtype(value):
            return {"$scalar": [value.dtype.str, self.encode(value.item(), where)]}
        if type(value) in (bytes, bytearray):
            return {f"${type(value).__name__}": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) is complex:
            return {"$complex": [self.encode(value.real, where), self.encode(value.imag, where)]}
        if type(value) in COLLECTIONS:
            unordered = isinstance(value, (set, frozenset))
            items = sorted(value, key=lambda v: (type(v).__name__, repr(v))) if unordered else value
            return {COLLECTIONS[type(value)]: self.encode(list(items), where)}
        if type(value) is deque:
            return {"$deque": [self.encode(list(value), where), value.maxlen]}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        of = f" of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
        raise _refused(f"{where} cannot be saved: it is a {kind}{of}")

    def _tensor(self, value: Tensor, where: str) -> str:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            odd = "nested" if value.is_nested else "quantized" if value.is_quantized else "on device meta"
            remedy = (
                "to_padded_tensor(0.0)" if value.is_nested else "dequantize()" if value.is_quantized else "to_dense()"
            )
            raise GraphftError(
                f"{where} cannot be saved: it is {odd if value.layout == torch.strided else value.layout}",
                rule="state",
                help="give it values first" if value.is_meta else f"save a dense copy: tensor.{remedy}",
            )
        value = value.resolve_conj().resolve_neg()  # two views of one memory may hold different values
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and memory in self._known:
            return self._known[memory]
        where = where.encode("utf-8", "backslashreplace").decode()
        name, number = where, 1
        while name in self.tensors:
            number += 1
            name = f"{where}#{number}"
        self._known[memory] = name
        self.tensors[name] = value
        return name


def _refused(what: str) -> GraphftError:
    return GraphftError(
        what,
        rule="state",
        help="a state_dict may hold tensors, arrays, numbers, text, bytes, and dicts (also Counter, OrderedDict, and "
        "defaultdict of a builtin type), lists, tuples, sets and deques of them; have state_dict() return such values, "
        "of an Enum its value, and load_state_dict() make the object again",
    )


def _has_tensors_dtype(value: Any) -> bool:
    """np.longdouble has no tensors."""
    return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was encoded. Raises KeyError, TypeError or ValueError for what no Encoder wrote."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind.startswith("$"):
            return _decode_kind(kind, inner, tensors)
    return {k: decode(v, tensors) for k, v in value.items()}


def _decode_kind(kind: str, inner: Any, tensors: Mapping[str, Tensor]) -> Any:
    def all_of() -> Iterator[Any]:
        return (decode(v, tensors) for v in inner)

    if kind == "$tensor":
        return tensors[inner]
    if kind == "$parameter":
        name, parameter, requires_grad = inner
        tensor = tensors[name].detach().requires_grad_(requires_grad)
        return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor
    if kind == "$array":
        return tensors[inner].numpy()
    if kind == "$scalar":
        return np.dtype(inner[0]).type(decode(inner[1], tensors))
    if kind == "$float":
        return float(inner)
    if kind == "$complex":
        return complex(*all_of())
    if kind == "$int":
        return int(inner, 16)
    if kind == "$bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "$bytearray":
        return bytearray(base64.b64decode(inner, validate=True))
    if kind == "$dtype":
        return _DTYPES[inner]
    if kind == "$device":
        return torch.device(inner)
    if kind == "$counter":
        return Counter(dict(all_of()))
    if kind == "$defaultdict":
        name, pairs = inner
        return defaultdict(FACTORIES[name] if name is not None else None, decode(pairs, tensors))
    if kind == "$deque":
        items, maxlen = inner
        return deque(decode(items, tensors), maxlen)
    if kind == "$module":
        pairs, metadata = inner
        module: Any = OrderedDict(decode(pairs, tensors))
        module._metadata = OrderedDict(decode(metadata, tensors))
        return module
    made: dict[str, Callable[[Iterator[Any]], Any]] = {name: made for made, name in {**MAPPINGS, **COLLECTIONS}.items()}
    return made[kind](all_of())
