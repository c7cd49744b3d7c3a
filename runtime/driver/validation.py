"""A Trainer's `validate()`: the loss and metrics of data that is not trained on, computed in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from graphft.capture.loss_fn import reported
from graphft.capture.weights import load_weights, saved_variables
from graphft.ir import Program
from graphft.reducers import columns_of
from graphft.runtime.data import IN_ORDER, open_reader
from graphft.runtime.execute.input_checks import check_dims
from graphft.runtime.executor import Executor
from graphft.runtime.protocol.decisions import RangeResult, sums_as_text, totals
from graphft.runtime.validation.results import RangeResults, named
from graphft.transpiler.validation import ValidationConfig


def validate_here(
    program: Program, config: ValidationConfig, state: Mapping[str, Tensor], device: str
) -> dict[str, float]:
    """The same as `transpile(validate=)` comes to, to the bit, with these weights; and the number of `samples`. Raises
    GraphftError[weights] if they do not fit the program."""
    read = {name for v in saved_variables(program) for name in (v.name, *v.attrs.get("tied", ()))}
    program = load_weights(program, {name: value for name, value in state.items() if name in read})
    names = reported(program)
    inputs, executor = [v.name for v in columns_of(program)], Executor(device)
    done: list[RangeResults] = []
    with tempfile.TemporaryDirectory() as folder:
        config.data.store(folder)
        reader = open_reader(config.data, folder, 0)
        for chunk, first, count in config.ranges:
            done.append(RangeResults(program))
            for batch in range(first, first + count):
                columns = reader.batch(IN_ORDER, chunk, batch, config.size)
                if "assume" in program.attrs:
                    check_dims(program, {name: columns[name] for name in inputs})
                found = executor.run(program, {name: columns[name] for name in inputs}, names)
                done[-1].add(config.samples(chunk, batch), [found[name] for name in names])
    records = {n: RangeResult(one.samples, sums_as_text(one.sums)) for n, one in enumerate(done)}
    total = totals(records, len(done))
    assert total is not None
    entries = {name: torch.cat([t for one in done for t in one.entries[name]]) for name in done[0].entries}
    return named(program, total[1], entries) | {"samples": total[0]}
