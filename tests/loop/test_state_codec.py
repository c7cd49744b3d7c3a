"""States come back as they were: values, types, and shared tensors; without pickle."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphft.errors import GraphftError
from graphft.runtime.loop.state_codec import Encoder, decode


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    return decode(json.loads(text), encoder.tensors)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict([("b", 1), ("a", 2)]),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        {"$tensor": "no tensor, but a key that looks like one"},
        {1, 2, 3},
        np.float32(0.1),
        np.int64(-7),
        {"": {"": [math.inf, -math.inf]}},
        10**40,
        Counter({3: 2, "a": 0, (1, None): -1}),
        {(1,): {torch.float16: torch.device("cpu")}, None: {2.5: False}},
        {"nested": [Counter(a=1), ([Counter()],)]},
        np.bool_(True),
        np.float16(0.5),
    ],
)
def test_types_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert (found, type(found), repr(found)) == (value, type(value), repr(value))
    assert not isinstance(value, OrderedDict) or list(found) == list(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2]
)
def test_tensors_come_back(dtype: torch.dtype) -> None:
    for value in (torch.arange(6.0).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 3).to(dtype)):
        found = there_and_back({"x": [value]})["x"][0]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found.float(), value.float())


def test_arrays_come_back() -> None:
    for value in (np.arange(5, dtype=np.uint32), np.array([[True]]), np.array(3.5)):
        found = there_and_back(value)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert (found == value).all()


def test_a_tensor_that_is_there_twice_is_kept_once() -> None:
    tied = torch.ones(4)
    encoder = Encoder()
    encoder.encode({"a": tied, "b": tied, "c": tied[:2]}, "model")
    assert set(encoder.tensors) == {"model.a", "model.c"}


def test_names_that_meet_are_told_apart() -> None:
    one = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    found = there_and_back(one)
    assert [float(found["a"]["b"]), float(found["a.b"])] == [0.0, 1.0]


deep: Any = []
deep.append(deep)


class Color(enum.IntEnum):
    RED = 1


class Words(Counter[str]):
    """Not Counter itself."""


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"x": [lambda: 1]},
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
        np.ma.masked_array([1.0], [True]),
        np.longdouble(1),
        deep,
        np.array(["text"]),
        type,
        Color.RED,
        Words(),
        namedtuple("Pair", "a b")(1, 2),
        {Color.RED: 1},
    ],
)
def test_what_cannot_be_saved_is_named(value: Any) -> None:
    with pytest.raises(GraphftError, match=r"^error\[state\]: model(\.x[.0-9x]*)? cannot be saved"):
        Encoder().encode({"x": value}, "model")


def test_views_of_one_memory_that_are_conjugated_or_negated() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    encoder = Encoder()
    state = {"z": z, "conjugate": z.conj(), "imaginary": z.imag, "negated": z.conj().imag}
    found = decode(encoder.encode(state, "state"), encoder.tensors)
    assert all(torch.equal(found[n].resolve_neg(), value.resolve_conj().resolve_neg()) for n, value in state.items())
