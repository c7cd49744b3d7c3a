"""Several batches between two pushes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from graphft.ir import Block, Kind, Operator, Program, Ref, Type, Variable, registry
from graphft.optim.training import GLOBAL_STEP
from graphft.transpiler.layout import EVOLVING, Bucket, buckets_of, gradient_of, pushed_as
from graphft.transpiler.optimization import with_operands
from graphft.transpiler.programs import Programs

LOCAL = "local"
"""The block that computes one batch of a unit."""
_QUEUE = ("get_chunk", "etcd_get_chunk", "etcd_complete_chunk", "get_task", "finish_task")
_OUTER = (*_QUEUE, "recv", "fetch_barrier", "send", "send_barrier")


@dataclass(frozen=True)
class LocalSteps:
    """Moves what is computed for a batch from the trainer's step to block `local`, which `local_steps` runs for each of
    up to `count` batches of what the step claims and pushes: a unit.

    Mode half_async: `local` adds the gradients up in `%w@MEAN`, weighted by samples; that is sent. All are computed
    from the parameters that the step received. Mode geo_sgd: `local` holds the optimizer as well, and evolves the
    trainer's copy of the parameters, so each bucket is received anew; what is sent is `%w@DELTA`, by how much the copy
    moved. A schedule's `%global_step` is then the batch's number in the job, not a trainer's private count.

    Buffers are sent as they are after the unit's last batch, as in mode async after each.
    """

    name: ClassVar[str] = "local-steps"
    mode: Literal["half_async", "geo_sgd"] = "half_async"
    count: int = 1

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        program = job.trainer
        step, local = program.blocks["step"], program.block(LOCAL)
        local.ops = [op for op in step.ops if op.type not in _OUTER]
        step.ops, behind = _halves([op for op in step.ops if op.type in _OUTER])
        (unit,) = step.ops[0].writes
        batch = _per_batch(local, unit)
        if self.mode == "half_async":
            self._add_up(step, local, unit, batch)
        else:
            self._move(step, local, unit, batch)
        buckets = {(b.shard, b.index): b for b in buckets_of(program)}
        step.ops += [
            replace(op, args=_sent(buckets[op.attrs["shard"], op.attrs["bucket"]], program))
            if op.type == "send"
            else op
            for op in behind
        ]
        return job

    def _add_up(self, step: Block, local: Block, unit: str, batch: str) -> None:
        for v in step.program.of_kind(Kind.PARAM):
            mean, gradient = _name(step.program, v, "MEAN"), gradient_of(v)
            step.append_op("aten.zeros_like", v, outputs=mean)
            local.append_op("accumulate", Ref(mean), Ref(gradient), Ref(batch), Ref(unit))
            v.attrs["grad"] = Ref(mean)
        self._run(step, local, unit)

    def _move(self, step: Block, local: Block, unit: str, batch: str) -> None:
        _count_batches(local, batch)
        for op in step.ops:
            if op.type == "recv":
                op.attrs["refresh"] = True
        parameters = step.program.of_kind(Kind.PARAM)
        before = {v.name: step.append_op("aten.clone", v, outputs=_name(step.program, v, "OLD")) for v in parameters}
        self._run(step, local, unit)
        for v in parameters:
            delta = step.append_op("aten.sub.Tensor", v, before[v.name], outputs=_name(step.program, v, "DELTA"))
            v.attrs["grad"] = delta.ref

    def _run(self, step: Block, local: Block, unit: str) -> None:
        """Shared variables: what evolves, and what both blocks use."""
        here = {name for op in step.ops for name in op.writes}
        used = {name for op in local.ops for name in (*op.reads, *registry.writes_of(op))}
        shared = [
            v.name
            for v in step.program.variables.values()
            if v.name in used and v.name != unit and (v.kind in EVOLVING or v.name in here)
        ]
        step.append_op("local_steps", Ref(unit), *map(Ref, shared), block=LOCAL, count=self.count)


def _halves(ops: list[Operator]) -> tuple[list[Operator], list[Operator]]:
    """The step's frame: up to the unit's parameters, and from its sends on."""
    first = next(i for i, op in enumerate(ops) if op.type in ("send", "send_barrier"))
    return ops[:first], ops[first:]


def _per_batch(local: Block, unit: str) -> str:
    """The block begins by getting its batch, which its ops read in place of the unit."""
    program = local.program
    batch = program.fresh("batch")
    program.variables[batch] = Variable(batch, Type("chunk"), Kind.TEMP, {}, program)
    local.ops = [
        Operator("local_batch", (Ref(unit),), {}, (batch,)),
        *(with_operands(op, {unit: batch}) if unit in op.reads else op for op in local.ops),
    ]
    return batch


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


def _sent(bucket: Bucket, program: Program) -> tuple[Ref, ...]:
    return tuple(Ref(pushed_as(program.variables[s.variable])) for s in bucket.slices)


def _name(program: Program, parameter: Variable, what: str) -> str:
    return program.fresh(f"{parameter.name}@{what}")
