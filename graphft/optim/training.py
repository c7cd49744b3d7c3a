"""`minimize` appends to a program what evolves its parameters.

Block `step` then ends with

    schedule ops           %lr (float64[]; %lr_1 ... where parameter groups differ) from %global_step
    clip ops               in place on the gradients
    one optimizer op per parameter: `adam(%w, %w@GRAD, %lr, *state) {...}`, in place on parameter and state
    update_scale(...)      with a `grad_scaler` (optim/grad_scaler.py)
    increment(%global_step)

`%global_step` (int64[]) counts completed steps. State variables are called `<parameter>@<state>`.

A torch.optim instance becomes parameter groups of graphft's optimizers. Options, hooks and a learning-rate scheduler
that a program would not follow are refused.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_hooks
from torch.optim.lr_scheduler import LRScheduler

from graphft import schedule
from graphft.capture.locations import error_line
from graphft.capture.tracing import Traced, emit, trace
from graphft.capture.weights import require_unchanged
from graphft.errors import GraphftError, ProgramError, UsageError, listed, shown_plainly
from graphft.ir import Block, Kind, Operator, Program, Ref, Type, Variable, grad_name
from graphft.ir.dependence import alias_classes
from graphft.ir.literals import dtype_of
from graphft.ir.symbolic import Symbols
from graphft.optim.grad_scaler import GradScaler, computes_half, find_seed, scale_gradients
from graphft.optim.optimizers import OPTIMIZERS, SCALAR_STATE, SGD, AdamW, Clip, ClipByValue, Group, Optimizer
from graphft.schedule import Rate

log = logging.getLogger("graphft")

GLOBAL_STEP = "global_step"
"""Name of the variable that counts completed steps."""


@shown_plainly
def minimize(
    program: Program,
    optimizer: Optimizer | torch.optim.Optimizer,
    clip: Clip | None = None,
    *,
    model: torch.nn.Module | None = None,
    grad_scaler: GradScaler | None = None,
) -> None:
    """Appends to block `step` what evolves the program's parameters (see the module's docstring).

    A torch.optim instance (SGD, Adam, AdamW, Adagrad, RMSprop) needs `model`, the module that the program was built
    from: its parameter groups, with their options and state, are taken over; parameters in no group become frozen.
    `grad_scaler`: scales the loss, for float16; the job must be sync, with `on_nonfinite="skip"`.
    Raises GraphftError, and leaves the program as it was, for what it cannot follow or compute.
    """
    if "step" not in program.blocks or GLOBAL_STEP in program.variables:
        what = "is minimized already" if "step" in program.blocks else "has no block step"
        raise ProgramError(
            f"program '{program.name}' {what}",
            rule="minimize",
            help="call minimize() once, after build() or append_backward()",
        )
    if model is not None:
        require_unchanged(program, model)
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = _groups_of(program, optimizer, model)
    elif isinstance(optimizer, Optimizer):
        groups = [Group(optimizer, tuple(v.name for v in program.of_kind(Kind.PARAM)))]
    else:
        raise _refused(
            f"minimize takes an optimizer, got {type(optimizer).__name__}",
            f"give one of graphft's, or of torch.optim's: {_NAMES}",
        )
    if not isinstance(clip, (Clip, type(None))):
        raise UsageError(
            f"a clip is expected, got {clip!r}",
            rule="optimizer-option",
            help="write graphft.ClipByGlobalNorm(1.0), or graphft.ClipByValue(limit)",
        )
    if not isinstance(grad_scaler, (GradScaler, type(None))):
        raise UsageError(
            f"a graphft.GradScaler is expected, got {type(grad_scaler).__module__}.{type(grad_scaler).__name__}",
            rule="optimizer-option",
            help="write grad_scaler=graphft.GradScaler(init_scale=2.0**16), with the options of torch.amp.GradScaler",
        )
    block, group_of = program.blocks["step"], {name: g for g in groups for name in g.parameters}
    parameters = [v for v in program.of_kind(Kind.PARAM) if v.name in group_of]
    _require_gradients(block, parameters)
    seed = find_seed(block, parameters) if grad_scaler is not None else None
    rates = {g.optimizer.lr: trace_schedule(g.optimizer.lr) for g in groups}

    if left_out := [v.name for v in program.of_kind(Kind.PARAM) if v.name not in group_of]:
        log.warning("parameters in no group of the optimizer will not train: %s", listed(left_out))
        for name in left_out:
            program.variables[name].kind = Kind.FROZEN
    if grad_scaler is None and computes_half(block):
        log.warning(
            "backward computes in float16 without a gradient scaler: small gradients become 0. Give minimize(..., "
            "grad_scaler=graphft.GradScaler()), or use bfloat16, which needs none"
        )
    update = scale_gradients(block, seed, grad_scaler, parameters) if grad_scaler and seed else None
    step = program.variable(GLOBAL_STEP, Type("int64", ()), Kind.STATE, torch.zeros((), dtype=torch.int64))
    lrs = {rate: append_schedule(block, traced, step, program.fresh("lr")) for rate, traced in rates.items()}
    _append_clip(block, clip, [program.variables[grad_name(v.name)] for v in parameters])
    for v in parameters:
        _append_update(block, v, group_of[v.name], lrs[group_of[v.name].optimizer.lr])
    block.ops += [update] if update is not None else []
    block.append_op("increment", step)
    if isinstance(optimizer, torch.optim.Optimizer):
        program.taken_over = (optimizer, _options_of(optimizer))


def tell_changed_optimizer(program: Program) -> None:
    """Warns if the torch.optim instance has other options or state now than `minimize` copied, or a scheduler."""
    if program.taken_over is not None:
        optimizer, options = program.taken_over
        try:
            changed = options != _options_of(optimizer)
        except GraphftError:
            changed = True
        if changed:
            log.warning(
                "the optimizer's options, groups, state or scheduler were changed after minimize(), which copied it: "
                "the job trains without that; make such changes before minimize()"
            )


def _require_gradients(block: Block, parameters: Iterable[Variable]) -> None:
    written = {name for op in block.ops for name in op.writes}
    missing = [v.name for v in parameters if grad_name(v.name) not in written]
    if missing:
        raise ProgramError(
            f"parameters without gradient: {', '.join(missing)}",
            rule="no-gradient",
            help="the loss does not depend on them: use them in the loss, or freeze them with "
            "requires_grad_(False) before build(); by hand, call append_backward(loss) first",
        )


def trace_schedule(rate: Rate) -> Traced:
    """Returns a schedule as a recorded function of the int64 step. Raises GraphftError where it cannot be recorded."""

    def lr(step: Tensor) -> list[Tensor]:
        return [schedule.at(rate, step.to(torch.float64))]

    symbols, name = Symbols(), schedule.describe(rate)
    try:
        traced = trace(lr, [symbols.tensor(Type("int64", ()))], symbols)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise schedule.bad_schedule(
            f"{name} cannot be traced ({error_line(error)}): {reason}",
            "use torch functions on the step, not Python's: torch.where(step < 10, a, b) for if, torch.cos for "
            "math.cos, torch.clamp for min and max",
        ) from error
    for node in traced.module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            help = "compute the learning rate from the step alone, so that every shard gets the same"
            raise schedule.bad_schedule(f"{name} draws random numbers ({node.target})", help)
    for k in (0, 1, 1000):
        (found,), (expected,) = traced.module(torch.tensor(k)), lr(torch.tensor(k))
        if not torch.equal(found, expected):
            what = (
                f"{name} does not depend on the step alone: at step {k} it gives {found.item()}, then {expected.item()}"
            )
            raise schedule.bad_schedule(what, "keep no state between calls, and use only torch functions on the step")
    (result,) = traced.results
    if result is None or result.op != "call_function":  # a tensor from outside, which has no op to name `%lr` after
        return trace_schedule(schedule.at(rate, torch.zeros((), dtype=torch.float64)).item())
    return traced


def append_schedule(block: Block, traced: Traced, step: Variable, name: str) -> Variable:
    """Appends a recorded schedule's ops to `block`; they compute variable `name`, which is returned, from `step`."""
    (result,) = traced.results
    assert result is not None
    emit(traced, block, [step.name], {result: name})
    return block.program.variables[name]


