"""Programs built op by op, backward included, whose text does not depend on what torch traces."""

from __future__ import annotations

from typing import Any

import torch

import graphft
from graphft.ir import Kind, Program, Type
from graphft.transpiler.job import Job


def linear(
    features: int = 200, optimizer: object = None, clip: object = None, minimized: bool = True, scaler: Any = None
) -> Program:
    """Linear regression: loss = mean((x w + b - y)^2), minimized by SGD."""
    program = Program("linear", {"loss": "loss"})
    torch.manual_seed(0)
    x = program.variable("x", Type("float32", ("batch", features)), Kind.INPUT)
    y = program.variable("y", Type("float32", ("batch", 1)), Kind.INPUT)
    w = program.variable("w", Type("float32", (features, 1)), Kind.PARAM, torch.randn(features, 1) / 10)
    b = program.variable("b", Type("float32", (1,)), Kind.PARAM, torch.zeros(1))
    step = program.block("step")
    predicted = step.append_op("aten.addmm", b, x, w, outputs="predicted")
    loss = step.append_op("aten.mse_loss", predicted, y, outputs="loss")
    one = step.append_op("aten.ones_like", loss, outputs="loss@GRAD")
    error = step.append_op("aten.mse_loss_backward", one, predicted, y, 1, outputs="predicted@GRAD")
    step.append_op("aten.sum.dim_IntList", error, [0], outputs="b@GRAD")
    step.append_op("aten.mm", step.append_op("aten.t", x), error, outputs="w@GRAD")
    if minimized:
        graphft.minimize(program, optimizer or graphft.SGD(lr=0.05, momentum=0.9), clip, grad_scaler=scaler)
    return program


def linear_job(records: int = 32, chunk: int = 8, features: int = 200, **options: Any) -> Job:
    """A job that trains it on zeros, with fault tolerance and in small slices."""
    x, y = torch.zeros(records, 1).expand(-1, features), torch.zeros(records, 1)
    given = {"data": graphft.arrays(chunk_size=chunk, x=x, y=y), "program": linear(features), "batch_size": 4}
    given |= {"trainers": 2, "ft": True, "slice_unit": 64, "min_block": 64}
    return graphft.transpile(**given | options)
