"""How a corrected script's program differs from the saved one, in the words of the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.transpiler import read_record
from graphft.transpiler.differences import differences
from graphft.transpiler.program_differences import program_differences

_CHUNKS = "the data's chunks, 16 records in 2 chunks of at most 8 -> 24 records in 3 chunks of at most 8"


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def program(
    optimizer: Any = None, act: Callable[[], torch.nn.Module] = torch.nn.ReLU, hidden: int = 4, clip: Any = None
) -> graphft.Program:
    model = torch.nn.Sequential(torch.nn.Linear(3, hidden), act(), torch.nn.Linear(hidden, 1))
    made = graphft.build(model, loss_fn, inputs={"x": (None, 3), "y": (None, 1)})
    graphft.minimize(made, optimizer or graphft.Adam(lr=0.1), clip=clip)
    return made


def cosine(steps: int) -> graphft.Adam:
    return graphft.Adam(lr=graphft.schedule.cosine(0.1, steps))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {}, []),
        ({}, {"optimizer": graphft.Adam(lr=0.01)}, ["lr 0.1 -> 0.01"]),
        (
            {},
            {"optimizer": graphft.Adam(lr=0.01, betas=(0.8, 0.999))},
            ["betas (0.9, 0.999) -> (0.8, 0.999)", "lr 0.1 -> 0.01"],
        ),
        ({}, {"optimizer": graphft.SGD(lr=0.1)}, ["optimizer adam -> sgd"]),
        (
            {},
            {"hidden": 8},
            [
                "param 0.bias float32[4] -> float32[8]",
                "param 0.weight float32[4, 3] -> float32[8, 3]",
                "param 2.weight float32[1, 4] -> float32[1, 8]",
            ],
        ),
        (
            {"clip": graphft.ClipByGlobalNorm(1.0)},
            {"clip": graphft.ClipByGlobalNorm(2.0)},
            ["clip_by_global_norm max_norm 1.0 -> 2.0"],
        ),
    ],
)
def test_what_differs_is_named(old: dict[str, Any], new: dict[str, Any], expected: list[str]) -> None:
    assert program_differences(program(**old), program(**new)) == expected


def test_a_changed_line_of_the_model_is_named_with_its_op() -> None:
    (found,) = program_differences(program(), program(act=torch.nn.GELU))
    assert found.startswith("op 2 of the step: aten.relu -> aten.gelu (test_differences.py:")


def test_an_argument_of_an_op_that_differs_shows_both() -> None:
    (found,) = program_differences(
        program(act=lambda: torch.nn.LeakyReLU(0.1)), program(act=lambda: torch.nn.LeakyReLU(0.2))
    )
    assert "aten.leaky_relu(%addmm, 0.1) -> " in found
    assert "aten.leaky_relu(%addmm, 0.2)" in found


def test_a_schedule_that_did_not_change_is_not_named() -> None:
    """Found by a user: a metric more gives the schedule's temporaries other names."""

    def with_metric(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = model(x)
        return (found - y).square().mean(), {"error": (found - y).double().abs().mean()}

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    other = graphft.build(model, with_metric, inputs={"x": (None, 3), "y": (None, 1)})
    graphft.minimize(other, cosine(100))
    found = program_differences(program(cosine(100)), other)
    assert not [text for text in found if "schedule" in text], found
    assert found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (cosine(100), cosine(200), "the learning rate's schedule, 100 -> 200 in clamp"),
        (graphft.Adam(lr=0.1), cosine(100), "lr 0.1 -> a schedule"),
        (cosine(100), graphft.Adam(lr=0.1), "lr a schedule -> 0.1"),
        (cosine(100), graphft.Adam(lr=graphft.schedule.step(0.1, 5)), "lr a schedule -> another schedule"),
    ],
)
def test_a_changed_schedule_is_named(old: graphft.Adam, new: graphft.Adam, said: str) -> None:
    """It was shown as an op, with all its temporaries."""
    assert program_differences(program(old), program(new)) == [said]


def job(
    data: graphft.DataSpec | None = None, optimizer: Any = None, hidden: int = 4, seed: int = 0, **options: Any
) -> graphft.Job:
    torch.manual_seed(seed)
    source = program(optimizer, hidden=hidden)
    options = {"batch_size": 4, "passes": 2, "name": "x", "pservers": 2, "ft": True, **options}
    return graphft.transpile(source, chunks=data or arrays(), **options)


def arrays(records: int = 16, add: float = 0.0) -> graphft.DataSpec:
    x = torch.arange(3.0 * records).reshape(records, 3)
    return graphft.arrays(x=x + add, y=torch.zeros(records, 1), chunk_size=8)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda: job(optimizer=graphft.Adam(lr=0.2)), ["lr 0.1 -> 0.2"]),
        (lambda: job(arrays(add=1.0)), ["data column x"]),
        (lambda: job(arrays(24)), [_CHUNKS]),
        (lambda: job(batch_size=8), ["batch_size 4 -> 8"]),
        (lambda: job(passes=3), ["passes 2 -> 3"]),
        (lambda: job(optimizer=graphft.SGD(lr=0.1)), ["optimizer adam -> sgd"]),
        (lambda: job(seed=1), ["initial value of 0.bias, 0.weight, 2.bias, 1 more"]),
        (
            lambda: job(hidden=8),
            [
                "param 0.bias float32[4] -> float32[8]",
                "param 0.weight float32[4, 3] -> float32[8, 3]",
                "param 2.weight float32[1, 4] -> float32[1, 8]",
            ],
        ),
    ],
)
def test_what_a_user_has_changed_is_named_once(
    tmp_path: Path, changed: Callable[[], graphft.Job], said: list[str]
) -> None:
    """States of the optimizer, values that were drawn after those of a changed layer, and more were named beside it."""
    job().save(tmp_path / "job")
    assert differences(tmp_path / "job", read_record(tmp_path / "job"), changed()) == said


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
    assert said(with_files(8, 9)) == [f"data file {tmp_path / '1.csv'}"]
    assert said(with_files(8, 8, fields=("b", "a", "c"))) == ["the data's fields"]
