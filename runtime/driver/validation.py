"""The loss and metrics of data that is not trained on."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from graphft.data import DataSpec
from graphft.errors import UsageError
from graphft.ir import Kind, Program
from graphft.loss_results import check_metrics, reported
from graphft.runtime.callbacks.callbacks import check_names
from graphft.runtime.data import open_reader
from graphft.runtime.driver.checks import is_whole
from graphft.runtime.executor import Executor
from graphft.weights import load_weights

_TRAINS = ("aten.native_dropout", "aten.bernoulli", "aten._native_batch_norm_legit", "aten.native_batch_norm")
"""Operators that a model in eval mode does not have."""


@dataclass(frozen=True)
class Validation:
    """`program`: of the same model, built in eval mode, `graphft.build(model.eval(), loss_fn, inputs)`: dropout is off
    there, and batch norm uses its statistics. `data`: of `graphft.arrays`, `files` or `dataset`; every record counts
    once, and the last batches may be shorter than `batch_size`."""

    program: Program
    data: DataSpec
    batch_size: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program) or not isinstance(self.data, DataSpec):
            raise UsageError(
                f"Validation needs a program and data, got {type(self.program).__name__}, {type(self.data).__name__}",
                rule="option",
                help="Validation(graphft.build(model.eval(), loss_fn, inputs), graphft.arrays(x=x, chunk_size=64))",
            )
        if not is_whole(self.batch_size, 1):
            raise UsageError(
                f"batch_size is {self.batch_size!r}, expected a number, 1 or more", rule="option", help="256, or so"
            )
        check_metrics(self.program)
        check_names(reported(self.program))
        if random := [op.type for op in self.program.blocks["step"].ops if op.type in _TRAINS]:
            raise UsageError(
                f"the program to validate with was built in train mode: it has {random[0]}",
                rule="option",
                help="graphft.build(model.eval(), ...): dropout is off there, and batch norm uses its own statistics",
            )
        inputs = {v.name for v in self.program.of_kind(Kind.INPUT)}
        if missing := inputs - set(self.data.columns):
            raise UsageError(
                f"the program to validate with has input {min(missing)}, and the data no such column",
                rule="columns",
                help=f"its columns are {', '.join(self.data.columns)}",
            )

    def run(self, state: Mapping[str, Tensor], device: str) -> dict[str, float]:
        """Means over all records, with these weights. In this process. Raises GraphftError[weights] if they do not fit
        the program."""
        program, names = load_weights(self.program, state), reported(self.program)
        inputs, executor = [v.name for v in program.of_kind(Kind.INPUT)], Executor(device)
        totals: dict[str, float] = {}
        seen, size = 0, min(self.batch_size, max(chunk.records for chunk in self.data.chunks))
        with tempfile.TemporaryDirectory() as folder:
            self.data.store(folder)
            reader = open_reader(self.data, folder, 0)
            for chunk, count in enumerate(self.data.batches(size)):
                for batch in range(count):
                    columns = reader.batch(0, chunk, batch, size)
                    found = executor.run(program, {name: columns[name] for name in inputs}, names)
                    samples = len(columns[inputs[0]])
                    seen += samples
                    for name in names:
                        totals[name] = totals.get(name, 0.0) + float(found[name]) * samples
        means = {name: total / seen for name, total in totals.items()}
        return {"loss": means.pop(names[0]), **means, "samples": seen}
