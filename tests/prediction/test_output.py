"""Predictions as files: the same bits in each format, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import Program, Type
from graphft.runtime.prediction.output import check_output, write_output

NAMES = ("best", "p", "half")
ALL = {
    "best": torch.tensor([3, 1, 2, 0, 9]),
    "p": torch.rand(5, 2, generator=torch.Generator().manual_seed(0)) / 3,
    "half": torch.tensor([0.5, float("nan"), 3.0, float("-inf"), 1.25]).bfloat16(),
}


def parts() -> Iterator[dict[str, Tensor]]:
    yield {name: tensor[:3] for name, tensor in ALL.items()}
    yield {name: tensor[3:] for name, tensor in ALL.items()}


def test_npz_and_safetensors(tmp_path: Path) -> None:
    write_output(tmp_path / "p.npz", NAMES, 5, parts())
    found = np.load(tmp_path / "p.npz")
    assert {name: found[name].dtype for name in found} == {"best": np.int64, "p": np.float32, "half": np.float32}
    for name in NAMES:
        assert np.array_equal(found[name], (ALL[name].float() if name == "half" else ALL[name]).numpy(), equal_nan=True)
    write_output(tmp_path / "p.safetensors", NAMES, 5, parts())
    loaded = load_file(tmp_path / "p.safetensors")
    assert loaded["half"].dtype == torch.bfloat16
    assert torch.equal(loaded["p"], ALL["p"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.npz", "p.safetensors"]


def test_csv_has_the_digits_that_give_the_same_bits(tmp_path: Path) -> None:
    write_output(tmp_path / "p.csv", NAMES, 5, parts())
    head, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert head.replace('"', "") == "best,p_0,p_1,half"
    assert [row.split(",")[0] for row in rows] == ["3", "1", "2", "0", "9"]
    assert [row.split(",")[3] for row in rows] == ["0.5", "nan", "3", "-inf", "1.25"]
    p = np.array([row.split(",")[1:3] for row in rows], np.float32)
    assert np.array_equal(p, ALL["p"].numpy())


def test_parquet(tmp_path: Path) -> None:
    write_output(tmp_path / "p.parquet", NAMES, 5, parts())
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["best", "p_0", "p_1", "half"]
    assert np.array_equal(table["p_1"].to_numpy(), ALL["p"][:, 1].numpy())


def test_what_ends_in_between_leaves_the_older_file(tmp_path: Path) -> None:
    def ended() -> Iterator[dict[str, Tensor]]:
        yield next(parts())
        raise KeyboardInterrupt

    for name in ("p.npz", "p.csv", "p.safetensors", "p.parquet"):
        (tmp_path / name).write_text("older")
        with pytest.raises(KeyboardInterrupt):
            write_output(tmp_path / name, NAMES, 5, ended())
        assert (tmp_path / name).read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 4


def test_formats_that_cannot_hold_it(tmp_path: Path) -> None:
    """Columns of one name, too: the later result took the place of the earlier one."""
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
        with pytest.raises(GraphftError) as caught:
            check_output(tmp_path / name, program)
        assert caught.value.rule == "format"
