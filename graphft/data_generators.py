"""The random generators that a dataset keeps: in its attributes, in those of what it wraps, and in its module.

Such a generator moves on with each item, so an item that draws from it depends on what was read before. Therefore they
are seeded before every batch, as the global ones are for a dataset that draws from those. One that is kept elsewhere
(in a closure, say) is not found; what it draws is refused where it is seen, when the data is described.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

DEPTH, LONG, MOST = 8, 1000, 100_000
"""How deep generators are looked for; in containers of how many items; among how many values."""


def own_generators(dataset: Any) -> list[Any]:
    """The generators of torch, NumPy and Python that `dataset` keeps, each once, in the order in which they are found.

    The global ones are not among them, nor random.SystemRandom, which cannot be seeded.
    """
    module = sys.modules.get(type(dataset).__module__)
    candidates = [*vars(module).values()] if module is not None else []
    candidates += itertools.islice(_inside(dataset, DEPTH, set()), MOST)
    return list({_identity(value): value for value in reversed(candidates) if _is_own(value)}.values())[::-1]


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


def _is_own(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Generator):
        return _identity(value) != _identity(torch.default_generator)
    if isinstance(value, np.random.RandomState):
        return _identity(value) != _identity(np.random.mtrand._rand)
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom) and value is not random._inst
    return isinstance(value, np.random.Generator)


def _identity(generator: Any) -> int:
    """Of one generator of torch there may be several Python objects, and of one source of bits several of NumPy."""
    source = getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))
    return int(getattr(generator, "_cdata", 0)) or id(source)


def _inside(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """What `value` holds, itself among it: attributes, and items of containers."""
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    yield value
    for part in _parts(value):
        yield from _inside(part, depth - 1, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (Mapping, list, tuple, set)):
        whole = value.values() if isinstance(value, Mapping) else value
        return [*whole] if len(value) <= LONG else []
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values()]
