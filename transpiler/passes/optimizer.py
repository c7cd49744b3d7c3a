"""Moves what evolves the parameters to the shards that own them; or, in mode geo_sgd, leaves it with the trainers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Program, Ref, Type, Variable, backup_name, grad_name, registry
from graphft.ir.literals import dtype_of
from graphft.ops.gradients import UNIT
from graphft.optim.training import GLOBAL_STEP
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import (
    ALL_NORMS,
    EVOLVING,
    Slice,
    all_slices,
    buckets_of,
    gradient_of,
    pushed_as,
    slices_of,
)
from graphft.transpiler.optimization import Optimization, find_optimization, scalar_state, with_operands
from graphft.transpiler.programs import Programs, chunk_variable


def split_optimizer(job: Programs, config: JobConfig) -> None:
    """Moves optimizer, clip and schedule ops from the trainer to a new program per pserver; starts the coordinator's.

    A pserver has, of each slice s that it owns, the slice as a flat variable, its optimizer state, the input `s@GRAD`
    with the reduced contributions, and a block `optimize.<s>`. Block `schedule` computes the learning rates, block
    `reduce` the shard's part of the global norm (docs/transpiler.md has its layout); async, it clips by its own
    norm. Trainers keep no values but those of frozen variables and constants."""
    source = job.trainer
    found = find_optimization(source.blocks["step"])
    _start_roles(job, found, config)
    for program in job.pservers:
        owned = _owned(source, program)
        for s in owned:
            _declare(program, source, s, found.state_of(source.variables[s.variable]))
        if found.schedule:
            block = program.block("schedule")
            for op in found.schedule:
                _copy_variables(program, source, (*op.reads, *op.writes))
                block.ops.append(with_operands(op, {}))
        if found.norm is not None:
            _reduce(program, source, found, found.norm, config)
        for s in owned:
            _optimize(program, source, found, s, config.sync)
    _leave_to_shards(source, found)


def keep_optimizer(job: Programs, config: JobConfig) -> None:
    """Leaves the optimizer with the trainers, for mode geo_sgd: a pserver applies 1 / `trainers` of `s@GRAD`, by which
    a trainer moved its copy of slice s, and assigns buffers."""
    source = job.trainer
    found = find_optimization(source.blocks["step"])
    own = {state.name for name in found.updates for state in found.state_of(source.variables[name])}
    for v in source.of_kind(Kind.STATE):
        if v.name not in own and v.name != GLOBAL_STEP:
            text = f"state %{v.name} belongs to no parameter: each trainer would have its own"
            help = f"let the schedule depend on %{GLOBAL_STEP} alone, or use another mode"
            raise ProgramError(text, block=source.blocks["step"], rule="local-state", help=help)
    _start_roles(job, found, config)
    for program in job.pservers:
        for s in _owned(source, program):
            _declare(program, source, s)
            block, operands = program.block(f"optimize.{s.name}"), (Ref(s.name), Ref(grad_name(s.name)))
            if source.variables[s.variable].kind is Kind.PARAM:
                block.append_op("apply_delta", *operands, scale=1 / config.trainers)
            else:
                block.append_op("assign", *operands)
    _drop_values(source)


def compensate_delay(job: Programs, config: JobConfig) -> None:
    """Compensates each gradient by `dc_asgd` on the pservers, before anything else sees it (mode dc_asgd).

    `s@BACKUP`, an input, is slice s as it was when the gradient was computed. With `dc_decay` there is one more state,
    `s@mean_square`."""
    for program in job.pservers:
        reduced = program.blocks["reduce"].ops if "reduce" in program.blocks else []
        ahead: dict[str, list[Operator]] = {}
        for s in program.of_kind(Kind.PARAM):
            backup = program.variable(backup_name(s.name), s.type, Kind.INPUT)
            operands = [program.variables[grad_name(s.name)].ref, s.ref, backup.ref]
            if config.dc_decay:
                zeros = torch.zeros([int(d) for d in s.shape], dtype=dtype_of(s.type))
                operands.append(program.variable(f"{s.name}@mean_square", s.type, Kind.STATE, zeros).ref)
            attrs = {"strength": float(config.dc_lambda), "decay": float(config.dc_decay)}
            in_norm = any(grad_name(s.name) in op.reads for op in reduced)
            block = "reduce" if in_norm else f"optimize.{s.name}"
            ahead.setdefault(block, []).append(Operator("dc_asgd", tuple(operands), attrs))
        for name, ops in ahead.items():
            program.blocks[name].ops[:0] = ops


# -- the trainer ------------------------------------------------------------------------------------------------------


def _start_roles(job: Programs, found: Optimization, config: JobConfig) -> None:
    """Names the trainer's program and each gradient that has not its parameter's name; begins the other programs."""
    trainer = job.trainer
    trainer.name, trainer.attrs["role"] = "trainer", "trainer"
    for parameter, op in found.updates.items():
        gradient = op.operand("grad")
        if gradient.name != grad_name(parameter):
            trainer.variables[parameter].attrs["grad"] = gradient
    job.pservers = tuple(Program(f"pserver{i}", {"role": "pserver", "index": i}) for i in range(config.pservers))
    job.coordinator = Program("coordinator", {"role": "coordinator"})


def _leave_to_shards(trainer: Program, found: Optimization) -> None:
    """Removes the optimization, and the temporaries, constants and state that no op uses any more."""
    step, moved = trainer.blocks["step"], {id(op) for op in found.ops}
    step.ops = [op for op in step.ops if id(op) not in moved]
    used = {n for b in trainer.blocks.values() for op in b.ops for n in (*op.reads, *op.writes)}
    trainer.variables = {
        n: v for n, v in trainer.variables.items() if n in used or v.kind not in (Kind.TEMP, Kind.CONST, Kind.STATE)
    }
    _drop_values(trainer)


def _drop_values(trainer: Program) -> None:
    kept = {v.name for v in trainer.variables.values() if v.kind not in EVOLVING}
    trainer.values = {name: value for name, value in trainer.values.items() if name in kept}


# -- pservers ---------------------------------------------------------------------------------------------------------


def _owned(source: Program, program: Program) -> list[Slice]:
    return [s for s in all_slices(source) if s.shard == program.attrs["index"]]


def _declare(program: Program, source: Program, s: Slice, states: Iterable[Variable] = ()) -> None:
    """Declares the slice, its optimizer state, and its gradient."""
    variable, values = source.variables[s.variable], source.values
    program.variable(s.name, Type(variable.dtype, (s.numel,)), variable.kind, _cut(values.get(variable.name), s))
    for state in states:
        value = values.get(state.name)
        if scalar_state(state, variable):
            program.variable(_state_name(state, s), state.type, Kind.STATE, value)
        else:
            program.variable(_state_name(state, s), Type(state.dtype, (s.numel,)), Kind.STATE, _cut(value, s))
    program.variable(grad_name(s.name), Type(variable.dtype, (s.numel,)), Kind.INPUT)


def _reduce(program: Program, source: Program, found: Optimization, norm: Operator, config: JobConfig) -> None:
    """Makes block `reduce`: what is clipped before the norm, then the norm's own part of this shard."""
    unit = math.gcd(norm.attrs.get("unit", UNIT), config.slice_unit)
    parameter = {op.operand("grad").name: name for name, op in found.updates.items()}
    order = [s for name in norm.reads for s in slices_of(source.variables[parameter[name]])]
    own = [s for s in order if s.shard == program.attrs["index"]]
    if not own:
        return
    block = program.block("reduce")
    for s in own:
        gradient = found.updates[s.variable].operand("grad").name
        for op in found.before_norm.get(gradient, ()):
            block.ops.append(with_operands(op, {gradient: grad_name(s.name)}))
    partials = block.append_op(norm.type, *(Ref(grad_name(s.name)) for s in own), unit=unit, outputs=norm.outputs)
    block.attrs["partials"] = partials.ref
    if config.sync:
        runs = _runs(order, unit)
        block.attrs["order"] = runs
        program.variable(ALL_NORMS, Type("float64", (sum(count for _, _, count in runs),)), Kind.INPUT)


