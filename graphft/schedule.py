"""Learning rates as functions of the step.

A schedule is a function from the number of completed steps (a 0-dim float64 tensor, 0 at the first step) to the
learning rate. It is traced once into `aten.*` ops, which compute `%lr` from `%global_step` in the program, so it
uses torch functions, not Python's control flow or `math`, on the step:

    graphft.minimize(program, graphft.SGD(lr=schedule.linear_warmup(schedule.cosine(0.1, 10_000), 500)))
    graphft.minimize(program, graphft.SGD(lr=lambda step: 0.1 * torch.rsqrt(torch.clamp(step, min=1.0))))
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphft.errors import GraphftError
from graphft.ir import Arg, Block, Kind, Ref, Type, Variable
from graphft.symbolic import literal

Schedule = Callable[[Tensor], Tensor]
Rate = float | Schedule
"""A constant learning rate, or a schedule."""


def constant(lr: float) -> Schedule:
    """`lr` at every step."""
    return lambda step: torch.full((), lr, dtype=torch.float64)


def linear_warmup(schedule: Rate, steps: int) -> Schedule:
    """`schedule`, times a factor that rises from 1/steps at step 0 to 1 at step steps - 1, and stays there.

    The schedule's own steps count from 0 as well, warm-up included.
    """
    _positive("linear_warmup", steps=steps)
    return lambda step: at(schedule, step) * torch.clamp((step + 1) / steps, max=1.0)


def cosine(lr: float, total_steps: int, min_lr: float = 0.0) -> Schedule:
    """From `lr` at step 0 along half a cosine to `min_lr` at step `total_steps`, and `min_lr` from then on."""
    _positive("cosine", total_steps=total_steps)
    return lambda step: min_lr + (lr - min_lr) * (
        (1 + torch.cos(torch.clamp(step, max=total_steps) * (math.pi / total_steps))) / 2)


def step(lr: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """`lr`, times `gamma` after every `step_size` steps."""
    _positive("step", step_size=step_size)
    return lambda step: lr * torch.pow(gamma, torch.floor(step / step_size))


def exponential(lr: float, gamma: float) -> Schedule:
    """`lr`, times `gamma` after every step."""
    return lambda step: lr * torch.pow(gamma, step)


def at(schedule: Rate, step: Tensor) -> Tensor:
    """The learning rate at `step`, as a 0-dim float64 tensor. Raises GraphftError for any other shape."""
    value = schedule(step) if callable(schedule) else schedule
    lr = value.to(torch.float64) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)
    if lr.shape != ():
        raise GraphftError(f"{_name(schedule)} gives a learning rate of shape {tuple(lr.shape)}, expected a scalar ()",
                           rule="schedule", help="give one number per step; parameter groups have one schedule each")
    return lr


def trace(schedule: Rate) -> GraphModule:
    """The graph of `schedule` as a function of an int64 step. Raises GraphftError where it cannot be traced."""

    def lr(step: Tensor) -> Tensor:
        return at(schedule, step.to(torch.float64))

    try:
        graph = make_fx(lr)(torch.zeros((), dtype=torch.int64))
    except RuntimeError as error:
        if "_local_scalar_dense" not in str(error):
            raise
        raise GraphftError(
            f"{_name(schedule)} uses the step as a Python number (if, min, int, math.*, item)", rule="schedule",
            help="use torch functions on the step: torch.where(step < 10, a, b) for if, torch.cos for math.cos, "
                 "torch.clamp for min and max") from error
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise GraphftError(f"{_name(schedule)} draws random numbers ({node.target})", rule="schedule",
                               help="compute the learning rate from the step alone, so that every shard gets the same")
    for k in (0, 1, 1000):
        step = torch.tensor(k)
        if not torch.equal(graph(step), lr(step)):
            raise GraphftError(f"{_name(schedule)} does not depend on the step through torch functions alone: its "
                               f"traced ops give {graph(step).item()} at step {k}, it gives {lr(step).item()}",
                               rule="schedule", help="keep no state between calls, and use no numpy on the step")
    return graph


def append(block: Block, graph: GraphModule, step: Variable, name: str) -> Variable:
    """Appends the ops of a traced schedule to `block`; returns the variable with the learning rate, called `name`."""
    results: dict[Node, Ref] = {}
    output = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            results[node] = step.ref
        elif node.op == "get_attr":
            value = getattr(graph, str(node.target)).detach().clone()
            dtype = str(value.dtype).removeprefix("torch.")
            results[node] = block.program.variable(block.program.fresh(f"{name}_const"), Type(dtype, value.shape),
                                                   Kind.CONST, value).ref
        elif node.op == "call_function":
            target = str(node.target).removesuffix(".default")
            out = name if node is output else block.program.fresh(f"{name}_{target.split('.')[1].strip('_')}")
            results[node] = block.append_op(target, *(_operand(a, results) for a in node.args), outputs=out,
                                            **{k: _operand(v, results) for k, v in node.kwargs.items()}).ref
    return block.program.variables[results[output].name]


def _operand(value: object, results: dict[Node, Ref]) -> Arg:
    if isinstance(value, Node):
        return results[value]
    if isinstance(value, (list, tuple)):
        return tuple(_operand(v, results) for v in value)
    return literal(value)


def _positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if value <= 0:
            raise GraphftError(f"schedule {name}: {key} must be positive, got {value}", rule="schedule",
                               help="give a number of steps")


def _name(schedule: Rate) -> str:
    code = getattr(schedule, "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
    return f"the learning-rate schedule {getattr(schedule, '__qualname__', schedule)}{where}"


__all__ = ["Rate", "Schedule", "append", "at", "constant", "cosine", "exponential", "linear_warmup", "step", "trace"]
