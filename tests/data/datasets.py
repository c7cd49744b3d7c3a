"""Datasets that the tests describe by reference."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch


class Squares:
    """Record i is (i, i * i)."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i)]), i * i


ROW = torch.zeros(1)


class Given(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return ROW.clone(), i


class Ragged(Squares):
    """Record i has i + 1 numbers."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(i + 1), i


class Named(Squares):
    def __getitem__(self, i: int) -> Any:
        return {"y": i * i, "x": torch.tensor([float(i)]), "name": "unused"}


class Rare(Squares):
    """Record 7, which is not looked at when it is described, draws from the generator called `source`."""

    def __init__(self, source: str = "torch", n: int = 20) -> None:
        super().__init__(n)
        self.source = source

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        draws: dict[str, Callable[[], float]] = {
            "torch": lambda: torch.rand(1).item(),
            "numpy": lambda: float(np.random.rand()),
            "python": random.random,
            "swallowed": drawn_behind_a_handler,
        }
        if self.source == "lazy":
            return Lazy(i)  # type: ignore[return-value]
        return torch.tensor([i + draws[self.source]() if i == 7 else float(i)]), i


class Lazy(Mapping[str, Any]):
    """An item whose parts are made when they are asked for, which `default_collate` does."""

    def __init__(self, i: int) -> None:
        self.i = i

    def __getitem__(self, name: str) -> Any:
        return torch.tensor([self.i + (torch.rand(1).item() if self.i == 7 else 0.0)]) if name == "x" else self.i

    def __iter__(self) -> Iterator[str]:
        return iter(("x", "y"))

    def __len__(self) -> int:
        return 2


def drawn_behind_a_handler() -> float:
    try:
        return torch.rand(1).item()
    except Exception:
        return 0.5


class Shuffled(Squares):
    """Its construction draws from all three generators."""

    def __init__(self, n: int = 20) -> None:
        super().__init__(n)
        self.order = np.random.permutation(n) + random.random() + torch.rand(1).item()

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([self.order[i]], dtype=torch.float32), i


MODULES_OWN = np.random.default_rng(3)


class Wrapped:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __call__(self) -> float:
        return float(self.own.random())


class Keeping(Squares):
    """Record i is i and a draw from a generator that is kept; `rare`: record 7 only, which is not looked at."""

    def __init__(self, source: str, rare: bool) -> None:
        super().__init__(20)
        self.rare, self.torch = rare, torch.Generator().manual_seed(3)
        self.numpy, self.legacy, self.python = np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
        self.transforms = [{"wrapped": Wrapped()}]
        draws: dict[str, Callable[[], float]] = {
            "torch": lambda: torch.rand(1, generator=self.torch).item(),
            "numpy": lambda: float(self.numpy.random()),
            "legacy": lambda: float(self.legacy.rand()),
            "python": self.python.random,
            "wrapped": self.transforms[0]["wrapped"],
            "module": lambda: float(MODULES_OWN.random()),
        }
        self.draw = draws[source]

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        noise = self.draw() if i == 7 or not self.rare else 0.0
        return torch.tensor([i + noise], dtype=torch.float64), i


class Impure(Squares):
    """Items depend on something that nothing seeds."""

    reads = 0

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return torch.tensor([float(self.reads)]), i


class Lines(Squares):
    """Record i is the number in line i of a file; a line that holds none raises an exception. `read`: what was read.
    Those of `entropy` differ each time, those of `throttled` cannot be read at first."""

    read: ClassVar[list[int]] = []

    def __init__(
        self, path: str, noise: bool = False, entropy: Sequence[int] = (), throttled: Sequence[int] = ()
    ) -> None:
        self.lines, self.noise, self.entropy = Path(path).read_text().splitlines(), noise, entropy
        self.throttled = list(throttled)
        super().__init__(len(self.lines))

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(i)
        if i in self.throttled:
            self.throttled.remove(i)
            raise RuntimeError("too many requests")
        value = torch.full((200,), float(self.lines[i]))
        if i in self.entropy:
            value += random.SystemRandom().random()
        return (value + torch.rand(1) if self.noise else value), torch.zeros(1)


class Broken(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 13:
            raise ValueError("record 13 is damaged")
        return super().__getitem__(i)


class Exits(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 13:
            sys.exit(0)
        return super().__getitem__(i)


class Uneven(Squares):
    """Record 13 has another shape: it is not looked at when the dataset is described."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2 if i == 13 else 1), i


def squares(n: int) -> Squares:
    return Squares(n)


def fails() -> Squares:
    raise RuntimeError("no disk")


def exits() -> Squares:
    sys.exit(0)


def no_dataset() -> int:
    return 3
