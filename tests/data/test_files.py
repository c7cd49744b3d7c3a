"""Files of every format and several kinds of URL: ranges, contents, and errors."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
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


def parquet(table: dict[str, list[Any]], group: int = 7) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), out, row_group_size=group)
    return out.getvalue()


def csv_text(table: dict[str, list[Any]]) -> bytes:
    def cell(v: Any) -> str:
        return '"' + v.replace('"', '""') + '"' if isinstance(v, str) else str(v)

    lines = [",".join(table)] + [",".join(map(cell, r)) for r in zip(*table.values(), strict=True)]
    return ("\n".join(lines) + "\n\n").encode()


def jsonl(table: dict[str, list[Any]]) -> bytes:
    return "\n".join(json.dumps(dict(zip(table, r, strict=True))) for r in zip(*table.values(), strict=True)).encode()


WRITERS: dict[str, Callable[[dict[str, list[Any]]], bytes]] = {"parquet": parquet, "csv": csv_text, "jsonl": jsonl}


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


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 20, 100])
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
    """Which of them is meant? One that is not read may be there twice."""
    (tmp_path / "f").write_text(f"{header}\n{header.replace('y', '1').replace('a', '2').replace('b', '3')}\n")
    with pytest.raises(GraphftError, match="has more than one field a"):
        files(str(tmp_path / "f"), "csv", {"x": "a", "y": "y"})
    assert files(str(tmp_path / "f"), "csv", {"y": "y"}).records == 1


def test_row_groups_are_joined_and_divided(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(parquet(rows(0, 20), group=2))
    (tmp_path / "large").write_bytes(parquet(rows(20, 20), group=20))
    spec = files([str(tmp_path / "small"), str(tmp_path / "large")], "parquet", COLUMNS, DTYPES, chunk_size=7)
    assert [(c.file, c.start, c.records) for c in spec.chunks] == [
        (0, 0, 6),
        (0, 6, 6),
        (0, 12, 6),
        (0, 18, 2),
        (1, 0, 7),
        (1, 7, 7),
        (1, 14, 6),
    ]
    check(spec, 40)


def test_npy(tmp_path: Path) -> None:
    for i, n in enumerate((5, 8)):
        np.save(tmp_path / f"x{i}.npy", (np.arange(n * 6) + i * 30).reshape(n, 2, 3).astype(">f8"))
        np.save(tmp_path / f"y{i}.npy", np.arange(n, dtype=np.int32) + i * 5)
    spec = files({c: [str(tmp_path / f"{c}{i}.npy") for i in range(2)] for c in "xy"}, "npy", chunk_size=3)
    assert [c.records for c in spec.chunks] == [3, 2, 3, 3, 2]
    read = read_all(spec)
    assert torch.equal(read["x"], torch.arange(78, dtype=torch.float64).view(13, 2, 3))
    assert torch.equal(read["y"], torch.arange(13, dtype=torch.int32))


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
        *((lambda p, u=u: files(u.format(p), "csv", COLUMNS), "missing-file") for u in ("{0}", "file://{0}")),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"y": "int64"}), "columns"),
        (lambda p: files(f"{p}/f", "tfrecord", COLUMNS), "format"),
        (lambda p: files(f"{p}/f", "csv"), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "none"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"x": "string"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, {"x": "nonsense"}), "columns"),
        (lambda p: files(f"{p}/f", "csv", {"x": "y"}, chunk_size=0), "chunk-size"),
        (lambda p: files(f"{p}/f", "parquet", COLUMNS), "format"),
        (lambda p: files(f"{p}/f", "jsonl", COLUMNS), "columns"),
        (lambda p: files({"x": f"{p}/f"}, "npy"), "format"),
        (lambda p: files(f"{p}/f", "npy"), "columns"),
        (lambda p: files({"x": [f"{p}/3.npy"], "y": [f"{p}/4.npy"]}, "npy"), "column-lengths"),
        (lambda p: files({"x": [f"{p}/3.npy", f"{p}/t.npy"]}, "npy"), "format"),
        (lambda p: files({"x": [f"{p}/3.npy", f"{p}/i.npy"]}, "npy"), "columns"),
        (lambda p: files({"x": f"{p}/s.npy"}, "npy"), "format"),
        (lambda p: files(f"{p}/empty", "csv", {"x": "y"}), "short-data"),
        (lambda p: files(f"{p}/none.csv", "csv", {"x": "y"}), "columns"),
    ],
)
def test_errors_when_described(call: Callable[[Path], DataSpec], rule: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"y\n1\n")
    (tmp_path / "empty").write_bytes(b"y\n")
    (tmp_path / "none.csv").write_bytes(b"")
    np.save(tmp_path / "3.npy", np.zeros((3, 2)))
    np.save(tmp_path / "4.npy", np.zeros((4, 2)))
    np.save(tmp_path / "t.npy", np.zeros((2, 3)).T)
    np.save(tmp_path / "i.npy", np.zeros((3, 2), np.int64))
    np.save(tmp_path / "s.npy", np.zeros(()))
    with pytest.raises(GraphftError) as error:
        call(tmp_path)
    assert error.value.rule == rule


def test_an_error_ends_a_script_without_frames_of_graphft_or_a_library(tmp_path: Path) -> None:
    """The cause stays: by it, storage that is away is known."""
    script = tmp_path / "script.py"
    script.write_text('import graphft\ngraphft.files("none.csv", "csv", {"x": "a"})\n')
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 1
    assert done.stderr.startswith("error[missing-file]: cannot read ")
    assert "Traceback" not in done.stderr
    with pytest.raises(GraphftError) as error:
        files(f"{tmp_path}/none", "csv", COLUMNS)
    assert isinstance(error.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("format", WRITERS)
def test_fingerprints(format: str, tmp_path: Path) -> None:
    def described() -> dict[str, str]:
        return files([str(tmp_path / "f"), str(tmp_path / "g")], format, COLUMNS, DTYPES).fingerprint()

    (tmp_path / "f").write_bytes(WRITERS[format](rows(0, 20)))
    (tmp_path / "g").write_bytes(WRITERS[format](rows(0, 20)))
    before = described()
    assert list(before) == [str(tmp_path / "f"), str(tmp_path / "g")]
    (tmp_path / "f").write_bytes(WRITERS[format](rows(1, 20)))
    after = described()
    assert [k for k in before if before[k] != after[k]] == [str(tmp_path / "f")]


def test_a_page_of_parquet_that_was_damaged_is_found_where_the_file_has_checksums(tmp_path: Path) -> None:
    """pyarrow does not look at them unless it is told to: numbers that nobody wrote were trained on."""
    path = tmp_path / "f.parquet"
    table = pyarrow.table({"x": np.arange(1000, dtype="float32")})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
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


@pytest.mark.parametrize(("change", "compressed"), [(-80, False), (-1, True), (80, False)])
def test_a_header_of_npy_is_not_believed_without_the_file(tmp_path: Path, change: int, compressed: bool) -> None:
    """A file that was cut was described, and each trainer that read its end died."""
    buffer = io.BytesIO()
    np.save(buffer, np.ones((1000, 4), "float32"))
    data = buffer.getvalue()[:change] if change < 0 else buffer.getvalue() + b"x" * change
    (tmp_path / "x.npy").write_bytes(gzip.compress(data) if compressed else data)
    options = {"compression": "gzip"} if compressed else {}
    with pytest.raises(
        UsageError, match=rf"x\.npy.* has {16_128 + change:,} bytes, its header, float32\[1000, 4\], tells of 16,128"
    ) as caught:
        files({"x": str(tmp_path / "x.npy")}, "npy", storage_options=options)
    assert caught.value.rule == "format"
