"""Ops that leave the trainer are found by what the ops are and depend on, not by where they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import graphft
from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Ref, Type
from graphft.ops.context import ChunkWork
from graphft.plan import Located
from graphft.transpiler.job import Job
from tests.support.inprocess import InProcess
from tests.support.programs_by_hand import linear
from tests.transpiler.test_numeric import executed

X, Y = torch.randn(32, 200, generator=torch.Generator().manual_seed(3)), torch.ones(32, 1)


def transpile(program: Program, **options: object) -> Job:
    data = graphft.arrays(chunk_size=8, x=X, y=Y)
    return graphft.transpile(program, data=data, batch_size=4, slice_unit=64, min_block=64, **options)


def batch(work: Located | ChunkWork) -> dict[str, torch.Tensor]:
    rows = slice(work.chunk * 8 + work.batch * 4, work.chunk * 8 + work.batch * 4 + 4)
    return {"x": X[rows], "y": Y[rows]}


def by_hand() -> tuple[Program, Ref]:
    """Linear regression without optimizer, and a learning rate."""
    program = linear(minimized=False)
    lr = program.variable("lr", Type("float64", ()), Kind.CONST, torch.tensor(0.1, dtype=torch.float64))
    return program, lr.ref


def agrees_with_one_process(program: Program) -> None:
    job = transpile(program, pservers=2)
    run, alone = InProcess(job, batch), executed(program, job, batch)
    run.run()
    for name, value in run.model().items():
        torch.testing.assert_close(value, alone[name])


def test_constant_rate_without_schedule() -> None:
    program, lr = by_hand()
    for name in ("w", "b"):
        program.blocks["step"].append_op("sgd", Ref(name), Ref(f"{name}@GRAD"), lr)
    job = transpile(program)
    assert "schedule" not in job.pserver_program(0).blocks
    assert job.pserver_program(0).values["lr"].item() == 0.1
    assert "lr" not in job.trainer_program().variables
    agrees_with_one_process(program)


def test_a_gradient_of_another_name() -> None:
    program, lr = by_hand()
    step = program.blocks["step"]
    half = step.append_op("aten.mul.Tensor", Ref("w@GRAD"), 0.5, outputs="half")
    step.append_op("sgd", Ref("w"), half, lr)
    step.append_op("sgd", Ref("b"), Ref("b@GRAD"), lr)
    trainer = transpile(program).trainer_program()
    assert trainer.variables["w"].attrs["grad"] == Ref("half")
    assert [op.reads for op in trainer.blocks["step"].ops if op.type == "send"] == [("half", "b@GRAD")]
    agrees_with_one_process(program)


def test_clipping_by_value_before_the_norm_and_behind_it() -> None:
    program, lr = by_hand()
    step, grads = program.blocks["step"], [Ref("w@GRAD"), Ref("b@GRAD")]
    for g in grads:
        step.append_op("clip_by_value", g, limit=0.3)
    norm = step.append_op("squared_norms", *grads)
    for g in grads:
        step.append_op("clip_by_global_norm", g, norm, max_norm=0.5)
        step.append_op("clip_by_value", g, limit=0.2)
    for name in ("w", "b"):
        step.append_op("sgd", Ref(name), Ref(f"{name}@GRAD"), lr)
    blocks = transpile(program).pserver_program(0).blocks
    assert [op.type for op in blocks["reduce"].ops] == ["clip_by_value", "clip_by_value", "squared_norms"]
    assert [op.type for op in blocks["optimize.b"].ops] == ["clip_by_global_norm", "clip_by_value", "sgd"]
    agrees_with_one_process(program)


def test_gradients_that_share_memory_with_what_changes_later() -> None:
    """A gradient is sent behind the last op that changes its memory, under whatever name."""
    program, lr = by_hand()
    step = program.blocks["step"]
    view = step.append_op("aten.view", Ref("w@GRAD"), (200,), outputs="flat")
    step.append_op("aten.mul_.Tensor", view, 2.0, outputs=[None])
    for name in ("w", "b"):
        step.append_op("sgd", Ref(name), Ref(f"{name}@GRAD"), lr)
    types = [op.type for op in transpile(program).trainer_program().blocks["step"].ops]
    assert types.index("send") > types.index("aten.mul_.Tensor")
    agrees_with_one_process(program)


def test_a_buffer_is_sent_behind_its_last_update() -> None:
    program = linear()
    seen = program.variable("seen", Type("float32", ()), Kind.BUFFER, torch.zeros(()))
    step = program.blocks["step"]
    ops, step.ops = step.ops, []
    step.append_op("aten.add_.Tensor", seen, 1.0, outputs=[None])
    first, step.ops = step.ops, []
    step.append_op("aten.mul_.Tensor", seen, 2.0, outputs=[None])
    step.ops = [*first, *ops[:3], *step.ops, *ops[3:]]
    types = [op.type for op in transpile(program).trainer_program().blocks["step"].ops]
    assert types.index("send") == types.index("aten.mul_.Tensor") + 1
    agrees_with_one_process(program)


def test_scalar_state_is_one_number_for_every_slice() -> None:
    program = linear(optimizer=graphft.Adam())
    program.values["w@step"] = torch.tensor(5.0)
    job = transpile(program, pservers=2)
    for i in range(2):
        assert job.pserver_program(i).variables[f"w@slice{i}@step"].shape == ()
        assert job.pserver_program(i).values[f"w@slice{i}@step"].item() == 5.0
        assert job.pserver_program(i).variables[f"w@slice{i}@exp_avg"].type.numel in (128, 72)
    agrees_with_one_process(program)


def test_a_scalar_parameter_has_flat_state() -> None:
    program = linear(optimizer=graphft.Adam(), minimized=False)
    scale = program.variable("scale", Type("float32", ()), Kind.PARAM, torch.ones(()))
    step = program.blocks["step"]
    step.append_op("aten.mul.Tensor", scale, Ref("loss"), outputs="scaled")
    step.append_op("aten.clone", Ref("loss"), outputs="scale@GRAD")
    graphft.minimize(program, graphft.Adam())
    shard = transpile(program).pserver_program(0)
    assert (shard.variables["scale"].shape, shard.variables["scale@exp_avg"].shape) == ((1,), (1,))
    assert shard.variables["scale@step"].shape == ()
    agrees_with_one_process(program)


def rate_of_the_batch() -> Program:
    program, _ = by_hand()
    step = program.blocks["step"]
    rate = step.append_op("aten.sum", step.append_op("aten._to_copy", Ref("x"), dtype=graphft.Sym("torch.float64")))
    for name in ("w", "b"):
        step.append_op("sgd", Ref(name), Ref(f"{name}@GRAD"), rate)
    return program


def appended(program: Program, op: str, *operands: Ref) -> Program:
    program.blocks["step"].append_op(op, *operands)
    return program


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (rate_of_the_batch, "schedule-input"),
        (lambda: appended(linear(), "sgd", Ref("b"), Ref("b@GRAD"), Ref("lr")), "updated-twice"),
        (lambda: appended(linear(clip=graphft.ClipByGlobalNorm(1.0)), "squared_norms", Ref("b@GRAD")), "two-norms"),
        (lambda: appended(linear(), "aten.neg", Ref("global_step")), "state-on-trainer"),
    ],
)
def test_what_no_shard_could_run(make: Callable[[], Program], rule: str) -> None:
    with pytest.raises(ProgramError, match=rf"^error\[{rule}\]"):
        transpile(make())
