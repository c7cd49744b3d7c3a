"""The ops of local accumulation."""

from __future__ import annotations

import pytest
import torch

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Ref, Type
from graphft.ops.context import ChunkWork, Context
from graphft.runtime.execute.lowering import lower


def program() -> Program:
    made = Program("test")
    for name in ("w", "g", "short"):
        made.variable(name, Type("float32", (3 if name == "short" else 4,)), Kind.INPUT)
    for name in ("batch", "unit"):
        made.variable(name, Type("chunk"), Kind.INPUT)
    return made


def work(samples: int, number: int = 0) -> ChunkWork:
    return ChunkWork(0, 0, 0, samples, seed=0, number=number)


def test_accumulate_weighs_by_samples() -> None:
    made = program()
    made.block().append_op("accumulate", *map(Ref, ("w", "g", "batch", "unit")))
    run, total = lower(made.blocks["step"]), torch.zeros(4)
    parts = [(torch.randn(4), samples) for samples in (8, 8, 3)]
    for gradient, samples in parts:
        run(Context(), {"w": total, "g": gradient, "batch": work(samples), "unit": work(19)})
    torch.testing.assert_close(total, sum((g * (n / 19) for g, n in parts), torch.zeros(4)))


def test_apply_delta() -> None:
    made = program()
    made.block().append_op("apply_delta", Ref("w"), Ref("g"), scale=0.25)
    w, delta = torch.randn(4), torch.randn(4)
    expected = w + delta / 4
    lower(made.blocks["step"])(Context(), {"w": w, "g": delta})
    assert torch.equal(w, expected)


@pytest.mark.parametrize("op", ["accumulate", "apply_delta"])
def test_operands_are_of_one_type(op: str) -> None:
    more, attrs = ((Ref("batch"), Ref("unit")), {}) if op == "accumulate" else ((), {"scale": 1.0})
    with pytest.raises(ProgramError, match="but %short is float32") as caught:
        program().block().append_op(op, Ref("w"), Ref("short"), *more, **attrs)
    assert caught.value.rule == "local-operand"


def test_batch_number() -> None:
    made = program()
    made.block().append_op("batch_number", Ref("batch"), outputs="step")
    (step,) = lower(made.blocks["step"], fetch=("step",))(Context(), {"batch": work(8, number=41)})
    assert (step.item(), step.dtype, step.shape) == (41, torch.int64, ())


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
    scope: dict[str, object] = {"w": torch.ones(4), "unit": work(8)}
    port = Local(scope)
    (found,) = lower(step, fetch=(moved.name,))(Context(local=port), scope)  # type: ignore[arg-type]
    assert torch.equal(found, torch.full((4,), 6.0))
    assert port.asked == [(work(8), "local", 3)]
