"""Reading ahead: overlap with compute, errors delivered to who asks, nothing left running."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from graphft.data import arrays, dataset
from graphft.errors import GraphftError
from graphft.runtime.data import BatchKey, Prefetcher, open_reader

DATASETS = str(Path(__file__).parent / "datasets.py")


def test_slow_items_overlap_with_compute() -> None:
    """Reading takes 10 x 20 ms per batch, computing 200 ms: side by side about half of one after the other."""
    reader = open_reader(dataset(f"{DATASETS}:Slow", {"n": 50}, chunk_size=50), ".", 0)
    keys = [BatchKey(0, 0, b, 10) for b in range(5)]
    prefetcher = Prefetcher(reader)
    for key in keys:
        prefetcher.schedule(key)
    prefetcher.get(keys[0])
    begin = time.monotonic()
    for key in keys[1:]:
        time.sleep(0.25)  # the step before
        prefetcher.get(key)
    elapsed = time.monotonic() - begin
    prefetcher.close()
    assert elapsed < 4 * 0.25 + 0.5, "without overlap at least 1.8 s"


def test_batches_are_the_readers() -> None:
    reader = open_reader(arrays(x=torch.arange(100), chunk_size=20), ".", 0)
    prefetcher = Prefetcher(reader, depth=3)
    keys = [BatchKey(2, c, b, 7) for c in range(5) for b in range(3)]
    for key in keys:  # more than fit: the oldest are dropped, and made when asked for
        prefetcher.schedule(key)
        prefetcher.schedule(key)
    for key in reversed(keys):
        assert torch.equal(prefetcher.get(key)["x"], reader.batch(*key)["x"])
    prefetcher.close()


def test_unscheduled_batch() -> None:
    reader = open_reader(arrays(x=torch.arange(10)), ".", 0)
    prefetcher = Prefetcher(reader)
    assert torch.equal(prefetcher.get(BatchKey(0, 0, 1, 4))["x"], reader.batch(0, 0, 1, 4)["x"])
    prefetcher.close()


def test_errors_reach_who_asks() -> None:
    prefetcher = Prefetcher(open_reader(dataset(f"{DATASETS}:Broken", chunk_size=5), ".", 0))
    for chunk in range(4):
        prefetcher.schedule(BatchKey(0, chunk, 0, 5))
    assert len(prefetcher.get(BatchKey(0, 0, 0, 5))["x"]) == 5
    with pytest.raises(GraphftError, match=r"chunk 2(.|\n)*record 13 is damaged"):
        prefetcher.get(BatchKey(0, 2, 0, 5))
    assert len(prefetcher.get(BatchKey(0, 3, 0, 5))["x"]) == 5
    prefetcher.close()


def test_random_batches_are_made_on_the_calling_thread() -> None:
    reader = open_reader(dataset(f"{DATASETS}:Noisy", chunk_size=10), ".", 0)
    prefetcher = Prefetcher(reader)
    key = BatchKey(0, 0, 0, 4)
    prefetcher.schedule(key)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(prefetcher.get(key)["x"], reader.batch(*key)["x"])
    assert torch.equal(torch.get_rng_state(), before)
    prefetcher.close()


def test_close_ends_the_thread() -> None:
    prefetcher = Prefetcher(open_reader(dataset(f"{DATASETS}:Slow", {"n": 400}, chunk_size=400), ".", 0), depth=40)
    for b in range(40):
        prefetcher.schedule(BatchKey(0, 0, b, 10))
    begin = time.monotonic()
    prefetcher.close()
    assert time.monotonic() - begin < 7.5, "reading all would take 8 s"
    assert not [t for t in threading.enumerate() if t.name.startswith("graphft-prefetch")]
