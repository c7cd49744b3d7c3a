"""Reading ahead: overlap with compute, errors delivered to who asks, nothing left running."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from graphft.data import arrays, dataset
from graphft.errors import GraphftError
from graphft.runtime.data import BatchKey, Prefetcher, open_reader
from tests.support.waiting import until

DATASETS = str(Path(__file__).parent / "datasets.py")


def test_batches_are_read_while_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_reader(arrays(x=torch.arange(20)), ".", 0)
    threads: list[threading.Thread] = []
    batch = reader.batch

    def note_thread(*key: Any, **how: Any) -> dict[str, torch.Tensor]:
        threads.append(threading.current_thread())
        return batch(*key, **how)

    monkeypatch.setattr(reader, "batch", note_thread)
    prefetcher = Prefetcher(reader)
    keys = [BatchKey(0, 0, b, 10) for b in range(2)]
    for key in keys:
        prefetcher.schedule(key)
    until(lambda: len(threads) == 2)  # the caller has asked for none of them so far
    for key in keys:
        assert torch.equal(prefetcher.get(key)["x"], batch(*key)["x"])
    prefetcher.close()
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_errors_reach_who_asks() -> None:
    prefetcher = Prefetcher(open_reader(dataset(f"{DATASETS}:Broken", chunk_size=5), ".", 0))
    for chunk in range(4):
        prefetcher.schedule(BatchKey(0, chunk, 0, 5))
    assert len(prefetcher.get(BatchKey(0, 0, 0, 5))["x"]) == 5
    with pytest.raises(GraphftError, match=r"chunk 2(.|\n)*record 13 is damaged"):
        prefetcher.get(BatchKey(0, 2, 0, 5))
    assert len(prefetcher.get(BatchKey(0, 3, 0, 5))["x"]) == 5
    prefetcher.close()


def test_close_waits_for_one_batch_and_drops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_reader(arrays(x=torch.arange(400), chunk_size=400), ".", 0)
    begun, go_on, read = threading.Event(), threading.Event(), []

    def wait(*key: Any, **how: Any) -> dict[str, torch.Tensor]:
        read.append(key)
        begun.set()
        go_on.wait(120)
        return {}

    monkeypatch.setattr(reader, "batch", wait)
    prefetcher = Prefetcher(reader, depth=40)
    for b in range(40):
        prefetcher.schedule(BatchKey(0, 0, b, 10))
    assert begun.wait(120)
    queued = list(prefetcher._batches.values())[1:]
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    until(lambda: all(batch.cancelled() for batch in queued))
    go_on.set()
    closing.join(120)
    assert len(read) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("graphft-prefetch")]
