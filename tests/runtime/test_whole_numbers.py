"""What is said of a batch on which a step failed: the class that there is not, and the line that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphft.runtime.execute.finite import whole_numbers


def names(samples: Sequence[int]) -> list[str]:
    return [f"line {sample + 2} of f.csv" for sample in samples]


def test_the_records_with_the_smallest_and_the_largest_are_named() -> None:
    batch = {"y": torch.tensor([3, -1, 17]), "x": torch.zeros(3, 2), "tokens": torch.tensor([[5, 6], [5, 5], [9, 5]])}
    assert whole_numbers(batch, names) == (
        " (the batch has y from -1 (line 3 of f.csv) to 17 (line 4 of f.csv), "
        "tokens from 5 (line 2 of f.csv) to 9 (line 4 of f.csv))"
    )


def test_of_equal_ones_no_record_is_named() -> None:
    assert whole_numbers({"y": torch.full((4,), 7)}, names) == " (the batch has y 7 throughout)"


def test_other_batches_have_none() -> None:
    assert whole_numbers({"x": torch.zeros(3), "y": torch.zeros(0, dtype=torch.int64)}, names) == ""
