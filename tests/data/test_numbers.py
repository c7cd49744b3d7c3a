"""Fields become numbers: no value is changed by the others of its column, and none by an integer dtype."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec, files
from graphft.data.formats import to_numbers
from graphft.runtime.data import BadRecords, open_reader

LARGE = 2**53 + 1
"""No float64 holds it."""


def read(spec: DataSpec) -> tuple[list[float], dict[int, str]]:
    """The good values of the only chunk; by position, the message for the bad ones."""
    reader, (chunk,) = open_reader(spec, ".", seed=0), spec.chunks
    try:
        return sorted(reader.batch(0, 0, 0, chunk.records)["c"].tolist()), {}
    except BadRecords as error:
        found = reader.batch(0, 0, 0, chunk.records, error.positions)["c"].tolist()
        return sorted(found), dict.fromkeys(error.positions, str(error))


@pytest.mark.parametrize("kind", [pyarrow.int64(), pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())])
def test_large_integers_of_parquet_beside_a_null(kind: pyarrow.DataType, tmp_path: Path) -> None:
    values = pyarrow.array([LARGE, 1, None, *range(2, 302)], pyarrow.int64())
    column = values.dictionary_encode() if pyarrow.types.is_dictionary(kind) else values
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "f")
    found, bad = read(files(str(tmp_path / "f"), "parquet", {"c": "c"}, {"c": "int64"}))
    assert found == [*range(1, 302), LARGE]
    assert list(bad) == [2]


TEXTS = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.decimals(-(10**9), 10**9, places=12).map(str),
    st.sampled_from(["", " 7 ", "1e3", "-0", "+5", "nan", "inf", "1e400", "1_5", "\u0661", str(LARGE), "3.0", "red"]),
)


def python_number(text: str | None, dtype: np.dtype[Any]) -> Any:
    """As Python reads it, and None where it is no such number."""
    if text is None or not text.isascii() or "_" in text:
        return math.nan if text is None and dtype.kind == "f" else None
    try:
        value = float(text)
        if dtype.kind == "f":
            return value
        whole = int(text) if text.strip().lstrip("+-").isdecimal() else int(value) if value == int(value) else None
    except (ValueError, OverflowError):
        return None
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return whole if whole is not None and low <= whole <= high else None


@given(st.lists(TEXTS, max_size=8), st.sampled_from(["float32", "float64", "int64", "int8", "uint8", "bool"]))
def test_texts_are_the_numbers_that_python_reads(texts: list[str | None], dtype: str) -> None:
    """To the last bit: those of float32 by way of float64."""
    values, wrong = to_numbers(pyarrow.chunked_array([texts], pyarrow.string()), dtype)
    wanted = [python_number(text, np.dtype(dtype)) for text in texts]
    assert sorted(wrong) == [i for i, number in enumerate(wanted) if number is None]
    kept = [i for i, number in enumerate(wanted) if number is not None]
    with np.errstate(over="ignore"):
        good = np.array([wanted[i] for i in kept], "float64" if dtype[0] == "f" else dtype).astype(dtype)
    assert values.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(values[kept], good)


def test_compressed_files_are_refused_and_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "f.gz").write_bytes(gzip.compress("\n".join(["c", *map(str, range(300))]).encode()))
    with pytest.raises(Exception, match="no text in UTF-8") as caught:
        files(str(tmp_path / "f.gz"), "csv", {"c": "c"})
    assert 'storage_options={"compression": "infer"}' in str(caught.value)
    options = {"compression": "infer"}
    spec = files(str(tmp_path / "f.gz"), "csv", {"c": "c"}, chunk_size=300, storage_options=options)
    assert read(spec) == (list(range(300)), {})
