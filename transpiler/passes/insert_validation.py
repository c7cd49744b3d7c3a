"""Validates the model while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphft.capture.loss_results import reported
from graphft.ir import Kind, Operator, Program, Ref, Type, Variable
from graphft.reducers import columns_of
from graphft.transpiler.programs import Programs, order_blocks

BLOCK = "validate"


@dataclass(frozen=True)
class InsertValidation:
    """The evaluation's block `step` becomes block `validate`, which trainers run for one batch after the other, beside
    the steps: it gets a batch of a range that this process holds, reads its columns and the weights of the checkpoint
    that is validated, computes, and adds the results to the range, which is complete with its last batch.

    Shards take a checkpoint at each step that is validated (`every` of them, and the last; 0: at the end of each pass),
    and whoever commits it opens the validation.
    """

    name: ClassVar[str] = "insert-validation"
    every: int = 0
    chunk_timeout: float = 60.0
    max_failures: int = 3

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        assert job.evaluation is not None
        self._validate(job.evaluation, job.trainer)
        for program in job.pservers:
            serve = program.blocks["serve"].ops[-1]
            serve.attrs.update({"validate_every": self.every} if self.every else {"validate_passes": True})
        return job

    def _validate(self, program: Program, trainer: Program) -> None:
        program.attrs["role"] = "evaluation"
        columns = tuple(v.name for v in columns_of(program))
        weights = tuple(v.name for v in program.variables.values() if self._is_of_model(v, trainer))
        chunk = program.fresh("range")
        program.variables[chunk] = Variable(chunk, Type("chunk"), Kind.TEMP, {}, program)
        for name in weights:
            program.variables[name] = replace(program.variables[name], kind=Kind.TEMP, attrs={})
            program.values.pop(name, None)
        step, block = program.blocks.pop("step"), program.block(BLOCK)
        block.ops = [
            Operator("etcd_get_range", (), self._terms(), (chunk,)),
            Operator("read_chunk", (Ref(chunk),), {"columns": columns}, columns),
            *([Operator("read_check_point", (Ref(chunk),), {"names": weights}, weights)] if weights else []),
            *step.ops,
            Operator("etcd_complete_range", (Ref(chunk), *map(Ref, reported(program)))),
        ]
        order_blocks(program, BLOCK)

    def _terms(self) -> dict[str, float | int]:
        return {"timeout": float(self.chunk_timeout), "max_failures": self.max_failures}

    @staticmethod
    def _is_of_model(variable: Variable, trainer: Program) -> bool:
        """What evolves, and what the model's state_dict has besides: it comes from the checkpoint, not from the model
        as it was when this program was captured. A constant is the evaluation's own, whatever the trained program calls
        so; but for a buffer that is not saved, and changes in training."""
        own = trainer.variables.get(variable.name)
        if own is None:
            return False
        if variable.kind is Kind.CONST:
            return own.kind is Kind.BUFFER and own.attrs.get("persistent") is False
        kinds = (Kind.PARAM, Kind.BUFFER, Kind.FROZEN)
        return variable.kind in kinds and own.kind in kinds
