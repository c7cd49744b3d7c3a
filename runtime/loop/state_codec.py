"""A `state_dict()` as tensors by name, and JSON that says how they are put together. No pickle.

What JSON has no word for is an object with one key that begins with "$".
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphft.errors import GraphftError

PLAIN = (str, bool, int, type(None))
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class _Kind(NamedTuple):
    """`parts` gives what an Encoder takes in place of a value, and `make` the value of it."""

    name: str
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


_KINDS: dict[type, _Kind] = {
    bytes: _Kind("$bytes", lambda v: base64.b64encode(v).decode(), lambda text: base64.b64decode(text, validate=True)),
    torch.dtype: _Kind("$dtype", lambda v: str(v).removeprefix("torch."), _DTYPES.__getitem__),
    torch.device: _Kind("$device", str, torch.device),
    tuple: _Kind("$tuple", list, tuple),
    torch.Size: _Kind("$size", list, torch.Size),
    set: _Kind("$set", lambda v: sorted(v, key=lambda each: (type(each).__name__, repr(each))), set),
}
_MAPPINGS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    dict: ("$items", dict),
    OrderedDict: ("$ordered", OrderedDict),
    Counter: ("$counter", lambda pairs: Counter(dict(pairs))),
}
_MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.name: kind.make for kind in _KINDS.values()},
    **dict(_MAPPINGS.values()),
    "$float": float,
    "$scalar": lambda parts: np.dtype(parts[0]).type(parts[1]),
    "$array": lambda tensor: tensor.numpy(),
    "$module": lambda parts: _module_state(*parts),
}


def _module_state(pairs: Any, versions: Any) -> OrderedDict[str, Any]:
    """Returns a module's state_dict, with the versions of the classes that wrote it: the module loads by these."""
    state: OrderedDict[str, Any] = OrderedDict(pairs)
    state._metadata = versions  # type: ignore[attr-defined]
    return state


class Encoder:
    """Collects the tensors of what it encodes. One that is met twice (tied weights) is collected once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Returns the JSON of a value. `where`: what it is, for names and errors: "optimizer.state.0".

        A parameter becomes the tensor that it holds. Raises GraphftError[state] for what is neither a plain value, nor
        a tensor, nor a collection of them.
        """
        try:
            return self._encode(value, where)
        except RecursionError as error:
            raise _refused(where, "it contains itself, or is nested too deeply") from error

    def _encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return [self._encode(v, f"{where}.{i}") for i, v in enumerate(value)]
        if kind in (Tensor, torch.nn.Parameter):
            return {"$tensor": self._tensor(value.detach(), where)}
        if kind in _KINDS:
            return {_KINDS[kind].name: self._encode(_KINDS[kind].parts(value), where)}
        if kind in _MAPPINGS:
            return self._mapping(value, where)
        if kind is np.ndarray and _has_tensors_dtype(value) and value.dtype.isnative:
            return {"$array": {"$tensor": self._tensor(torch.from_numpy(np.array(value)), where)}}
        if isinstance(value, np.generic) and _has_tensors_dtype(value):
            return {"$scalar": [value.dtype.str, self._encode(value.item(), where)]}
        of = f" of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
        raise _refused(where, f"it is a {kind.__module__}.{kind.__qualname__}{of}")

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self._encode(v, f"{where}.{k}") for k, v in value.items()}
        pairs = [[self._encode(k, where), self._encode(v, f"{where}.{k}")] for k, v in value.items()]
        if versions := getattr(value, "_metadata", None):
            return {"$module": [pairs, self._encode(dict(versions), where)]}
        return {_MAPPINGS[type(value)][0]: pairs}

    def _tensor(self, value: Tensor, where: str) -> str:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise _refused(where, "it is no dense tensor with values")
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


def _refused(where: str, what: str) -> GraphftError:
    return GraphftError(
        f"{where} cannot be saved: {what}",
        rule="state",
        help="have state_dict() return dense tensors, arrays, numbers, text, bytes, and dicts (also Counter and "
        "OrderedDict), lists, tuples and sets of them; and load_state_dict() make the object again",
    )


def _has_tensors_dtype(value: Any) -> bool:
    return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what was encoded. Raises KeyError, TypeError or ValueError for what no Encoder wrote."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "$tensor":
            return tensors[inner]
        if kind.startswith("$"):
            return _MAKE[kind](decode(inner, tensors))
    return {k: decode(v, tensors) for k, v in value.items()}
