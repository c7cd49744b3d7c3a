"""Files that were changed since they were described are refused when they are opened, and while the job runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from graphft.data import DataSpec, dataset, files
from graphft.data.urls import DescribedFiles
from graphft.errors import GraphftError
from graphft.runtime.data import CHANGED, open_reader
from tests.data.test_files import parquet

Y = list(range(10, 30))
"""Values of two digits each, so that other ones give files of the same size."""


def csv(values: list[int]) -> bytes:
    return "\n".join(["y", *map(str, values)]).encode()


WRITERS: dict[str, Callable[[list[int]], bytes]] = {
    "csv": csv,
    "parquet": lambda values: parquet({"y": values}, compression="none", use_dictionary=False),
}


def describe(format: str, url: str | Path, chunk_size: int = 5) -> DataSpec:
    return DataSpec.from_json(files(str(url), format, {"y": "y"}, chunk_size=chunk_size).to_json())


def write(file: Path, data: bytes) -> None:
    """The modification time is another one than before."""
    before = os.stat(file).st_mtime_ns if file.exists() else 0
    file.write_bytes(data)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def test_a_file_that_is_changed_between_the_check_and_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "f", csv(Y))
    reader = open_reader(describe("csv", tmp_path / "f"), ".", 0)
    check = DescribedFiles._check
    monkeypatch.setattr(DescribedFiles, "_check", lambda *a: (check(*a), write(tmp_path / "f", csv(Y[::-1]))))
    with pytest.raises(GraphftError, match="was changed while it was read") as caught:
        reader.batch(0, 0, 0, 5)
    assert caught.value.rule == "data-changed"


@pytest.mark.parametrize("format", WRITERS)
def test_other_values_in_a_file_of_the_same_size_are_refused(format: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    write(file, WRITERS[format](Y))
    spec = describe(format, file)
    reader = open_reader(spec, ".", 0)
    reader.batch(0, 0, 0, 5)
    write(file, WRITERS[format](Y[::-1]))
    assert file.stat().st_size == len(WRITERS[format](Y))
    for read in (lambda: reader.batch(0, 1, 0, 5), lambda: open_reader(spec, ".", 0)):
        with pytest.raises(GraphftError, match=f"{file} was changed: it has (checksum|mtime)") as error:
            read()
        assert error.value.rule == "data-changed"
        assert "describe data and job again" in error.value.help


@pytest.mark.parametrize("format", WRITERS)
def test_the_same_contents_are_accepted(format: str, tmp_path: Path) -> None:
    """A copy with its modification time always is; one without, if the contents are known by a checksum."""
    file = tmp_path / "f"
    write(file, WRITERS[format](Y))
    spec = describe(format, file)
    wanted = open_reader(spec, ".", 0).batch(0, 0, 0, 5)["y"]
    shutil.copy2(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    reader = open_reader(spec, ".", 0)
    assert torch.equal(reader.batch(0, 0, 0, 5)["y"], wanted)
    write(file, WRITERS[format](Y))
    if format == "csv":
        assert len(reader.batch(0, 1, 0, 5)["y"]) == 5
        assert torch.equal(open_reader(spec, ".", 0).batch(0, 0, 0, 5)["y"], wanted)
    else:
        with pytest.raises(GraphftError, match="cp -p"):
            open_reader(spec, ".", 0)


def test_files_that_are_not_local(tmp_path: Path) -> None:
    url = f"memory://graphft-{tmp_path.name}/f"
    for format, make in WRITERS.items():
        with fsspec.open(url, "wb") as f:
            f.write(make(Y))
        spec = describe(format, url)
        reader = open_reader(spec, ".", 0)
        with fsspec.open(url, "wb") as f:
            f.write(make(Y[::-1]))
        with pytest.raises(GraphftError, match="was changed"):
            reader.batch(0, 0, 0, 5)


def test_a_dataset_whose_source_was_edited_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.py"
    source.write_text((Path(__file__).parent / "datasets.py").read_text())
    spec = DataSpec.from_json(dataset(f"{source}:Squares", {"n": 20}, chunk_size=20).to_json())
    open_reader(spec, ".", 3)
    source.write_text(source.read_text() + "# edited\n")
    with pytest.raises(GraphftError, match=r"the source of the dataset, .*rows\.py, was changed") as refused:
        open_reader(spec, ".", 3)
    assert refused.value.rule == CHANGED


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_record_that_another_process_makes_otherwise(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another record is refused, one that is rounded otherwise is told of."""
    row = torch.tensor([0.25, 3.0, 0.0] if dtype.is_floating_point else [1, 1, 0]).to(dtype)
    row = torch.cat([row, row[:1] / 0]) if dtype == torch.float32 else row  # inf

    def described() -> DataSpec:
        return DataSpec.from_json(json.loads(json.dumps(dataset("tests.data.datasets:Given").to_json())))

    monkeypatch.setattr("tests.data.datasets.ROW", row)
    spec = described()
    assert open_reader(spec, ".", 0).differs == ""
    changed = row.clone()
    changed[0] = 0
    monkeypatch.setattr("tests.data.datasets.ROW", changed)
    with pytest.raises(GraphftError, match=r"column x of record 0 of .*:Given has .* in this process") as caught:
        open_reader(spec, ".", 0)
    assert caught.value.rule == CHANGED
    if dtype.is_floating_point or dtype.is_complex:
        rounded = row.clone()
        rounded[0] *= 1 + torch.finfo(dtype).eps
        monkeypatch.setattr("tests.data.datasets.ROW", rounded)
        assert "when the data was described, as rounding may do" in open_reader(spec, ".", 0).differs
