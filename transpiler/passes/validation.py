"""Validates the model while it is trained; training waits for what a validation decides."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphft.capture.loss_fn import reported
from graphft.ir import Kind, Operator, Program, Ref, Type, Variable, registry
from graphft.reducers import columns_of
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import RATE_SCALE, VALIDATE
from graphft.transpiler.programs import Programs, chunk_variable, order_blocks


def insert_decisions(job: Programs, config: JobConfig) -> None:
    """Begins a trainer's step with `etcd_await_validation`: a step waits for a validation that decides how it goes on.
    With `plateau`, block `schedule` multiplies each learning rate by %rate_scale, which checkpoints have."""
    assert config.validate is not None
    job.trainer.blocks["step"].ops.insert(0, Operator("etcd_await_validation"))
    for program in job.pservers if config.validate.plateau is not None else ():
        _scale_rates(program)


def _scale_rates(program: Program) -> None:
    block = program.block("schedule")
    updates = [op for name, b in program.blocks.items() if name.startswith("optimize.") for op in b.ops]
    rates = dict.fromkeys(op.operand("lr").name for op in updates if _has_rate(op))
    scale = program.variable(RATE_SCALE, Type("float64", ()), Kind.STATE, torch.ones((), dtype=torch.float64))
    for rate in rates:
        base = program.fresh(f"{rate}_unscaled")
        program.variable(base, program.variables[rate].type)
        for op in block.ops:
            op.outputs = tuple(base if name == rate else name for name in op.outputs)
        block.ops.append(Operator("aten.mul.Tensor", (Ref(base), scale.ref), {}, (rate,)))
    program.blocks["serve"].ops[-1].attrs["scaled_rates"] = True


def _has_rate(op: Operator) -> bool:
    return any(slot.name == "lr" for slot in registry.require(op).slots)


def insert_validation(job: Programs, config: JobConfig) -> None:
    """Makes block `validate` of the evaluation: it gets a batch of a range that this process holds, reads its columns
    and the weights of the checkpoint that is validated, computes, and adds the results to the range. Shards take a
    checkpoint at each step that is validated."""
    program = job.evaluation
    assert program is not None
    assert config.validate is not None
    program.attrs["role"] = "evaluation"
    columns = tuple(v.name for v in columns_of(program))
    weights = tuple(v.name for v in program.variables.values() if _is_of_model(v, job.trainer))
    chunk = chunk_variable(program, "range")
    for name in weights:
        program.variables[name] = replace(program.variables[name], kind=Kind.TEMP, attrs={})
        program.values.pop(name, None)
    step, terms = program.blocks.pop("step"), {"timeout": float(config.chunk_timeout)}
    program.block(VALIDATE).ops = [
        Operator("etcd_get_range", (), terms | {"max_failures": config.max_failures}, (chunk,)),
        Operator("read_chunk", (Ref(chunk),), {"columns": columns}, columns),
        *([Operator("read_check_point", (Ref(chunk),), {"names": weights}, weights)] if weights else []),
        *step.ops,
        Operator("etcd_complete_range", (Ref(chunk), *map(Ref, reported(program)))),
    ]
    order_blocks(program, VALIDATE)
    every = config.validate.every
    for shard in job.pservers:
        shard.blocks["serve"].ops[-1].attrs.update({"validate_every": every} if every else {"validate_passes": True})


def _is_of_model(variable: Variable, trainer: Program) -> bool:
    """True for what the model's state_dict has, which comes from the checkpoint. A constant is the evaluation's own,
    but for a buffer that is not saved, and changes in training."""
    own = trainer.variables.get(variable.name)
    if own is None:
        return False
    if variable.kind is Kind.CONST:
        return own.kind is Kind.BUFFER and own.attrs.get("persistent") is False
    kinds = (Kind.PARAM, Kind.BUFFER, Kind.FROZEN)
    return variable.kind in kinds and own.kind in kinds
