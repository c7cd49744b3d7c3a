"""A worker: gets the numbers of chunks on its standard input, one a line, and answers each on its standard output.

Its first answer is that it is ready. What user code prints goes to its log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.errors import GraphftError, describe, plain_text
from graphft.ir import Kind, Program
from graphft.runtime.data import open_reader
from graphft.runtime.data.reader import IN_ORDER, Reader
from graphft.runtime.execute.whole_numbers import whole_numbers
from graphft.runtime.executor import Executor
from graphft.runtime.prediction.batches import filled
from graphft.runtime.prediction.work import Work
from graphft.runtime.process.role_process import EXIT_OK

RULE, HELP = "predict", "it is of the data, or of what the model computes"
"""Of an error that is none of ours."""
TEXT = 1000
"""Characters of each text of an answer: one write to a pipe is whole then."""


def serve(folder: Path) -> int:
    """Until its input ends. Returns the exit status."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        work, program = Work.open(folder)
        torch.set_num_threads(work.threads)
        reader = open_reader(work.data, folder, 0, 2)
        executor = Executor(work.device)
        _answer(answers, {})
        for line in sys.stdin:
            work.put(int(line), compute(work, program, reader, executor, int(line)))
            _answer(answers, {})
    except Exception as error:  # the user's data, and torch
        print(describe(error), file=sys.stderr)
        _answer(answers, _as_answer(error))
    return EXIT_OK


def compute(work: Work, program: Program, reader: Reader, executor: Executor, chunk: int) -> dict[str, Tensor]:
    """An entry for each record of the chunk, by result."""
    names: tuple[str, ...] = tuple(program.attrs["extras"])
    inputs = [v.name for v in program.of_kind(Kind.INPUT)]
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in range(-(-work.data.chunks[chunk].records // work.batch_size)):
        read = reader.batch(IN_ORDER, chunk, batch, work.batch_size)
        columns = {n: read[n] for n in inputs}
        records = len(columns[inputs[0]])
        try:
            found = executor.run(program, filled(program, columns, work.batch_size), names)
            for name in names:
                parts[name].append(found[name][:records].cpu())
        except Exception as error:
            numbers = reader.numbers(IN_ORDER, chunk, batch, work.batch_size)
            raise _of_records(error, columns, numbers, reader) from error
    return {name: torch.cat(part) for name, part in parts.items()}


def _of_records(
    error: Exception, columns: Mapping[str, Tensor], numbers: Sequence[int], reader: Reader
) -> GraphftError:
    """What failed of a batch, with its records, and between what their whole numbers are: an index may be too large."""
    found = whole_numbers(columns, lambda samples: reader.names([numbers[sample] for sample in samples]))
    rule, help = (error.rule, error.help) if isinstance(error, GraphftError) else (RULE, HELP)
    return GraphftError(f"in records {numbers[0]} to {numbers[-1]}{found}: {describe(error)}", rule=rule, help=help)


def _answer(descriptor: int, answer: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


def _as_answer(error: Exception) -> dict[str, Any]:
    rule, help = (error.rule, error.help) if isinstance(error, GraphftError) else (RULE, HELP)
    return {"error": plain_text(describe(error), TEXT), "rule": rule, "help": plain_text(help, TEXT)}
