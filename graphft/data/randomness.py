"""Random generators while data is made and read: the global ones, and those that a dataset keeps in its attributes, in
those of what it wraps, or in its module. One that is kept elsewhere (in a closure, say) is not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

CONSTRUCTION_SEED = 0
"""Seeds the numbers that a Dataset draws while it is constructed, or its module loaded."""
DEPTH, LONG = 8, 1000
"""Own generators are looked for so deep, and in containers of up to so many items."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's, NumPy's and Python's global generators; afterwards they go on where they were."""
    import torch

    with torch.random.fork_rng(devices=[]), _restored():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


@contextlib.contextmanager
def seeded_by_torch() -> Iterator[None]:
    """Seeds NumPy's and Python's generators from the state of torch's, which moves on if one of them was used;
    afterwards they go on where they were."""
    import torch

    with _restored():
        state = torch.get_rng_state().numpy().tobytes()
        seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        before = python_states()
        yield
        if python_states() != before:
            torch.rand(())


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    python, numpy_ = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)


def states() -> tuple[object, ...]:
    """Returns the states of the three global generators, comparable."""
    import torch

    return torch.get_rng_state().numpy().tobytes(), *python_states()


def python_states() -> tuple[object, ...]:
    """Returns the states of Python's and NumPy's global generators, comparable."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def own_generators(dataset: Any) -> list[Any]:
    """Returns the generators of torch, NumPy and Python that `dataset` keeps, in the order in which they are found: its
    module's last, as `__main__` may have more of them than the module that it is loaded as elsewhere."""
    module = sys.modules.get(type(dataset).__module__)
    candidates = [*vars(module).values()] if module is not None else []
    return [value for value in (*_inside(dataset, DEPTH, set()), *candidates) if is_own(value)]


@contextlib.contextmanager
def kept(generators: Iterable[Any]) -> Iterator[None]:
    """Lets the generators go on where they were, afterwards."""
    saved = [(own, own.__reduce__()[2]) for own in (getattr(g, "bit_generator", g) for g in generators)]
    try:
        yield
    finally:
        for own, state in saved:
            own.__setstate__(state)


def seed_generators(generators: Iterable[Any], seed: int) -> None:
    """Seeds each of `own_generators` with a number of its own, made from `seed`."""
    for number, generator in enumerate(generators):
        digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "little") >> 1  # as many bits as each of them takes
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        elif hasattr(generator, "manual_seed"):
            generator.manual_seed(own)
        else:
            generator.seed(own)


def is_own(value: Any) -> bool:
    """True for a generator that can be seeded, but the global ones."""
    import torch

    if isinstance(value, torch.Generator):  # several Python objects may stand for the global one
        return bool(value._cdata != torch.default_generator._cdata)  # type: ignore[attr-defined]
    if isinstance(value, np.random.RandomState):
        return value is not np.random.mtrand._rand
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom) and value is not random._inst
    return isinstance(value, np.random.Generator)


def _inside(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yields `value`, its attributes or items, and what is inside of these."""
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    yield value
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping | list | tuple):
        parts = [*(value.values() if isinstance(value, Mapping) else value)] if len(value) <= LONG else ()
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        parts = [*vars(value).values()]
    for part in parts:
        yield from _inside(part, depth - 1, seen)
