"""The verifier's shared rules: what holds for every program, whatever its role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphft.errors import GraphftError, ProgramError
from graphft.ir import GRAD, Block, Kind, Operator, Program, Ref, Sym, Type, refs, registry
from graphft.ir.dependence import def_use, flow
from graphft.ir.diagnostics import Check, Diagnostic, Options, rule
from graphft.ir.printer import DIM, KEYWORDS, LABEL, NAME, SYMBOL
from graphft.ir.registry import OpDef
from graphft.ir.views import unreachable

ROUND: dict[str, tuple[str, ...]] = {"reduce": ("schedule",), "optimize": ("schedule", "reduce"), "local": ("step",)}
"""Blocks that listen_and_serv runs one after the other in a round, or local_steps inside one: each also reads the
temporaries of these."""

_LITERALS = (type(None), bool, int, float, str)


# -- form -----------------------------------------------------------------------------------------------------


@rule("unprintable", "names, types and literals are such that the printed program reads back")
def _unprintable(program: Program, options: Options) -> Iterator[Diagnostic]:
    for v in program.variables.values():
        if not LABEL.fullmatch(v.name):
            yield Diagnostic(
                "unprintable",
                f"variable name {v.name!r} cannot be printed",
                "names are made of letters, digits and _ . @ / -",
            )
        if not _printable_type(v.type):
            yield Diagnostic(
                "unprintable",
                f"%{v.name} has type {v.type}, which cannot be printed",
                "a dtype is a name; a dimension is a number or an expression such as 2*batch",
            )
        yield from _literals(v.attrs, f"%{v.name}", None, None)
    yield from _literals(program.attrs, f"program {program.name}", None, None)
    for block in program.blocks.values():
        yield from _literals(block.attrs, f"block {block.name}", block, None)
        for i, op in enumerate(block.ops):
            if not NAME.fullmatch(op.type):
                yield Diagnostic(
                    "unprintable",
                    f"op name {op.type!r} cannot be printed",
                    "op names are made of letters, digits, _ and .",
                    block,
                    i,
                )
            yield from _literals({"operands": op.args, **op.attrs}, op.type, block, i)


def _literals(attrs: dict[str, Any], owner: str, block: Block | None, index: int | None) -> Iterator[Diagnostic]:
    for name, value in attrs.items():
        for bad in _not_literals(value):
            yield Diagnostic(
                "unprintable",
                f"{name} of {owner} holds {bad!r}, a {type(bad).__name__} that cannot be printed",
                "use None, bool, int, float, str, Sym, Ref or tuples of them",
                block,
                index,
            )


def _not_literals(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _not_literals(item)
    elif isinstance(value, Sym):
        if not SYMBOL.fullmatch(value.name) or value.name in KEYWORDS:
            yield value
    elif isinstance(value, Ref):
        if not LABEL.fullmatch(value.name):
            yield value
    elif type(value) not in _LITERALS:
        yield value


def _printable_type(type: Type) -> bool:
    return NAME.fullmatch(type.dtype) is not None and all(
        isinstance(d, int) or DIM.fullmatch(d) is not None for d in type.shape or ()
    )


@rule("redeclared", "a variable or block stands under its own name, once")
def _redeclared(program: Program, options: Options) -> Iterator[Diagnostic]:
    for what, table in (("variable", program.variables), ("block", program.blocks)):
        for key, item in table.items():
            if item.name != key:
                yield Diagnostic(
                    "redeclared",
                    f"{what} {item.name} stands under the name {key}: it is declared twice",
                    "declare each once, through program.variable() or program.block()",
                )


# -- ops against their definitions ----------------------------------------------------------------------------


def _ops(program: Program) -> Iterator[tuple[Block, int, Operator]]:
    for block in program.blocks.values():
        for i, op in enumerate(block.ops):
            yield block, i, op


def _known_ops(program: Program) -> Iterator[tuple[Block, int, Operator, OpDef]]:
    """The ops that are defined, and whose operands and results are declared: those that can be checked further."""
    declared = program.variables.keys()
    for block, i, op in _ops(program):
        definition = registry.get(op.type)
        if definition is not None and declared >= {*op.reads, *op.writes}:
            yield block, i, op, definition


@rule("unknown-op", "every op has a definition")
def _unknown_op(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, op in _ops(program):
        try:
            registry.require(op, block, i)
        except ProgramError as error:
            yield Diagnostic.of(error, block, i)


@rule("undeclared", "every operand and result is declared")
def _undeclared(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, op in _ops(program):
        for verb, names in (("reads", op.reads), ("writes", op.writes)):
            for name in names:
                if name not in program.variables:
                    yield Diagnostic(
                        "undeclared",
                        f"{op.type} {verb} %{name}, which is not declared",
                        "declare it at the top, or give its type where an op produces it",
                        block,
                        i,
                    )


def _definition_rule(id: str) -> Check:
    def check(program: Program, options: Options) -> Iterator[Diagnostic]:
        for block, i, op, definition in _known_ops(program):
            try:
                registry.check_operands(op, block, definition, i)
            except ProgramError as error:
                if error.rule == id:
                    yield Diagnostic.of(error, block, i)

    return check


for _id, _text in {
    "operands": "an op has as many operands as it has slots",
    "attribute": "an op's attributes are known, and none is missing",
    "attribute-type": "an attribute has its declared type",
}.items():
    rule(_id, _text)(_definition_rule(_id))


@rule("type-mismatch", "results have the types that their op infers; what inference itself refuses shows its own rule")
def _types(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, op, definition in _known_ops(program):
        try:
            registry.check_operands(op, block, definition, i)
        except ProgramError:
            continue  # reported by the rules above
        try:
            types = registry.infer(op, block)
        except GraphftError as error:
            yield Diagnostic.of(error, block, i)
            continue
        if len(types) != len(op.outputs):
            yield Diagnostic(
                "results",
                f"{op.type} has {len(types)} results, here it is given {len(op.outputs)} names",
                "name each result, or write _ for one not wanted",
                block,
                i,
            )
            continue
        for name, inferred in zip(op.outputs, types, strict=True):
            if name is not None and not _same_type(program.variables[name].type, inferred):
                yield Diagnostic(
                    "type-mismatch",
                    f"%{name} is declared {program.variables[name].type}, but {op.type} gives {inferred}",
                    "correct the declaration, or the op's operands",
                    block,
                    i,
                )


def _same_type(declared: Type, inferred: Type) -> bool:
    """Equal, where the expressions of symbolic dimensions are the same but for blanks."""
    return str(declared).replace(" ", "") == str(inferred).replace(" ", "")


# -- order ----------------------------------------------------------------------------------------------------


@rule("read-before-write", "a temporary is written before it is read")
def _read_before_write(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        given = _given(block)
        written = {name for op in block.ops for name in op.writes}
        for i, op in enumerate(block.ops):
            gradient = _gradient(op)
            for name in op.reads:
                if _is_temp(name, program) and name not in given | written and name not in gradient:
                    elsewhere = [b.name for b in program.blocks.values() if any(name in o.writes for o in b.ops)]
                    yield Diagnostic(
                        "read-before-write",
                        f"%{name} is read by {op.type}, but nothing "
                        + (
                            f"in block {block.name} writes it: it is a temporary of block {elsewhere[0]}"
                            if elsewhere
                            else "writes it"
                        ),
                        "produce it by an op before this one, or declare it as an input",
                        block,
                        i,
                    )


@rule("out-of-order", "an op stands behind the ops whose results it reads")
def _out_of_order(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, name, writer, cyclic in _late_writes(program):
        if not cyclic:
            yield Diagnostic(
                "out-of-order",
                f"%{name} is read by {block.ops[i].type}, but written only later, by op {writer}",
                "move the op behind it: views.topological_order gives an order",
                block,
                i,
            )


@rule("cycle", "no op waits for its own result")
def _cycle(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, name, writer, cyclic in _late_writes(program):
        if cyclic:
            yield Diagnostic(
                "cycle",
                f"%{name} is read by {block.ops[i].type}, and written by op {writer}, which in turn waits for it",
                "break the cycle: let one of them read another variable",
                block,
                i,
            )


def _late_writes(program: Program) -> Iterator[tuple[Block, int, str, int, bool]]:
    """(block, op, name, writer, whether they wait for each other) of each temporary read before it is written."""
    for block in program.blocks.values():
        first = {name: i for i, op in reversed(list(enumerate(block.ops))) for name in op.writes}
        known, late = _given(block), []
        for i, op in enumerate(block.ops):
            late += [(i, n, first[n]) for n in op.reads if _is_temp(n, program) and n not in known and n in first]
            known.update(op.writes)
        if late:
            import networkx as nx  # here: programs that are in order do without

            graph = flow(def_use(block))
            for i, name, writer in late:
                yield block, i, name, writer, nx.has_path(graph, i, writer)


def _given(block: Block) -> set[str]:
    """Temporaries that blocks which run before this one, in the same round, leave for it."""
    before = ROUND.get(block.name.split(".", 1)[0], ())
    return {n for b in block.program.blocks.values() if b.name in before for op in b.ops for n in op.writes}


def _is_temp(name: str, program: Program) -> bool:
    return name in program.variables and program.variables[name].kind is Kind.TEMP


@rule("redefined", "a temporary is the result of one op of its block")
def _redefined(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        by: dict[str, int] = {}
        for i, op in enumerate(block.ops):
            for name in op.writes:
                if name in by and _is_temp(name, program):
                    yield Diagnostic(
                        "redefined",
                        f"%{name} is the result of {op.type}, and of op {by[name]} before",
                        "give one of them another name",
                        block,
                        i,
                    )
                by.setdefault(name, i)


@rule("constant-write", "what never changes (frozen, const) is not written")
def _constant_write(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block, i, op in _ops(program):
        for name in dict.fromkeys(registry.writes_of(op)):
            v = program.variables.get(name)
            if v is not None and v.kind in (Kind.FROZEN, Kind.CONST):
                yield Diagnostic(
                    "constant-write",
                    f"{op.type} writes %{name}, which is {v.kind.value}: its value is "
                    "the same in every process and step",
                    "declare it as a buffer, or write to a copy",
                    block,
                    i,
                )


# -- gradients, values, dead ops ------------------------------------------------------------------------------


@rule("grad-shape", "the gradient of x, x@GRAD, has the type of x")
def _grad_shape(program: Program, options: Options) -> Iterator[Diagnostic]:
    for name, grad in program.variables.items():
        of = program.variables.get(name.removesuffix(GRAD))
        if name.endswith(GRAD) and of is not None and not _same_type(of.type, grad.type):
            yield Diagnostic(
                "grad-shape",
                f"%{name} is {grad.type}, but %{of.name} is {of.type}",
                "a gradient has its variable's shape and dtype",
            )


@rule("missing-gradient", "the gradient that an optimizer op reads is produced before it")
def _missing_gradient(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        written = _given(block) | {name for op in block.ops for name in op.writes}
        for i, op in enumerate(block.ops):
            for name in _gradient(op):
                if _is_temp(name, program) and name not in written:
                    yield Diagnostic(
                        "missing-gradient",
                        f"{op.type} reads %{name}, which nothing produces",
                        "does the loss depend on the parameter? call append_backward() first, or mark the "
                        "parameter as not trainable",
                        block,
                        i,
                    )


def _gradient(op: Operator) -> tuple[str, ...]:
    """Names in the `grad` slot of an optimizer op: one that writes its `param` slot."""
    definition = registry.get(op.type)
    if definition is None or "param" not in definition.writes:
        return ()
    return tuple(r.name for s, a in zip(definition.slots, op.args, strict=False) if s.name == "grad" for r in refs(a))


@rule("missing-value", "persistent variables have an initial value (asked for before a program runs)")
def _missing_value(program: Program, options: Options) -> Iterator[Diagnostic]:
    for v in program.variables.values() if options.require_values else ():
        if v.kind.persistent and v.name not in program.values:
            yield Diagnostic(
                "missing-value",
                f"{v.kind.value} %{v.name} has no initial value",
                "set program.values[name], or load the program together with its values",
            )


@rule("value-type", "an initial value has the type of its variable")
def value_types(program: Program, options: Options) -> Iterator[Diagnostic]:
    for name, value in program.values.items():
        v = program.variables.get(name)
        given = Type(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if v is None:
            yield Diagnostic(
                "value-type",
                f"there is a value for %{name}, which is not declared",
                "declare the variable, or remove its value",
            )
        elif v.type != given:
            yield Diagnostic(
                "value-type",
                f"%{name} is declared {v.type}, but its value is {given}",
                "correct the declaration, or the value",
            )


@rule("unreachable", "every op has an effect, or a result that reaches one (a warning, unless strict)")
def _unreachable(program: Program, options: Options) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        for i in unreachable(block, options.fetch):
            yield Diagnostic(
                "unreachable",
                f"nothing uses what {block.ops[i].type} computes",
                "remove the op, or fetch its result",
                block,
                i,
                "error" if options.strict else "warning",
            )
