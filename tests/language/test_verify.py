"""Each rule of the verifier, broken once; and what must not be reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Program
from graphft.ir.parser import parse
from graphft.ir.registry import op
from graphft.ir.verify import RULES, Diagnostic, VerificationError, check, job_rule, verify, verify_job
from tests.support.golden import assert_golden


@op("ver_train", writes=("param",))
def _train(ctx: object, param: object, grad: object, *, lr: float = 0.1, mode: str = "a") -> None:
    """An optimizer op."""


@op("ver_must", effect=True)
def _must(ctx: object, *, count: int) -> None:
    """Has an attribute that must be given."""


def _refuse(operator: Operator, block: Block) -> None:
    raise ProgramError("never fits", block=block, rule="ver-own-check", help="nothing helps")


@op("ver_refuses", check=_refuse, effect=True)
def _refuses(ctx: object) -> None:
    """Its own check always fails."""


GOOD = """
program good {role = "trainer"}

input %x: float32[batch, 8]
param %w: float32[4, 8]
buffer %mean: float32[4]

block step:
  %t: float32[8, 4] = aten.t(%w)
  %h: float32[batch, 4] = aten.mm(%x, %t)
  %r: float32[batch, 4] = aten.relu_(%h)
  %m: float32[4] = aten.mean.dim(%h, (0,))
  %c: float32[4] = aten.copy_(%mean, %m)
  %w@GRAD: float32[4, 8] = aten.clone(%w)
  ver_train(%w, %w@GRAD)
"""

BROKEN = {
    "unknown-op": ("  %t: float32[8, 4] = aten.t(%w)", "  %t: float32[8, 4] = aten.tt(%w)"),
    "undeclared": ("aten.t(%w)", "aten.t(%nowhere)"),
    "operands": ("ver_train(%w, %w@GRAD)", "ver_train(%w)"),
    "attribute": ("ver_train(%w, %w@GRAD)", "ver_train(%w, %w@GRAD) {speed = 1}"),
    "attribute-type": ("ver_train(%w, %w@GRAD)", 'ver_train(%w, %w@GRAD) {lr = "x"}'),
    "type-mismatch": ("%h: float32[batch, 4]", "%h: float32[2*batch, 4]"),
    "results": ("%t: float32[8, 4] =", "%t: float32[8, 4], _ ="),
    "shape": ("aten.mm(%x, %t)", "aten.mm(%x, %w)"),
    "ver-own-check": ("  ver_train", "  ver_refuses()\n  ver_train"),
    "read-before-write": ("param %w", "temp %lost: float32[batch, 8]\nparam %w"),
    "out-of-order": ("  %t: float32[8, 4] = aten.t(%w)\n", ""),
    "redefined": ("  ver_train", "  %t: float32[8, 4] = aten.t(%w)\n  ver_train"),
    "constant-write": ("buffer %mean", "frozen %mean"),
}
"""rule -> (what to replace in GOOD, by what)."""

MORE = {
    "read-before-write": [("aten.mm(%x, %t)", "aten.mm(%lost, %t)")],
    "out-of-order": [("ver_train(%w, %w@GRAD)", "ver_train(%w, %w@GRAD)\n  %t: float32[8, 4] = aten.t(%w)")],
}


def broken(id: str) -> Program:
    text = GOOD
    for old, new in [BROKEN[id], *MORE.get(id, [])]:
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return parse(text)


def by_rule(program: Program, require_values: bool = False) -> dict[str, Diagnostic]:
    """The first finding of each rule."""
    return {d.rule: d for d in reversed(check(program, require_values=require_values))}


def test_a_good_program_has_no_findings() -> None:
    assert check(parse(GOOD)) == []


@pytest.mark.parametrize("id", BROKEN)
def test_rule_is_broken(id: str) -> None:
    """Follow-up errors would hide the cause."""
    found = check(broken(id))
    assert id in {d.rule for d in found}, found
    assert id in ("type-mismatch", "results") or [d.rule for d in found] == [id], list(map(str, found))
    assert all(d.help for d in found if d.rule == id)


def test_every_rule_is_documented_and_has_a_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
    elsewhere = {"value-type"}
    for id in {r.id for r in RULES} - {"definition"}:
        assert f"`{id}`" in page
        assert id in BROKEN.keys() | elsewhere


def test_a_required_attribute_is_missing() -> None:
    program = parse("program p\nblock step:\n  ver_must()\n")
    assert "attribute" in by_rule(program)


def test_missing_value_is_asked_for() -> None:
    """Inputs and temporaries need no value."""
    program = parse(GOOD)
    program.values["w"] = torch.zeros(4, 8)
    assert by_rule(program) == {}
    assert by_rule(program, require_values=True).keys() == {"missing-value"}
    verify(parse("program p\ninput %x: int\ntemp %t: int\n"), require_values=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("w", torch.zeros(8, 4)), ("w", torch.zeros(4, 8, dtype=torch.float64)), ("other", torch.zeros(1))],
)
def test_value_type(name: str, value: torch.Tensor) -> None:
    program = parse(GOOD)
    program.values[name] = value
    assert "value-type" in by_rule(program)


def test_optimize_blocks_read_what_schedule_and_reduce_leave() -> None:
    text = """
        program p {role = "pserver"}
        input %w@GRAD: float32[64]
        param %w: float32[64]
        block schedule:
          %lr: float32[64] = aten.clone(%w)
        block reduce:
          %norm: float32[64] = aten.relu(%lr)
        block optimize.w:
          %g: float32[64] = aten.add.Tensor(%norm, %lr)
          ver_train(%w, %g)
    """
    assert check(parse(text)) == []
    assert "read-before-write" in by_rule(parse(text.replace("block schedule:", "block daemon:")))


def test_golden_text_of_an_error() -> None:
    text = GOOD.replace("aten.mm(%x, %t)", "aten.mm(%x, %lost)").replace("ver_train(%w", "ver_trian(%w")
    with pytest.raises(VerificationError) as caught:
        verify(parse(text), after="insert-communication")
    assert [d.rule for d in caught.value.diagnostics] == ["undeclared", "unknown-op"]
    assert_golden(str(caught.value), "language_verify_error")


@job_rule("ver-job", "a test's rule across programs")
def _names_differ(programs: Mapping[str, Program]) -> Iterator[Diagnostic]:
    names = [p.name for p in programs.values()]
    if len(set(names)) < len(names):
        yield Diagnostic("ver-job", f"two programs are called {names[0]}", "rename one")


def test_rules_across_the_programs_of_a_job() -> None:
    with pytest.raises(VerificationError, match=r"--> job of programs a, b") as caught:
        verify_job({"a": Program("same"), "b": Program("same")})
    assert caught.value.rule == "ver-job"
    verify_job({"a": Program("a"), "b": Program("b")})
    with pytest.raises(VerificationError, match=r"^error\[unknown-op\]"):
        verify_job({"a": broken("unknown-op")})
