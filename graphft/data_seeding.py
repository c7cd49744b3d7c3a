"""The global random generators, seeded for a moment: what is made of their numbers is the same wherever it is made."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np

CONSTRUCTION_SEED = 0
"""Of the numbers that a Dataset draws while it is constructed, or its module loaded."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's, NumPy's and Python's global generators; afterwards they go on where they were."""
    import torch

    python, numpy_ = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_)


@contextlib.contextmanager
def seeded_by_torch() -> Iterator[None]:
    """Seeds NumPy's and Python's generators from the state of torch's; afterwards they go on where they were.

    So what a step draws from any of the three follows from torch's alone, which moves on if one of the others was used.
    """
    import torch

    python, numpy_ = random.getstate(), np.random.get_state()
    seed = int.from_bytes(hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest(), "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    before = python_states()
    try:
        yield
        if python_states() != before:
            torch.rand(())
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)


def states() -> tuple[object, ...]:
    """What the generators are at, comparable."""
    import torch

    return torch.get_rng_state().numpy().tobytes(), *python_states()


def python_states() -> tuple[object, ...]:
    """The same of Python's and NumPy's alone."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
