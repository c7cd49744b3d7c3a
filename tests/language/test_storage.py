"""Saved programs load back bit by bit; whatever is wrong with the files is said, and nothing is left half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from graphft.errors import GraphftError
from graphft.ir import Kind, Program, Type
from graphft.ir.parser import ParseError
from graphft.ir.storage import TEXT, VALUES, load_program, save_program

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


def program_of(**values: torch.Tensor) -> Program:
    p = Program("saved", {"seed": 1})
    for name, value in values.items():
        p.variable(name, Type(str(value.dtype).removeprefix("torch."), tuple(value.shape)), Kind.PARAM, value)
    p.block("step")
    return p


def assert_same(a: Program, b: Program) -> None:
    assert a == b
    assert a.values.keys() == b.values.keys()
    for name, value in a.values.items():
        assert b.values[name].dtype == value.dtype
        assert torch.equal(
            b.values[name].view(torch.uint8) if value.dim() else b.values[name],
            value.contiguous().view(torch.uint8) if value.dim() else value,
        )


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    values = {f"v{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES)}
    values |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "nan": torch.tensor([float("nan"), -0.0])}
    p = program_of(**values)
    save_program(p, tmp_path / "made" / "on the way")
    assert_same(p, load_program(tmp_path / "made" / "on the way"))


def test_saving_again_replaces_the_program_and_leaves_nothing_else(tmp_path: Path) -> None:
    for value in (torch.zeros(3), torch.ones(3)):
        p = program_of(w=value)
        save_program(p, tmp_path / "p")
        assert_same(p, load_program(tmp_path / "p"))
    assert os.listdir(tmp_path) == ["p"]
    assert sorted(os.listdir(tmp_path / "p")) == [TEXT, VALUES]


def refused(program: Program, path: Path) -> None:
    with pytest.raises(GraphftError, match=r"^error\[save\]"):
        save_program(program, path)


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(program_of(), tmp_path)
    refused(program_of(), tmp_path / "thesis.tex")
    refused(program_of(), tmp_path / "thesis.tex" / "below")
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_program_that_does_not_read_back(tmp_path: Path) -> None:
    p = program_of()
    p.attrs["v"] = [1]
    refused(p, tmp_path / "p")
    p.attrs["v"] = 1
    p.variable("a b", Type("int"))
    refused(p, tmp_path / "p")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_program(program_of(w=torch.arange(100.0)), tmp_path / "p")
    return tmp_path / "p"


def not_loaded(path: Path) -> None:
    with pytest.raises(GraphftError, match=r"^error\[load\]"):
        load_program(path)


def test_what_is_missing(saved: Path) -> None:
    not_loaded(saved / "nowhere")
    not_loaded(saved.parent)
    not_loaded(saved / TEXT)
    (saved / VALUES).unlink()
    not_loaded(saved)


def test_values_that_were_cut_or_have_a_flipped_bit(saved: Path) -> None:
    """A wrong bit in saved values or in a sealed program would make every later prediction wrong, with status 0."""
    data = (saved / VALUES).read_bytes()
    for damaged in (b"", data[:20], data[:300], data[:-2] + bytes([data[-2] ^ 1, data[-1]])):
        (saved / VALUES).write_bytes(damaged)
        not_loaded(saved)


def test_the_text_of_a_sealed_program_is_not_edited(tmp_path: Path) -> None:
    for sealed in (False, True):
        save_program(program_of(w=torch.ones(3)), tmp_path / "p", sealed=sealed)
        assert_same(program_of(w=torch.ones(3)), load_program(tmp_path / "p"))
        text = (tmp_path / "p" / TEXT).read_text()
        (tmp_path / "p" / TEXT).write_text(text + "\n")
        if not sealed:
            load_program(tmp_path / "p")
    not_loaded(tmp_path / "p")


def test_text_that_does_not_parse(saved: Path) -> None:
    (saved / TEXT).write_bytes((saved / TEXT).read_bytes()[:-9] + b"\xff\xfe{")
    with pytest.raises(ParseError) as caught:
        load_program(saved)
    assert f"{saved / TEXT}:5:" in str(caught.value)
