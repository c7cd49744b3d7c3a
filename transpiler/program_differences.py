"""How two programs of users differ, in words: parameters, the model's ops, the optimizer and its learning rate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from graphft.errors import ProgramError
from graphft.ir import Arg, Kind, Operator, Program, registry
from graphft.ir.printer import format_operator, format_value
from graphft.transpiler.optimization import Optimization, find_optimization

LISTED = 3
"""Differences of one kind that are named; of more, their number is told."""
_CONSTANT = "aten.full"
_NAME = re.compile(r"%([\w.@$/-]+)")
"""A variable, as the printer writes it."""
_SHOWN = (Kind.INPUT, Kind.PARAM, Kind.BUFFER)


def program_differences(old: Program, new: Program) -> list[str]:
    """How `new` differs from `old`, both as `minimize` left them; [] if no difference of these kinds is found.

    The first op that differs is named, with the line of the script if it is known: the ops behind it, backward's among
    them, mostly follow from it.
    """
    try:
        before, after = (find_optimization(p.blocks["step"]) for p in (old, new))
    except (ProgramError, KeyError):  # by hand, in some form that transpile would refuse
        return _model(old, new, [], [])
    optimizer = [*_rates(old, new, before, after), *_updates(before, after), *_clips(before, after)]
    return _listed(optimizer) + _model(old, new, before.ops, after.ops)


def _model(old: Program, new: Program, old_rest: list[Operator], new_rest: list[Operator]) -> list[str]:
    """Variables, and the first op; `rest`: ops that are not the model's."""
    variables = _listed(_variables(old, new))
    ops = [_without(p, rest) for p, rest in ((old, old_rest), (new, new_rest))]
    for i, (a, b) in enumerate(zip_longest(*ops)):
        # What a variable's shape is stands in its readers' arguments, too: then only another kind of op tells more.
        if a is None or b is None or a.type != b.type or (not variables and a != b):
            return [*variables, f"op {i} of the step: {_op(a, b, old)} -> {_op(b, a, new)}{_line(b)}"]
    return variables


def _without(program: Program, rest: list[Operator]) -> list[Operator]:
    left = {id(op) for op in rest}
    return [op for op in program.blocks["step"].ops if id(op) not in left] if "step" in program.blocks else []


def _op(op: Operator | None, other: Operator | None, program: Program) -> str:
    """An op, as short as tells it from the other one."""
    if op is None:
        return "none"
    return op.type if other is None or other.type != op.type else format_operator(op, program).strip()


def _line(op: Operator | None) -> str:
    return f" ({op.loc})" if op is not None and op.loc else ""


def _variables(old: Program, new: Program) -> Iterator[str]:
    """Inputs, parameters and buffers that came, went, or have another type."""
    types = [{v.name: (v.kind, str(v.type)) for v in p.variables.values() if v.kind in _SHOWN} for p in (old, new)]
    before, after = types
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        if a != b:
            kind = (b or a or (Kind.PARAM, ""))[0]
            yield f"{kind.value} {name} {a[1] if a else 'none'} -> {b[1] if b else 'none'}"


def _rates(old: Program, new: Program, before: Optimization, after: Optimization) -> Iterator[str]:
    """Learning rates: their constants, or the first op of their schedules that differs."""
    texts = [_texts(ops, p) for ops, p in ((before.schedule, old), (after.schedule, new))]
    for i, (a, b) in enumerate(zip_longest(before.schedule, after.schedule)):
        if a is not None and b is not None and texts[0][i] == texts[1][i]:
            continue
        if a is not None and b is not None and a.type == b.type == _CONSTANT and a.outputs == b.outputs:
            yield f"{a.writes[0]} {format_value(a.args[1])} -> {format_value(b.args[1])}"
            continue
        if a is not None and b is not None and a.type == b.type and (values := _literals(a, b)):
            yield f"the learning rate's schedule, {' -> '.join(values)} in {a.type.removeprefix('aten.')}"
        elif before.schedule and after.schedule:
            rates = [_rate(found.schedule) for found in (before, after)]
            yield f"lr {rates[0]} -> {'another schedule' if rates[0] == rates[1] else rates[1]}"
        return


def _literals(a: Operator, b: Operator) -> list[str]:
    """The first argument in which they differ that is no variable, of both; [] if there is none."""
    for pair in zip(a.args, b.args, strict=False):
        one, other = map(format_value, pair)
        if one != other and not (one + other).count("%"):
            return [one, other]
    return []


def _rate(schedule: Sequence[Operator]) -> str:
    computed = [op for op in schedule if op.outputs]  # the number of steps is counted in place
    constant = len(computed) == 1 and computed[0].type == _CONSTANT
    return format_value(computed[0].args[1]) if constant else "a schedule"


def _texts(ops: Sequence[Operator], program: Program) -> list[str]:
    """The ops in words; what they compute on the way is numbered: its names depend on all that was captured before."""
    numbers = {name: f"%{i}" for i, name in enumerate(name for op in ops for name in op.writes)}
    kept = {name for name in numbers if program.variables[name].kind.persistent}
    known = {name: number for name, number in numbers.items() if name not in kept}
    return [_NAME.sub(lambda m: known.get(m[1], m[0]), format_operator(op, program).strip()) for op in ops]


def _updates(before: Optimization, after: Optimization) -> Iterator[str]:
    """Optimizers and their attributes, of the parameters that both programs have."""
    for parameter in before.updates.keys() & after.updates.keys():
        a, b = before.updates[parameter], after.updates[parameter]
        if a.type != b.type:
            yield f"optimizer {a.type} -> {b.type}"
        else:
            yield from _attributes(a, b)
            if a.reads[2:3] != b.reads[2:3]:
                yield f"learning rate of {parameter} {a.operand('lr').name} -> {b.operand('lr').name}"


def _clips(before: Optimization, after: Optimization) -> Iterator[str]:
    kinds = []
    for found in (before, after):
        ops = [op for ops in (*found.before_norm.values(), *found.clips.values()) for op in ops]
        kinds.append({op.type: op for op in ops})
    for kind in kinds[0].keys() | kinds[1].keys():
        a, b = kinds[0].get(kind), kinds[1].get(kind)
        if a is None or b is None:
            yield f"{kind} {'none' if a is None else 'on'} -> {'none' if b is None else 'on'}"
        else:
            yield from _attributes(a, b, f"{kind} ")


def _attributes(a: Operator, b: Operator, prefix: str = "") -> Iterator[str]:
    given = [_with_defaults(op) for op in (a, b)]
    for name in dict.fromkeys([*given[0], *given[1]]):
        values = [g.get(name) for g in given]
        if repr(values[0]) != repr(values[1]):
            yield f"{prefix}{name} {' -> '.join(map(format_value, values))}"


def _with_defaults(op: Operator) -> dict[str, Arg]:
    defaults: dict[str, Any] = {a.name: a.default for a in registry.require(op).attrs if not a.required}
    return {**defaults, **op.attrs}


def _listed(found: Iterable[str]) -> list[str]:
    """Each once, and of many their number."""
    each = sorted(dict.fromkeys(found))
    return each[:LISTED] + ([f"{len(each) - LISTED} more of the kind"] if len(each) > LISTED else [])
