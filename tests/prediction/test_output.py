"""Predictions as files: the same bits in each format, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from graphft.errors import GraphftError
from graphft.ir import Program, Type
from graphft.runtime.prediction.output import check_output, write_output

ALL = {
    "best": torch.tensor([3, 1, 2, 0, 9]),
    "p": torch.rand(5, 2, generator=torch.Generator().manual_seed(0)) / 3,
    "half": torch.tensor([0.5, float("nan"), 3.0, float("-inf"), 1.25]).bfloat16(),
}


def test_npz_and_safetensors(tmp_path: Path) -> None:
    write_output(tmp_path / "p.npz", ALL)
    found = np.load(tmp_path / "p.npz")
    assert {name: found[name].dtype for name in found} == {"best": np.int64, "p": np.float32, "half": np.float32}
    for name, value in ALL.items():
        assert np.array_equal(found[name], (value.float() if name == "half" else value).numpy(), equal_nan=True)
    write_output(tmp_path / "p.safetensors", ALL)
    loaded = load_file(tmp_path / "p.safetensors")
    assert loaded["half"].dtype == torch.bfloat16
    assert torch.equal(loaded["p"], ALL["p"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.npz", "p.safetensors"]


def test_csv_has_the_digits_that_give_the_same_bits(tmp_path: Path) -> None:
    write_output(tmp_path / "p.csv", ALL)
    head, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert head.replace('"', "") == "best,p_0,p_1,half"
    assert [row.split(",")[0] for row in rows] == ["3", "1", "2", "0", "9"]
    assert [row.split(",")[3] for row in rows] == ["0.5", "nan", "3", "-inf", "1.25"]
    p = np.array([row.split(",")[1:3] for row in rows], np.float32)
    assert np.array_equal(p, ALL["p"].numpy())


def test_parquet(tmp_path: Path) -> None:
    write_output(tmp_path / "p.parquet", ALL)
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["best", "p_0", "p_1", "half"]
    assert np.array_equal(table["p_1"].to_numpy(), ALL["p"][:, 1].numpy())


def test_formats_that_cannot_hold_it(tmp_path: Path) -> None:
    program = Program("p", {"extras": ("maps",)})
    program.variable("maps", Type("float32", ("batch", 4, 4)))
    check_output(tmp_path / "p.npz", program)
    program.variable("s", Type("float32", ("batch", 3)))
    program.variable("s_1", Type("float32", ("batch",)))
    program.variable("c", Type("complex64", ("batch",)))
    for name, extras in (
        ("p.csv", ("maps",)),
        ("p.csv", ("s", "s_1")),
        ("p.parquet", ("s", "c")),
        ("p.txt", ("s",)),
        (".", ("s",)),
    ):
        program.attrs["extras"] = extras
        with pytest.raises(GraphftError, match=r"^error\[format\]"):
            check_output(tmp_path / name, program)