def _append_clip(block: Block, clip: Clip | None, grads: list[Variable]) -> None:
    if clip is None:
        return
    _own(block, grads)
    if isinstance(clip, ClipByValue):
        for g in grads:
            block.append_op("clip_by_value", g, limit=float(clip.limit))
    else:
        sqnorm = block.append_op("squared_norms", *grads, outputs=block.program.fresh("sqnorm"))
        for g in grads:
            block.append_op("clip_by_global_norm", g, sqnorm, max_norm=float(clip.max_norm))


def _own(block: Block, grads: Sequence[Variable]) -> None:
    """Gives gradients memory of their own, which clipping writes in place: those that may share theirs are copied."""
    memory = alias_classes(block)
    producers = {name: op for op in block.ops for name in op.writes}
    taken = {memory(name) for name in block.program.variables if name not in producers}
    taken |= {memory(name) for name, op in producers.items() if op.type.startswith("aten.expand")}
    for grad in grads:
        if memory(grad.name) in taken:
            _copy(block, grad, producers[grad.name])
        taken.add(memory(grad.name))


def _copy(block: Block, grad: Variable, producer: Operator) -> None:
    view = block.program.fresh(grad.name)
    block.program.variables[view] = replace(grad, name=view)
    producer.outputs = tuple(view if o == grad.name else o for o in producer.outputs)
    index = next(i for i, op in enumerate(block.ops) if op is producer)
    block.ops.insert(index + 1, Operator("aten.clone", (Ref(view),), {}, (grad.name,)))


