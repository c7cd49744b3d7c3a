"""Readers, and reading ahead: every record once per pass, the same bits whoever reads; errors name the chunk."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec, arrays, dataset
from graphft.errors import GraphftError
from graphft.runtime.data import BatchKey, Prefetcher, Reader, open_reader
from graphft.runtime.launcher.ending import Interrupted, interruptible
from tests.support.scripts import run
from tests.support.waiting import until

DATASETS = str(Path(__file__).parent / "datasets.py")


def keys(spec: DataSpec, batch_size: int, pass_index: int = 0) -> list[BatchKey]:
    counts = spec.batches(batch_size)
    return [BatchKey(pass_index, c.id, b, batch_size) for c in spec.chunks for b in range(counts[c.id])]


def one_pass(reader: Reader, batch_size: int, pass_index: int = 0) -> dict[str, torch.Tensor]:
    read = [reader.batch(*k) for k in keys(reader.spec, batch_size, pass_index)]
    return {c: torch.cat([b[c] for b in read]) for c in reader.spec.columns}


@given(
    records=st.integers(1, 60),
    chunk=st.integers(1, 20),
    size=st.integers(1, 20),
    seed=st.integers(0, 2**63),
    pass_index=st.integers(0, 1000),
)
def test_every_record_once_per_pass(records: int, chunk: int, size: int, seed: int, pass_index: int) -> None:
    chunk = min(chunk, records)
    spec = arrays(x=torch.arange(records), y=torch.arange(records) * 10, chunk_size=chunk)
    read = one_pass(open_reader(spec, ".", seed), min(size, chunk), pass_index)
    assert sorted(read["x"].tolist()) == list(range(records))
    assert torch.equal(read["y"], read["x"] * 10)


def test_order_is_the_same_everywhere() -> None:
    """A change of these numbers would change what running jobs compute after an upgrade."""
    reader = open_reader(arrays(x=torch.arange(10)), ".", 0)
    assert reader.batch(0, 0, 0, 10)["x"].tolist() == [3, 5, 9, 6, 8, 0, 4, 1, 2, 7]
    assert reader.batch(1, 0, 0, 10)["x"].tolist() != [3, 5, 9, 6, 8, 0, 4, 1, 2, 7]


def test_stored_arrays_are_read_alike(tmp_path: Path) -> None:
    spec = arrays(x=torch.randn(30, 4, dtype=torch.float64), y=torch.arange(30) % 2 == 0, chunk_size=8)
    spec.store(tmp_path)
    stored = open_reader(DataSpec.from_json(spec.to_json()), tmp_path, 3)
    for k in keys(spec, 3):
        a, b = open_reader(spec, tmp_path, 3).batch(*k), stored.batch(*k)
        assert torch.equal(a["x"], b["x"])
        assert torch.equal(a["y"], b["y"])
        b["x"] += 1  # a batch is the caller's own: neither read-only nor the file's memory
    assert torch.equal(stored.batch(0, 0, 0, 3)["x"], open_reader(spec, tmp_path, 3).batch(0, 0, 0, 3)["x"])


def test_missing_and_changed_arrays(tmp_path: Path) -> None:
    spec = DataSpec.from_json(arrays(x=torch.zeros(30, 4)).to_json())
    with pytest.raises(GraphftError, match="cannot read column x"):
        open_reader(spec, tmp_path, 0)
    for other, says in ((torch.zeros(29, 4), "the job expects"), (torch.ones(30, 4), "has other contents than when")):
        arrays(x=other).store(tmp_path / says)
        with pytest.raises(GraphftError, match=says) as error:
            open_reader(spec, tmp_path / says, 0)
    assert error.value.rule == "data-changed"


@pytest.mark.parametrize("name", ["Squares", "Named"])
def test_dataset(name: str) -> None:
    spec = dataset(f"{DATASETS}:{name}", {"n": 11}, chunk_size=4)
    read = one_pass(open_reader(DataSpec.from_json(spec.to_json()), ".", 0), 3)
    assert sorted(read["y"].tolist()) == [i * i for i in range(11)]
    assert torch.equal(read["x"][:, 0].long() ** 2, read["y"])


def test_user_code_that_exits() -> None:
    reader = open_reader(dataset(f"{DATASETS}:Exits", chunk_size=5), ".", 0)
    with pytest.raises(GraphftError, match=r"reading chunk 2 .*SystemExit") as error:
        one_pass(reader, 5)
    assert error.value.rule == "read"
    with pytest.raises(GraphftError, match=r"exits in \S+ failed: SystemExit"):
        dataset(f"{DATASETS}:exits")


@pytest.mark.parametrize(("name", "message"), [("Broken", "record 13 is damaged"), ("Uneven", "size")])
def test_errors_name_the_chunk(name: str, message: str) -> None:
    reader = open_reader(dataset(f"{DATASETS}:{name}", chunk_size=20), ".", 0)
    with pytest.raises(GraphftError, match=rf"chunk 0 \(records 0 to 20\)(.|\n)*{message}"):
        reader.batch(0, 0, 0, 20)


SCRIPT = """
import json
import torch
from graphft.data import dataset
from graphft.errors import UsageError
from graphft.runtime.data import open_reader
from helper import LENGTH

SIGN = 1

class Data:
    def __init__(self): self.noise = torch.Generator()
    def __len__(self): return LENGTH
    def __getitem__(self, i): return i + torch.rand((), generator=self.noise), SIGN * i

if __name__ == "__main__":
    of_the_script = torch.Generator().manual_seed(5)
    print(json.dumps(dataset(Data, chunk_size=3).to_json()))
    assert torch.equal(of_the_script.get_state(), torch.Generator().manual_seed(5).get_state())
    SIGN = -1
    try:
        open_reader(dataset(Data, chunk_size=3), ".", 0)
    except UsageError as error:
        print(error.message)
"""


def test_script_is_loaded_as_a_module(tmp_path: Path) -> None:
    """A class of a script, described by the script itself, is found again by another process elsewhere. A variable that
    the script sets below its main guard is not the module's; a generator that it makes there is none of the data's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("LENGTH = 7\n")
    shown = run(str(tmp_path / "script.py"), "")
    assert shown.returncode == 0, shown.stderr
    described, refused = shown.stdout.splitlines()
    assert "script.py:Data has 2 in this process, and had -2 when the data was described" in refused
    spec = DataSpec.from_json(json.loads(described))
    assert sorted(one_pass(open_reader(spec, ".", 0), 2)["y"].tolist()) == list(range(7))


class Ended:
    """While record `at` is read, the script is told to end."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor]:
        if i == self.at:
            signal.raise_signal(signal.SIGTERM)
        return (torch.zeros(2),)


def test_a_signal_that_ends_a_launch_is_no_failed_read() -> None:
    spec = dataset(f"{__file__}:Ended", {"at": -1}, chunk_size=8, columns=("x",))
    spec.source["args"]["at"] = 3
    with pytest.raises(Interrupted), interruptible(lambda: ""):
        open_reader(spec, ".", 0).batch(0, 0, 0, 8)


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
