"""Ops on gradients: clipping against torch, whatever the slices; delay compensation; local accumulation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Kind, Program, Ref, Type
from graphft.ops.context import ChunkWork, Context
from graphft.ops.gradients import UNIT, clip_by_global_norm, squared_norms
from graphft.optim.optimizers import ClipByGlobalNorm, ClipByValue
from graphft.runtime.execute.lowering import lower

CTX = Context()


def gradients(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def clipped(grads: list[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """Clips them; returns the partial sums, and what torch makes of them."""
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    sqnorm = squared_norms(CTX, *grads)
    for g in grads:
        clip_by_global_norm(CTX, g, sqnorm, max_norm=max_norm)
    return sqnorm, [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 1e6])
def test_global_norm_against_torch(max_norm: float) -> None:
    grads = gradients(3 * UNIT + 5, 7, UNIT, 100_000)
    sqnorm, expected = clipped(grads, max_norm)
    assert sqnorm.dtype == torch.float64
    assert sqnorm.shape == (4 + 1 + 1 + 13,)
    torch.testing.assert_close(grads, expected, rtol=1e-6, atol=0)  # torch's own norm is summed in float32
    turned = gradients(UNIT + 5, 7, dtype=torch.complex64)
    turned[0] *= 1j
    torch.testing.assert_close(turned, clipped(turned, max_norm)[1], rtol=1e-5, atol=0)


@given(st.data())
def test_partial_sums_do_not_depend_on_the_slices(data: st.DataObject) -> None:
    """Shards compute the units of their slices; put in canonical order, they are those of the whole gradients."""
    unit = data.draw(st.sampled_from([64, 128, UNIT]), "unit")
    sizes = data.draw(st.lists(st.integers(1, 5 * unit), min_size=1, max_size=4), "sizes")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), "dtype")
    grads = gradients(*sizes, dtype=dtype)
    shards = data.draw(st.integers(1, 4), "shards")
    slices = [(i, a, min(b, n)) for i, n in enumerate(sizes) for a, b in _cuts(data, n, unit)]
    owner = data.draw(st.lists(st.integers(0, shards - 1), min_size=len(slices), max_size=len(slices)), "owner")

    parts: dict[tuple[int, int], Tensor] = {}
    for shard in range(shards):
        mine = [s for s, o in zip(slices, owner, strict=True) if o == shard]
        if not mine:
            continue
        sums = squared_norms(CTX, *(grads[i][a:b] for i, a, b in mine), unit=unit)
        counts = [-(-(b - a) // unit) for _, a, b in mine]
        parts |= {(i, a): p for (i, a, _), p in zip(mine, sums.split(counts), strict=True)}
    assert torch.equal(torch.cat([parts[k] for k in sorted(parts)]), squared_norms(CTX, *grads, unit=unit))


def _cuts(data: st.DataObject, n: int, unit: int) -> list[tuple[int, int]]:
    inner = data.draw(st.sets(st.integers(1, max(1, (n - 1) // unit))), "cuts")
    bounds = [0, *(c * unit for c in sorted(inner) if c * unit < n), n]
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows(bad: float) -> None:
    grads = gradients(10, 20)
    grads[0][3] = bad
    _, expected = clipped(grads, 1.0)
    assert [g.isnan().tolist() for g in grads] == [g.isnan().tolist() for g in expected]


def test_partial_sums_have_a_known_shape() -> None:
    program = Program()
    a = program.variable("a@GRAD", Type("float32", (3, UNIT)), Kind.INPUT)
    b = program.variable("b@GRAD", Type("float32", ()), Kind.INPUT)
    assert program.block("reduce").append_op("squared_norms", a, b).type == Type("float64", (4,))
    c = program.variable("c@GRAD", Type("float32", ("batch",)), Kind.INPUT)
    with pytest.raises(ProgramError, match=r"^error\[symbolic-shape\]"):
        program.block("reduce").append_op("squared_norms", c)


@pytest.mark.parametrize("make", [ClipByValue, ClipByGlobalNorm])
@pytest.mark.parametrize("bad", [0, -1.0, "1", True, math.nan])
def test_limits_are_positive_numbers(make: type, bad: object) -> None:
    with pytest.raises(GraphftError):
        make(bad)


# -- delay compensation: the formulas of Zheng et al. 2017 --------------------------------------------------------

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
def test_bits_do_not_depend_on_where_a_parameter_is_cut(decay: float) -> None:
    whole = values(1000)
    parts = [{n: v[a:b].clone() for n, v in whole.items()} for a, b in ((0, 37), (37, 500), (500, 1000))]
    for scope in (whole, *parts):
        run(scope, strength=0.7, decay=decay)
    for name in ("w@GRAD", "w@mean_square"):
        assert torch.equal(torch.cat([p[name] for p in parts]), whole[name])


@pytest.mark.parametrize("options", [{"operands": 4}, {"decay": 0.5, "operands": 3}])
def test_wrong_operands(options: dict[str, float]) -> None:
    with pytest.raises(ProgramError, match=r"^error\[operands\]"):
        program_of(**options)  # type: ignore[arg-type]


# -- local accumulation -------------------------------------------------------------------------------------------


def program() -> Program:
    made = Program("test")
    for name, type in {"w": Type("float32", (4,)), "short": Type("float32", (3,)), "unit": Type("chunk")}.items():
        made.variable(name, type, Kind.INPUT)
    return made


@pytest.mark.parametrize("op", ["accumulate", "apply_delta"])
def test_operands_are_of_one_type(op: str) -> None:
    more, attrs = ((Ref("unit"), Ref("unit")), {}) if op == "accumulate" else ((), {"scale": 1.0})
    with pytest.raises(ProgramError, match=r"^error\[operand-type\]"):
        program().block().append_op(op, Ref("w"), Ref("short"), *more, **attrs)


class Local:
    """Puts another tensor in the place of a variable, as a block does whose op has it as its result."""

    def __init__(self, scope: dict[str, object]) -> None:
        self.scope, self.asked = scope, []

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        self.asked.append((unit, block, count))
        self.scope["w"] = torch.full((4,), 7.0)

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        return unit


def test_what_the_block_left_in_the_scope_is_read_behind_it() -> None:
    made = program()
    step, local = made.block("step"), made.block("local")
    local.append_op("local_batch", Ref("unit"))
    before = step.append_op("aten.clone", Ref("w"))
    step.append_op("local_steps", Ref("unit"), Ref("w"), block="local", count=3)
    moved = step.append_op("aten.sub.Tensor", Ref("w"), before)
    scope: dict[str, object] = {"w": torch.ones(4), "unit": ChunkWork(0, 0, 0, 8, seed=0)}
    port = Local(scope)
    (found,) = lower(step, fetch=(moved.name,))(Context(local=port), scope)  # type: ignore[arg-type]
    assert torch.equal(found, torch.full((4,), 6.0))
    assert port.asked == [(scope["unit"], "local", 3)]
