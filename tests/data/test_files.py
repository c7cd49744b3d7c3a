"""Files of every format and several kinds of URL: ranges, contents, and errors."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from graphft.data import DataSpec, files
from graphft.errors import GraphftError, UsageError
from graphft.runtime.data import open_reader

COLUMNS = {"x": ("a", "b"), "y": "label"}
DTYPES = {"y": "int64"}


def rows(start: int, n: int) -> dict[str, list[Any]]:
    r = range(start, start + n)
    return {
        "note": [f'i is "{i}", really' for i in r],
        "a": [i + 0.5 for i in r],
        "label": list(r),
        "b": [-float(i) for i in r],
    }


def parquet(table: dict[str, Any], group: int = 7, **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), out, row_group_size=group, **options)
    return out.getvalue()


def csv_text(table: dict[str, list[Any]]) -> bytes:
    def cell(v: Any) -> str:
        return '"' + v.replace('"', '""') + '"' if isinstance(v, str) else str(v)

    lines = [",".join(table)] + [",".join(map(cell, r)) for r in zip(*table.values(), strict=True)]
    return ("\n".join(lines) + "\n\n").encode()


WRITERS: dict[str, Callable[[dict[str, list[Any]]], bytes]] = {"parquet": parquet, "csv": csv_text}


def read_all(spec: DataSpec, batch_size: int = 3, cached_chunks: int = 2) -> dict[str, torch.Tensor]:
    """One pass, put in the order of y."""
    reader = open_reader(DataSpec.from_json(json.loads(json.dumps(spec.to_json()))), ".", 0, cached_chunks)
    read = [reader.batch(0, c.id, b, batch_size) for c in spec.chunks for b in range(-(-c.records // batch_size))]
    whole = {c: torch.cat([r[c] for r in read]) for c in spec.columns}
    order = whole["y"].argsort()
    return {c: v[order] for c, v in whole.items()}


def check(spec: DataSpec, records: int) -> None:
    read = read_all(spec)
    assert read["y"].tolist() == list(range(records))
    assert read["x"].dtype == torch.float32
    assert torch.equal(read["x"], torch.stack([torch.arange(records) + 0.5, -torch.arange(float(records))], dim=1))


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
@pytest.mark.parametrize("format", WRITERS)
def test_local_files(format: str, chunk_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_bytes(WRITERS[format](rows(0, 20)))
    (tmp_path / "two").write_bytes(WRITERS[format](rows(20, 13)))
    monkeypatch.chdir(tmp_path)
    spec = files(["one", f"file://{tmp_path}/two"], format, COLUMNS, DTYPES, chunk_size)
    monkeypatch.chdir("/")
    assert max(c.records for c in spec.chunks) <= chunk_size
    assert spec.records == 33
    check(spec, 33)


@pytest.mark.parametrize("format", WRITERS)
def test_memory_and_zip_urls(format: str, tmp_path: Path) -> None:
    with fsspec.open(f"memory://graphft-{tmp_path.name}/{format}", "wb") as f:
        f.write(WRITERS[format](rows(0, 10)))
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("inner", WRITERS[format](rows(10, 10)))
    urls = [f"memory://graphft-{tmp_path.name}/{format}", f"zip://inner::file://{tmp_path}/data.zip"]
    check(files(urls, format, COLUMNS, DTYPES, chunk_size=6), 20)


@pytest.mark.parametrize("header", ["a,a,y", "y,a,b,a"])
def test_a_field_that_is_there_twice(header: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(f"{header}\n{header.replace('y', '1').replace('a', '2').replace('b', '3')}\n")
    with pytest.raises(GraphftError, match="has more than one field a"):
        files(str(tmp_path / "f"), "csv", {"x": "a", "y": "y"})
    assert files(str(tmp_path / "f"), "csv", {"y": "y"}).records == 1


def test_chunks_do_not_depend_on_row_groups(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(parquet(rows(0, 20), group=2))
    (tmp_path / "large").write_bytes(parquet(rows(20, 20), group=20))
    spec = files([str(tmp_path / "small"), str(tmp_path / "large")], "parquet", COLUMNS, DTYPES, chunk_size=7)
    assert [c.records for c in spec.chunks] == [7, 7, 6] * 2
    check(spec, 40)


@pytest.mark.parametrize("format", WRITERS)
def test_missing_values_are_nan(format: str, tmp_path: Path) -> None:
    table = {"a": [1.5, None, 2.5], "y": [0, 1, 2]}
    if format == "csv":
        (tmp_path / "f").write_bytes(b"a,y\n1.5,0\n,1\n2.5,2\n")
    else:
        (tmp_path / "f").write_bytes(WRITERS[format](table))
    read = read_all(files(str(tmp_path / "f"), format, {"a": "a", "y": "y"}))
    assert torch.equal(read["a"].nan_to_num(-1), torch.tensor([1.5, -1, 2.5]))
    with pytest.raises(GraphftError, match=r"field a is .*, no int64"):
        files(str(tmp_path / "f"), format, {"a": "a", "y": "y"}, {"a": "int64"})


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda p: files(f"{p}/none", "csv", COLUMNS), "missing-file"),
        (lambda p: files("nosuchscheme://none", "csv", COLUMNS), "missing-file"),
        (lambda p: files([], "csv", COLUMNS), "missing-file"),
        (lambda p: files("oci://bucket/none", "csv", COLUMNS), "missing-package"),
        (lambda p: files(str(p), "csv", COLUMNS), "missing-file"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"y": "int64"}), "columns"),
        (lambda p: files(f"{p}/f", "tfrecord", COLUMNS), "format"),
        (lambda p: files(f"{p}/f", "csv", {"x": "none"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"x": "string"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"x": "nonsense"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, chunk_size=0), "chunk-size"),
        (lambda p: files(f"{p}/f", "parquet", COLUMNS), "format"),
        (lambda p: files({"x": f"{p}/f"}, "npy", COLUMNS), "format"),
        (lambda p: files(f"{p}/empty", "csv", {"x": "y"}), "short-data"),
        (lambda p: files(f"{p}/none.csv", "csv", {"x": "y"}), "columns"),
    ],
)
def test_errors_when_described(call: Callable[[Path], DataSpec], rule: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"y\n1\n")
    (tmp_path / "empty").write_bytes(b"y\n")
    (tmp_path / "none.csv").write_bytes(b"")
    with pytest.raises(GraphftError, match=rf"^error\[{rule}\]"):
        call(tmp_path)


def test_a_page_of_parquet_that_was_damaged_is_found_where_the_file_has_checksums(tmp_path: Path) -> None:
    path, table = tmp_path / "f.parquet", {"x": np.arange(1000, dtype="float32")}
    whole = parquet(table, 1000, compression="none", use_dictionary=False, write_page_checksum=True)
    at = whole.index(np.float32(700).tobytes())
    path.write_bytes(whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :])
    with pytest.raises(GraphftError, match=r"f\.parquet: .*CRC"):
        files(str(path), "parquet", {"x": "x"}, {"x": "float32"})


@pytest.mark.parametrize("cut", [20, 1])
def test_a_compressed_file_that_was_cut_cannot_be_opened(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "f.csv.gz"
    path.write_bytes(gzip.compress(b"x\n" + b"1\n" * 1000)[:-cut])
    with pytest.raises(UsageError, match=r"cannot read .*f\.csv\.gz"):
        files(str(path), "csv", {"x": "x"}, {"x": "float32"}, storage_options={"compression": "gzip"})