def _append_update(block: Block, param: Variable, group: Group, lr: Variable) -> None:
    program, operands = block.program, []
    for name, fill in group.optimizer.state().items():
        state, type = f"{param.name}@{name}", Type("float32", ()) if name == SCALAR_STATE else param.type
        value = group.state.get(state)
        if value is None:
            value = torch.full([int(d) for d in type.shape or ()], fill, dtype=dtype_of(type))
        operands.append(program.variable(state, type, Kind.STATE, value))
    block.append_op(
        group.optimizer.op,
        param,
        program.variables[grad_name(param.name)],
        lr,
        *operands,
        **group.optimizer.attributes(),
    )


# -- torch.optim ------------------------------------------------------------------------------------------------

_NAMES = ", ".join(c.__name__ for c in OPTIMIZERS.values())


def _groups_of(program: Program, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> list[Group]:
    """The groups of `optimizer`, by the program's names of parameters, and their state; without frozen ones."""
    if model is None:
        what = "minimize needs the model to find the parameters of a torch.optim instance"
        raise _refused(what, "give minimize(..., model=model), the module of build()")
    _refuse_attached(optimizer)
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False) if n in program.variables}
    groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            what = f"the optimizer holds parameters that are not in the program, of shapes {unknown}"
            raise _refused(what, "build the program and the optimizer from the same model")
        trained = {names[id(p)]: p for p in group["params"] if program.variables[names[id(p)]].kind is Kind.PARAM}
        spec = _options(optimizer, group)
        state = {f"{n}@{k}": v for n, p in trained.items() for k, v in _state(spec, optimizer.state.get(p, {})).items()}
        groups.append(Group(spec, tuple(trained), state))
    return groups


def _options_of(optimizer: torch.optim.Optimizer) -> list[tuple[list[Any], Optimizer]]:
    """Returns for each group its options, and of each parameter how many states it has, and its step."""
    _refuse_attached(optimizer)
    states = [[optimizer.state.get(p, {}) for p in group["params"]] for group in optimizer.param_groups]
    found = [[(len(state), float(state.get("step", 0))) for state in group] for group in states]
    return [(s, _options(optimizer, group)) for s, group in zip(found, optimizer.param_groups, strict=True)]


def _options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Optimizer:
    name = type(optimizer).__name__
    spec = next((c for c in OPTIMIZERS.values() if c.torch_class is type(optimizer)), None)
    if spec is None:
        raise _refused(f"optimizer {name} is not supported", f"use one of {_NAMES}")
    if refused := [option for option in ("capturable", "differentiable") if group.get(option)]:
        raise _refused(f"{name}: option {refused[0]} is not supported", "leave it out")
    if group.get("decoupled_weight_decay"):
        spec = AdamW
    return spec(**{f.name: _value(group[f.name]) for f in fields(spec)})


def _refuse_attached(optimizer: torch.optim.Optimizer) -> None:
    """Raises GraphftError if something changes the optimizer's steps that a program does not know of."""
    for found in gc.get_objects():  # ReduceLROnPlateau leaves no trace in its optimizer
        if issubclass(type(found), LRScheduler) and vars(found).get("optimizer") is optimizer:
            raise _refused(
                f"a {type(found).__name__} of torch.optim.lr_scheduler is attached to the optimizer; a program would "
                "not follow it",
                "give the schedule as lr, in graphft's optimizer: graphft.AdamW(lr=graphft.schedule.cosine(1e-3, "
                "steps)), counted in steps of the job; docs/optimizers.md (Schedules) has torch's curves; instead of "
                "ReduceLROnPlateau: graphft.Validation(plateau=...)",
            )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    hooks += [*torch_hooks._global_optimizer_pre_hooks.values(), *torch_hooks._global_optimizer_post_hooks.values()]
    if hooks:
        raise _refused(
            f"the optimizer has a step hook, {getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}; a program "
            "would not call it",
            "remove the hook; clipping is an option of minimize, a schedule is given as lr",
        )


def _refused(what: str, help: str) -> GraphftError:
    return GraphftError(what, rule="optimizer-option", help=help)


def _value(option: Any) -> Any:
    if isinstance(option, (tuple, list)):
        return tuple(map(_value, option))
    return option.item() if isinstance(option, Tensor) else option


def _state(spec: Optimizer, state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter that torch has begun to train already."""
    begun = {k: state[k].detach().clone() for k in spec.state() if isinstance(state.get(k), Tensor)}
    if begun and isinstance(spec, SGD):  # torch tells the first step by the missing momentum buffer
        begun[SCALAR_STATE] = torch.ones(())
    if SCALAR_STATE in begun:
        begun[SCALAR_STATE] = begun[SCALAR_STATE].float().cpu()
    return begun
