"""Randomness in a Dataset: a batch is the same wherever and whenever it is read, or an error says why not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphft.data import DataSpec, dataset
from graphft.data.randomness import states
from graphft.errors import GraphftError
from graphft.runtime.data import BatchKey, Prefetcher, Reader, open_reader
from graphft.runtime.data.dataset_reader import DrawWatch, NeedsCallingThread

DATASETS = str(Path(__file__).parent / "datasets.py")
KEYS = [BatchKey(0, 0, b, 4) for b in range(5)]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def all_of(spec: DataSpec, seed: int = 0) -> torch.Tensor:
    """One pass, read ahead, with the generators of this process at `seed`."""
    seed_all(seed)
    reader = open_reader(DataSpec.from_json(spec.to_json()), ".", 3)
    prefetcher = Prefetcher(reader)
    for key in KEYS:
        prefetcher.schedule(key)
    read = torch.cat([prefetcher.get(key)["x"] for key in KEYS])
    prefetcher.close()
    return read


@pytest.mark.parametrize("source", ["torch", "numpy", "python", "swallowed", "lazy"])
def test_draws_for_few_records_are_seen_when_they_are_read(source: str) -> None:
    spec = dataset(f"{DATASETS}:Rare", {"source": source}, chunk_size=20)
    assert spec.source["random"] is False
    assert torch.equal(all_of(spec), all_of(spec, seed=1))
    drawn = [x for x in all_of(spec)[:, 0].tolist() if x % 1]
    assert len(drawn) == 1
    assert drawn[0] != 7.5


@pytest.mark.parametrize("source", ["torch", "swallowed"])
def test_the_generator_of_the_training_thread_is_left_alone(source: str) -> None:
    """A read ahead is given up before it draws: the thread that trains uses the same generator at that moment."""
    reader = open_reader(dataset(f"{DATASETS}:Rare", {"source": source}, chunk_size=20), ".", 3)
    seed_all(0)
    before, seen = states(), []

    def ahead() -> None:
        for key in KEYS:
            try:
                reader.batch(*key, ahead=True)
            except NeedsCallingThread as error:
                seen.append(error)

    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join()
    assert seen
    assert reader.calling_thread
    assert states() == before


def read_alike(spec: DataSpec) -> tuple[Reader, list[torch.Tensor]]:
    """The same batches in any order. Returns a reader that has read all, and what it has read."""
    forward, backward = open_reader(spec, ".", 3), open_reader(spec, ".", 3)
    one = [forward.batch(*key)["x"] for key in KEYS]
    other = [backward.batch(*key)["x"] for key in reversed(KEYS)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return forward, one


def test_every_batch_is_read_alike_before_and_after_a_draw_was_seen() -> None:
    read_alike(dataset(f"{DATASETS}:Rare", chunk_size=20))


def test_a_construction_that_draws_is_the_same_everywhere() -> None:
    seed_all(7)
    before = states()
    spec = dataset(f"{DATASETS}:Shuffled", chunk_size=20)
    assert states() == before
    assert torch.equal(all_of(spec), all_of(spec, seed=1))


@pytest.mark.parametrize("source", ["torch", "numpy", "legacy", "python", "wrapped", "module"])
@pytest.mark.parametrize("rare", [False, True])
def test_generators_that_the_dataset_keeps_are_seeded_per_batch(source: str, rare: bool) -> None:
    spec = dataset(f"{DATASETS}:Keeping", {"source": source, "rare": rare}, chunk_size=20)
    forward, one = read_alike(spec)
    assert torch.equal(forward.batch(*KEYS[2])["x"], one[2])
    assert not forward.calling_thread, "nobody else uses them: batches are made ahead of use"
    drawn = [x % 1 for x in torch.cat(one)[:, 0].tolist() if x % 1]
    assert len(set(drawn)) == len(drawn) == (1 if rare else 20)
    reseeded = torch.cat([open_reader(spec, ".", 4).batch(*key)["x"] for key in KEYS])
    assert not {x % 1 for x in reseeded[:, 0].tolist() if x % 1} & set(drawn), "another seed of the job"


def test_items_that_depend_on_anything_else_are_refused() -> None:
    with pytest.raises(GraphftError, match="with the same seeds: x differs") as error:
        dataset(f"{DATASETS}:Impure")
    assert error.value.rule == "dataset-changes"
    assert "from the item's index" in error.value.help


DRAWS: list[Callable[[], Any]] = [
    lambda: torch.rand(1),
    lambda: torch.nn.functional.dropout(torch.ones(4)),
    lambda: torch.rand(1, generator=torch.default_generator),
    # these are no operators, and would move the generator of the thread that trains
    lambda: torch.manual_seed(3),
    lambda: torch.random.manual_seed(3),
    lambda: torch.seed(),
    lambda: torch.set_rng_state(torch.get_rng_state().clone()),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_from_torchs_generator_are_stopped(draw: Callable[[], Any]) -> None:
    before, watch = torch.get_rng_state(), DrawWatch()
    assert watch.read(draw) is None
    assert watch.drew
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.rand(1, generator=torch.Generator().manual_seed(1)),
        lambda: np.random.default_rng(0).random(),
        lambda: random.Random(0).random(),
        lambda: torch.ones(3).sum().item(),
    ],
)
def test_what_does_not_draw_from_global_generators_is_not_stopped(call: Callable[[], Any]) -> None:
    watch = DrawWatch()
    assert watch.read(call) is not None
    assert not watch.drew


def change_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


class Lazy(dict[str, Any]):
    """An item whose values are made when they are asked for."""

    def __init__(self, make: Any) -> None:
        super().__init__(x=None)
        self.make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        self.make()
        return torch.zeros(2)


class Changing:
    """Record 20 changes what the whole process computes with. `then`: it returns, raises, or is made later only."""

    def __init__(self, how: str, then: str = "returns", draws: bool = False) -> None:
        self.how, self.then, self.draws = how, then, draws

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        if self.draws:
            torch.rand(1)
        if self.then == "lazy":
            return Lazy(lambda: self.change(i))
        self.change(i)
        if i == 20 and self.then == "raises":
            raise OSError(5, "Input/output error")
        return (torch.zeros(2),)

    def change(self, i: int) -> None:
        if i == 20:
            {"threads": change_threads, "autocast": lambda: torch.set_autocast_enabled("cpu", True)}[self.how]()


@pytest.mark.parametrize(
    ("how", "then", "draws"), [("threads", "returns", False), ("autocast", "raises", True), ("autocast", "lazy", False)]
)
def test_a_record_that_changes_settings_is_found_out_whatever_it_does_then(how: str, then: str, draws: bool) -> None:
    threads = torch.get_num_threads()
    options = {"how": how, "then": then, "draws": draws}
    reader = open_reader(dataset(f"{__file__}:Changing", options, chunk_size=8, columns=("x",)), ".", 0)
    assert len(reader.batch(0, 0, 0, 8)["x"]) == 8
    try:
        with pytest.raises(GraphftError, match=r"^error\[settings-changed\]"):
            reader.batch(0, 2, 0, 8)
    finally:
        torch.set_num_threads(threads)
        torch.set_autocast_enabled("cpu", False)
