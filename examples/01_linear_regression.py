"""Linear regression on scikit-learn's diabetes data, its program written by hand, op by op.

The same `Program` that capture makes from a torch model: variables, and a block of operators.
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import graphft
from graphft import Kind, Program, Type


def build() -> Program:
    """prediction = x @ weight + bias; loss = the mean squared error."""
    program = Program("diabetes")
    x = program.variable("x", Type("float32", ("batch", 10)), Kind.INPUT)
    y = program.variable("y", Type("float32", ("batch", 1)), Kind.INPUT)
    weight = program.variable("weight", Type("float32", (10, 1)), Kind.PARAM, torch.zeros(10, 1))
    bias = program.variable("bias", Type("float32", (1,)), Kind.PARAM, torch.zeros(1))
    step = program.block("step")
    prediction = step.append_op("aten.addmm", bias, x, weight, outputs="prediction")
    error = step.append_op("aten.sub.Tensor", prediction, y, outputs="error")
    squared = step.append_op("aten.mul.Tensor", error, error, outputs="squared")
    loss = step.append_op("aten.mean", squared, outputs="loss")
    graphft.append_backward(loss)
    graphft.minimize(program, graphft.SGD(lr=0.1, momentum=0.9))
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()

    features, target = load_diabetes(return_X_y=True)
    x = torch.tensor(features, dtype=torch.float32)
    x = x / x.std(0)
    y = torch.tensor(target, dtype=torch.float32)[:, None] / 100

    program = build()
    print(program)
    data = graphft.arrays(x=x, y=y, chunk_size=111)
    job = graphft.transpile(
        program,
        trainers=2,
        pservers=1,
        sync=True,
        ft=True,
        data=data,
        batch_size=37,
        epochs=10 if options.small else options.passes,
    )
    result = job.run()

    state = load_file(result.model)
    prediction = torch.addmm(state["bias"], x, state["weight"])
    closed_form = LinearRegression().fit(x.numpy(), y.numpy())
    print(
        f"R2     {r2_score(y, prediction):.4f}  this program\n"
        f"       {closed_form.score(x.numpy(), y.numpy()):.4f}  least squares in closed form\n"
        f"model  {result.model}"
    )


if __name__ == "__main__":
    main()
