"""Delay compensation: the formulas of Zheng et al. 2017, and what the op refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Ref, Type
from graphft.ir.registry import infer
from graphft.ops.context import Context
from graphft.runtime.execute.lowering import lower

NAMES = ("w@GRAD", "w", "w@BACKUP", "w@mean_square")


def program_of(numel: int = 200, decay: float = 0.0, operands: int = 0, **attrs: float) -> Program:
    """`dc_asgd` on a slice."""
    program = Program("shard")
    for name, kind in zip(NAMES, (Kind.INPUT, Kind.PARAM, Kind.INPUT, Kind.STATE), strict=True):
        program.variable(name, Type("float32", (numel,)), kind)
    names = NAMES[: operands or (4 if decay else 3)]
    program.block("optimize.w").append_op("dc_asgd", *map(Ref, names), decay=decay, **attrs)
    return program


def run(scope: dict[str, Tensor], **options: float) -> None:
    block = program_of(len(scope["w"]), **options).blocks["optimize.w"]
    lower(block)(Context(scope=scope), scope)  # type: ignore[arg-type]


def values(numel: int = 200, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scope = {name: torch.randn(numel, generator=generator) for name in NAMES[:3]}
    return scope | {NAMES[3]: torch.zeros(numel)}


def test_the_formula() -> None:
    scope, before = values(), values()
    run(scope, strength=0.3)
    g, w, backup = (before[n].double() for n in NAMES[:3])
    torch.testing.assert_close(scope["w@GRAD"].double(), g + 0.3 * g * g * (w - backup), rtol=1e-6, atol=1e-6)
    for name in NAMES[1:]:
        assert torch.equal(scope[name], before[name]), f"{name} was changed"


def test_it_estimates_the_gradient_at_the_moved_parameter() -> None:
    """Where the loss is -log p, as in the paper, the square of the gradient stands for the second derivative: a mean of
    many samples' compensated gradients is nearer to the gradient at the new parameter than the stale one is."""
    generator = torch.Generator().manual_seed(1)
    samples, old, new = torch.randn(20_000, generator=generator) + 0.5, torch.tensor(0.45), torch.tensor(0.75)
    stale = old - samples  # of (w - sample)^2 / 2, samples of variance 1
    compensated = stale + 1.0 * stale * stale * (new - old)
    fresh = new - samples
    assert (compensated.mean() - fresh.mean()).abs() < 0.1 * (stale.mean() - fresh.mean()).abs()
    scope = {"w@GRAD": stale.clone(), "w": new.expand(20_000).clone(), "w@BACKUP": old.expand(20_000).clone()}
    run(scope, strength=1.0)
    torch.testing.assert_close(scope["w@GRAD"], compensated)


def test_the_adaptive_formula_over_several_batches() -> None:
    scope = values()
    mean = torch.zeros(200, dtype=torch.float64)
    for seed in range(5):
        scope |= {n: v for n, v in values(seed=seed).items() if n != NAMES[3]}
        g, w, backup = (scope[n].double() for n in NAMES[:3])
        run(scope, strength=2.0, decay=0.95)
        mean = 0.95 * mean + 0.05 * g * g
        wanted = g + 2.0 / (mean + 1e-7).sqrt() * g * g * (w - backup)
        torch.testing.assert_close(scope["w@GRAD"].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scope[NAMES[3]].double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_nothing_is_added_where_nothing_has_moved(decay: float) -> None:
    scope = values()
    scope["w@BACKUP"] = scope["w"]
    before = scope["w@GRAD"].clone()
    run(scope, decay=decay)
    assert torch.equal(scope["w@GRAD"], before)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_bits_do_not_depend_on_where_a_parameter_is_cut(decay: float) -> None:
    whole = values(1000)
    parts = [{n: v[a:b].clone() for n, v in whole.items()} for a, b in ((0, 37), (37, 500), (500, 1000))]
    for scope in (whole, *parts):
        run(scope, strength=0.7, decay=decay)
    for name in ("w@GRAD", "w@mean_square"):
        assert torch.equal(torch.cat([p[name] for p in parts]), whole[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operands": 4}, "decay 0.0 takes (grad, param, backup), got"),
        ({"decay": 0.5, "operands": 3}, "takes (grad, param, backup, mean_square)"),
        ({"decay": 1.0}, "decay is at least 0 and below 1"),
    ],
)
def test_wrong_operands(options: dict[str, float], message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        program_of(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert caught.value.rule == "optimizer-operand"


def test_wrong_types() -> None:
    program = program_of()
    program.variables["w@BACKUP"].type = Type("float64", (200,))
    block = program.blocks["optimize.w"]
    with pytest.raises(ProgramError, match=r"%w@BACKUP is float64\[200\], but the gradient %w@GRAD is float32\[200\]"):
        infer(block.ops[0], block)
