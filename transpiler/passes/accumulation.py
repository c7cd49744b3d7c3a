"""Several batches between two pushes."""

from __future__ import annotations

from dataclasses import replace

from graphft.ir import Block, Kind, Operator, Ref, registry
from graphft.optim.training import GLOBAL_STEP
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import EVOLVING, buckets_of, gradient_of, pushed_as
from graphft.transpiler.optimization import with_operands
from graphft.transpiler.programs import Programs, chunk_variable

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