def _optimize(program: Program, source: Program, found: Optimization, s: Slice, sync: bool) -> None:
    block = program.block(f"optimize.{s.name}")
    if s.variable not in found.evolvers:
        block.append_op("assign", Ref(s.name), Ref(grad_name(s.name)))
        return
    if s.variable not in found.updates:  # the loss scale: what trainers send back of it is not looked at
        block.ops.append(with_operands(found.evolvers[s.variable], {}))
        return
    update, variable = found.updates[s.variable], source.variables[s.variable]
    gradient = update.operand("grad").name
    names = {s.variable: s.name, gradient: grad_name(s.name)}
    names |= {v.name: _state_name(v, s) for v in found.state_of(variable)}
    if found.norm is not None and sync:
        names[str(found.norm.outputs[0])] = ALL_NORMS
    for op in (*found.clips.get(gradient, ()), update):
        _copy_variables(program, source, (n for n in op.reads if n not in names))  # a constant learning rate
        moved = with_operands(op, names)
        registry.infer(moved, block)
        block.ops.append(moved)


def _state_name(state: Variable, s: Slice) -> str:
    return f"{s.name}@{state.name.removeprefix(f'{s.variable}@')}"


def _cut(value: torch.Tensor | None, s: Slice) -> torch.Tensor | None:
    """Returns the slice's elements; None for a program without values, which is rewritten for its text alone."""
    return None if value is None else value.detach().reshape(-1)[s.start : s.end].clone()


def _copy_variables(program: Program, source: Program, names: Iterable[str]) -> None:
    for name in names:
        if name not in program.variables:
            v = source.variables[name]
            program.variable(name, v.type, v.kind, source.values.get(name), **v.attrs)


