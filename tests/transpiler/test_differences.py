"""Names the differences of a corrected script's program from the saved one, in the words of the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.transpiler.differences import differences
from graphft.transpiler.record import read_record


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def job(
    data: graphft.DataSpec | None = None,
    optimizer: Any = None,
    clip: Any = None,
    act: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    hidden: int = 4,
    seed: int = 0,
    **options: int,
) -> graphft.Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, hidden), act(), torch.nn.Linear(hidden, 1))
    program = graphft.build(model, loss_fn, inputs={"x": (None, 3), "y": (None, 1)})
    graphft.minimize(program, optimizer or graphft.Adam(lr=0.1), clip=clip)
    usual = {"name": "x", "pservers": 2, "ft": True, "batch_size": 4, "epochs": 2}
    return graphft.transpile(program, data=data or arrays(), **{**usual, **options})


def arrays(records: int = 16, add: float = 0.0) -> graphft.DataSpec:
    x = torch.arange(3.0 * records).reshape(records, 3)
    return graphft.arrays(x=x + add, y=torch.zeros(records, 1), chunk_size=8)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda: job(optimizer=graphft.Adam(lr=0.2)), "%lr: float64[] = aten.full((), 0.1"),
        (lambda: job(optimizer=graphft.SGD(lr=0.1)), "0.bias@exp_avg float32[4] -> none, "),
        (lambda: job(clip=graphft.ClipByGlobalNorm(1.0)), "squared_norms"),
        (lambda: job(act=lambda: torch.nn.LeakyReLU(0.2)), "aten.leaky_relu(%addmm, 0.2)"),
        (lambda: job(hidden=8), "0.bias float32[4] -> float32[8], "),
        (lambda: job(arrays(add=1.0)), "data column x"),
        (lambda: job(batch_size=8), "batch_size 4 -> 8"),
        (lambda: job(epochs=3), "epochs 2 -> 3"),
        (lambda: job(seed=1), "initial value of 0.bias, 0.weight, 2.bias, 2.weight"),
    ],
)
def test_what_a_user_has_changed_is_named_once(tmp_path: Path, changed: Callable[[], graphft.Job], said: str) -> None:
    """States of the optimizer, values that were drawn after those of a changed layer, follow from it."""
    job().save(tmp_path / "job")
    record = read_record(tmp_path / "job")
    assert differences(tmp_path / "job", record, job()) == []
    (found,) = differences(tmp_path / "job", record, changed())
    assert said in found


def test_a_changed_file_is_named_once(tmp_path: Path) -> None:
    def with_files(*rows: int, add: int = 0, fields: tuple[str, ...] = ("a", "b", "c")) -> graphft.Job:
        names = [tmp_path / f"{i}.csv" for i in range(len(rows))]
        for name, count in zip(names, rows, strict=True):
            name.write_text("a,b,c\n" + "".join(f"{i},{10**add},{i}\n" for i in range(count)))
        columns = {"x": fields, "y": ("c",)}
        return job(graphft.files([str(n) for n in names], "csv", columns=columns))

    with_files(8, 8).save(tmp_path / "job")
    record = read_record(tmp_path / "job")

    def said(changed: graphft.Job) -> list[str]:
        return differences(tmp_path / "job", record, changed)

    assert said(with_files(8, 8)) == []
    assert said(with_files(8, 8, 8)) == [f"data file {tmp_path / '2.csv'}"]
    assert said(with_files(8, 8, add=1)) == [f"data file {tmp_path / '0.csv'}, {tmp_path / '1.csv'}"]
    assert said(with_files(8, 8, fields=("b", "a", "c"))) == ["data.source.fields.x ['a', 'b', 'c'] -> ['b', 'a', 'c']"]