def _runs(order: list[Slice], unit: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (shard, start, count) of the units of `order` among their shard's own, neighbours joined."""
    runs: list[tuple[int, int, int]] = []
    seen: dict[int, int] = {}
    for s in order:
        start, count = seen.get(s.shard, 0), -(-s.numel // unit)
        seen[s.shard] = start + count
        if runs and runs[-1][0] == s.shard:
            shard, first, before = runs.pop()
            runs.append((shard, first, before + count))
        else:
            runs.append((s.shard, start, count))
    return tuple(runs)


_QUEUE = ("get_chunk", "etcd_get_chunk", "etcd_complete_chunk", "get_task", "finish_task")
_OUTER = (*_QUEUE, "recv", "fetch_barrier", "send", "send_barrier")


def local_steps(job: Programs, config: JobConfig) -> None:
    """Moves what is computed for a batch from the trainer's step to block `local`, which `local_steps` runs for each of
    up to `count` batches of what the step claims and pushes: a unit.

    Mode half_async: `local` adds the gradients up in `%w@MEAN`, weighted by samples, which is sent. Mode geo_sgd: it
    evolves the trainer's copy of the parameters, and `%w@DELTA`, by how much they moved, is sent. A schedule's
    `%global_step` is then the batch's number in the job. Buffers are sent as they are after the unit's last batch."""
    program = job.trainer
    step, local = program.blocks["step"], program.block("local")
    local.ops = [op for op in step.ops if op.type not in _OUTER]
    outer = [op for op in step.ops if op.type in _OUTER]
    first = next(i for i, op in enumerate(outer) if op.type in ("send", "send_barrier"))
    step.ops, behind = outer[:first], outer[first:]
    (unit,) = step.ops[0].writes
    batch = chunk_variable(program, "batch")
    local.ops = [
        Operator("local_batch", (Ref(unit),), {}, (batch,)),
        *(with_operands(op, {unit: batch}) if unit in op.reads else op for op in local.ops),
    ]
    add = _add_up if config.mode == "half_async" else _move
    add(step, local, unit, batch, config.local_steps)
    buckets = {(b.shard, b.index): b for b in buckets_of(program)}
    for op in behind:
        if op.type == "send":
            bucket = buckets[op.attrs["shard"], op.attrs["bucket"]]
            op = replace(op, args=tuple(Ref(pushed_as(program.variables[s.variable])) for s in bucket.slices))
        step.ops.append(op)


def _add_up(step: Block, local: Block, unit: str, batch: str, count: int) -> None:
    program = step.program
    for v in program.of_kind(Kind.PARAM):
        mean, gradient = program.fresh(f"{v.name}@MEAN"), gradient_of(v)
        step.append_op("aten.zeros_like", v, outputs=mean)
        local.append_op("accumulate", Ref(mean), Ref(gradient), Ref(batch), Ref(unit))
        v.attrs["grad"] = Ref(mean)
    _run(step, local, unit, count)


def _move(step: Block, local: Block, unit: str, batch: str, count: int) -> None:
    _count_batches(local, batch)
    for op in step.ops:
        if op.type == "recv":
            op.attrs["refresh"] = True
    program, parameters = step.program, step.program.of_kind(Kind.PARAM)
    before = {v.name: step.append_op("aten.clone", v, outputs=program.fresh(f"{v.name}@OLD")) for v in parameters}
    _run(step, local, unit, count)
    for v in parameters:
        delta = step.append_op("aten.sub.Tensor", v, before[v.name], outputs=program.fresh(f"{v.name}@DELTA"))
        v.attrs["grad"] = delta.ref


def _run(step: Block, local: Block, unit: str, count: int) -> None:
    """Appends the op that runs `local`. Shared variables: what evolves, and what both blocks use."""
    here = {name for op in step.ops for name in op.writes}
    used = {name for op in local.ops for name in (*op.reads, *registry.writes_of(op))}
    shared = [
        v.name
        for v in step.program.variables.values()
        if v.name in used and v.name != unit and (v.kind in EVOLVING or v.name in here)
    ]
    step.append_op("local_steps", Ref(unit), *map(Ref, shared), block=local.name, count=count)


def _count_batches(local: Block, batch: str) -> None:
    """The step that a schedule reads comes from the batch; without one, nothing counts steps."""
    program, first = local.program, local.ops[0]
    ops = [op for op in local.ops[1:] if GLOBAL_STEP not in registry.writes_of(op)]
    used = any(GLOBAL_STEP in op.reads for op in ops)
    counter = program.variables.pop(GLOBAL_STEP, None)
    program.values.pop(GLOBAL_STEP, None)
    if used and counter is not None:
        program.variables[GLOBAL_STEP] = replace(counter, kind=Kind.TEMP)
        ops.insert(0, Operator("batch_number", (Ref(batch),), {}, (GLOBAL_STEP,)))
    local.ops = [first, *ops]
